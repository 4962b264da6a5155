"""Keys of a group's training steps, by which plans of earlier rounds are found."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypfl.common.messages import PerClient
from raypfl.learning.loss import LocalLoss
from raypfl.learning.optimizers import Perturb, Update
from raypfl.learning.recording.captured import Unknown, captured
from raypfl.models.extras import Extras, Other
from raypfl.models.row_number import RowNumber


def key_of_steps(loss: LocalLoss, update: Update, extras: Extras, options: Any) -> tuple[Hashable, list[Tensor]] | None:
    """Return a key that is equal for trainings with the same operations, and the tensors that their functions reach.

    None if the operations may depend on more.

    `options` : what else the operations depend on.
    """
    if update.sample_rule is not None:
        return None
    functions = [loss.loss, loss.penalty, loss.report, update.optimizer, update.optimizer.step_, update.perturb]
    numbers = {"lr": update.lr, "weight_decay": update.weight_decay, "clip_norm": update.clip_norm}
    # Numbers that each client has of its own are inputs of the step, not part of the key.
    numbers |= dict.fromkeys(update.by_row)
    return _key(loss, [*functions, numbers, options], extras)


def key_of_gradients(loss: LocalLoss, perturb: Perturb | None, extras: Extras) -> tuple[Hashable, list[Tensor]] | None:
    """Return a key as :func:`key_of_steps` does, of gradients without a step."""
    return _key(loss, [loss.loss, loss.penalty, loss.penalty_is_separate, loss.report, perturb], extras)


def _key(loss: LocalLoss, values: Sequence[Any], extras: Extras) -> tuple[Hashable, list[Tensor]] | None:
    kind_of_extra: dict[str, Any] = {}
    for name, extra in extras.items():
        if isinstance(extra, Other):
            kind_of_extra[name] = ("model", extra.model, isinstance(extra.theta, PerClient))
        elif isinstance(extra, RowNumber):
            kind_of_extra[name] = ("number",)
        elif isinstance(extra, Tensor):
            kind_of_extra[name] = ("tensor", isinstance(extra, PerClient))
        else:
            kind_of_extra[name] = ("value", extra)
    try:
        return captured([*values, torch.get_default_dtype(), kind_of_extra], loss.model.modules)
    except Unknown:
        return None


def shared_tensors(extras: Extras) -> dict[str, Tensor]:
    """Return the tensors among the extras that all clients share, by name."""
    tensors = {}
    for name, extra in extras.items():
        tensor = extra.theta if isinstance(extra, Other) else extra
        if isinstance(tensor, Tensor) and not isinstance(tensor, PerClient):
            tensors[f"extra {name}"] = tensor
    return tensors


def numbered(name: str, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return tensors by name and number: ``name 0``, ``name 1`` and so on."""
    return {f"{name} {i}": tensor for i, tensor in enumerate(tensors)}
