"""How a function of one client runs for a group: on the executor that was chosen or, where it cannot, more plainly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raypfl.clients.context import Context
from raypfl.models.extras import Extras
from raypfl.objectives.batch import Batch
from raypfl.training.executor import Executor
from raypfl.training.loss import Loss
from raypfl.training.sequential import Sequential
from raypfl.training.vectorised import Vectorised


class FallbackWarning(UserWarning):
    """Clients run in a plainer way than the executor that was chosen, for torch cannot run a function so."""

    BECAUSE = " torch says: "


def executor_for(
    context: Context, function: Loss, at: Tensor, some: Callable[[int], Batch], extras: Extras, train: bool
) -> Executor:
    """The context's executor, unless this function computes something else on padded batches.

    ``some(n)`` gives at most n samples of the first client.
    """
    executor = context.executor
    if not isinstance(executor, Vectorised):
        return executor
    because = executor.unfit_for_padding(function, at, some(context.training.batch_size), extras, train)
    if because is None:
        return executor
    loss = getattr(function, "loss", function)
    warnings.warn(f"The function {getattr(loss, '__qualname__', loss)} {because}", stacklevel=4)
    return context.one_by_one


def run_or_fall_back(context: Context, executor: Executor, work: Callable[[Executor], Any]) -> tuple[Any, Executor]:
    """The result of `work` and the executor that it ran on: a plainer one, with a warning, if it runs on that alone.

    Raises
    ------
    RuntimeError : as the plainest way raises it, if no way is good.
    """
    try:
        return work(executor), executor
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        plainer, what = _plainer(context, executor)
        if plainer is None:
            raise
        said = str(error).partition("\n")[0]
    result = run_or_fall_back(context, plainer, work)
    warnings.warn(f"A function of this method {what}.{FallbackWarning.BECAUSE}{said}", FallbackWarning, stacklevel=4)
    return result


def _plainer(context: Context, executor: Executor) -> tuple[Executor | None, str]:
    """A way that asks less of a function, and what it means that it takes this one."""
    if isinstance(executor, Vectorised):
        return context.one_by_one, "cannot be vectorised, so clients run one by one"
    if isinstance(executor, Sequential) and executor.precision.channels_last:
        return context.unlaid, "does not work on images channels last, so they stay as they are"
    return None, ""
