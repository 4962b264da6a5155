"""The loss that a client trains on, and the part of it that is reported."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from raypfl.common.errors import MethodError
from raypfl.common.user_code import where_defined
from raypfl.learning.objectives.batch import Batch
from raypfl.models.flat import FlatModel

LossFunction = Callable[..., Any]
"""A function ``loss(p, batch, **extras)`` of one client."""

_OPTIONS = (
    *("epochs", "steps", "batch_size", "lr", "optimizer", "train", "decay", "stream"),
    *("penalty", "correction", "perturb", "report"),
)
"""Named arguments of a training, to suggest for a misspelt one."""

ReportedLoss = LossFunction | Literal["loss"] | None
"""The value that a training reports: its loss, another function's value, or nothing."""


@dataclass(frozen=True)
class LocalLoss:
    """A function of one client's parameters and batch, with two values: the loss to descend and the loss to report.

    Attributes
    ----------
    model : the network; a separate `report` does not move its statistics.
    loss : the function ``loss(p, batch, **extras) -> scalar``; or one that returns a pair of scalars from one forward
        pass, the loss and a penalty that is not reported.
    penalty : a term that is added to the loss and not reported: ``penalty(p, batch, **extras) -> scalar``.
    report : the reported value: ``"loss"``, another function of the same form, or None for nothing.
    penalty_is_separate : whether the penalty is left out of the loss, since :meth:`separate_penalty` gives its
        gradient.
    """

    model: FlatModel
    loss: LossFunction
    penalty: LossFunction | None = None
    report: ReportedLoss = "loss"
    penalty_is_separate: bool = False

    def __call__(self, p: Tensor, batch: Batch, **extras: Any) -> tuple[Tensor, Tensor]:
        """Return the value to descend and the value to report, which is NaN if nothing is reported."""
        value, reported = self._total_and_reported(self._call(self.loss, p, batch, extras))
        if self.penalty is not None and not self.penalty_is_separate:
            value = value + _scalar(self.penalty, self._call(self.penalty, p, batch, extras))

        if self.report is None:
            return value, torch.full_like(value.detach(), torch.nan)
        if self.report == "loss":
            return value, reported
        with torch.no_grad(), self.model.side_call():
            other = self._call(self.report, p.detach(), batch, extras)
        return value, _scalar(self.report, other)

    def separated(self, p: Tensor, extras: Mapping[str, Any]) -> LocalLoss:
        """Return the loss without a penalty that does not depend on the batch; see :meth:`separate_penalty`.

        Under DP-SGD, such a penalty is added after the noise and is not clipped (docs/privacy.md). Where a step takes
        the gradient at a perturbed model, that of the penalty is still at the model itself.
        """
        if self.penalty is None:
            return self
        try:
            with torch.no_grad():
                self._penalty_without_batch(p, extras)
        except _BatchUsed:
            return self
        return replace(self, penalty_is_separate=True)

    def separate_penalty(self, p: Tensor, extras: Mapping[str, Any]) -> Tensor:
        """Return the value of a separate penalty; it has a gradient at ``p[P]``."""
        # 0 * p.sum(): autograd would fail for a penalty that does not depend on p.
        return self._penalty_without_batch(p, extras) + 0 * p.sum()

    def _penalty_without_batch(self, p: Tensor, extras: Mapping[str, Any]) -> Tensor:
        assert self.penalty is not None
        return _scalar(self.penalty, self._call(self.penalty, p, _NoBatch(), dict(extras)))

    def lacks_gradient(self, value: Tensor, reported: Tensor) -> bool:
        """Return whether the loss, without a penalty, has no gradient; `value` and `reported` are what it returned."""
        if self.penalty is not None and self.report == "loss" and not reported.requires_grad:
            return True
        return not value.requires_grad

    def warn_of_no_gradient(self) -> None:
        """Warn that training on the loss does nothing."""
        warnings.warn(
            f"{where_defined(self.loss)} does not depend on the parameters p that are trained, so its gradient is zero "
            "and it trains nothing. Compute it at p, as in clients.model(p, batch.x); if it is meant, add 0 * p.sum().",
            stacklevel=2,
        )

    def refuse_unknown(self, extras: Mapping[str, Any]) -> None:
        """Raise a MethodError for an extra that no function takes."""
        if not extras:
            return
        taken = self._extra_names or {self.loss: extras_of(self.loss)}
        unknown = sorted(set(extras).difference(*(extras if names is None else names for names in taken.values())))
        if unknown:
            option = get_close_matches(unknown[0], _OPTIONS, 1)
            remedy = f"did you mean {option[0]!r}?" if option else "give one a parameter of that name, or leave it out."
            raise MethodError(
                f"{unknown[0]!r} is not an option of the training, and neither the loss nor a penalty or report takes "
                f"it by name; {remedy}"
            )

    def _call(self, function: LossFunction, p: Tensor, batch: Any, extras: dict[str, Any]) -> Any:
        passed = self.extras_for(function, extras)
        try:
            return function(p, batch, **passed)
        except TypeError:
            # Reading a signature in every training, before the call, would take longer than a short step.
            try:
                inspect.signature(function).bind("p", "batch", **passed)
            except TypeError as error:
                raise MethodError(
                    f"{where_defined(function)} is called with ({', '.join(['p', 'batch', *passed])}), but: {error}. "
                    "Pass what a loss needs besides p and batch by name, as in clients.sgd(loss, start, anchor=theta)."
                ) from None
            raise

    @cached_property
    def _extra_names(self) -> dict[LossFunction, frozenset[str] | None]:
        """The extras that each function takes, None for all; empty if there is only the loss, which gets all extras."""
        functions = [function for function in (self.loss, self.penalty, self.report) if callable(function)]
        if len(functions) == 1:
            return {}
        return {function: extras_of(function) for function in functions}

    def extras_for(self, function: LossFunction, extras: dict[str, Any]) -> dict[str, Any]:
        """Return the extras that one of the functions takes."""
        names = self._extra_names.get(function)
        if names is None:
            return extras
        return {name: extra for name, extra in extras.items() if name in names}

    def _total_and_reported(self, returned: Any) -> tuple[Tensor, Tensor]:
        if isinstance(returned, tuple) and len(returned) == 2:
            loss = _scalar(self.loss, returned[0])
            return loss + _scalar(self.loss, returned[1]), loss
        loss = _scalar(self.loss, returned)
        return loss, loss


def _scalar(function: LossFunction, value: Any) -> Tensor:
    """Return what a loss returned; raise a MethodError unless it is a scalar."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value
    kind = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise MethodError(
        f"{where_defined(function)} returned {kind}; a loss must return one number for a client's batch, as a tensor "
        "without axes, such as batch.mean(values), which averages over its samples."
    )


class _BatchUsed(Exception):
    """A penalty depends on the batch."""


class _NoBatch:
    """In place of a batch; any use raises `_BatchUsed`."""

    def _use(self, *arguments: Any) -> Any:
        raise _BatchUsed

    __getattr__ = __getitem__ = __iter__ = __len__ = _use


def extras_of(function: LossFunction) -> frozenset[str] | None:
    """Return names of the parameters after ``p`` and ``batch``; None if the function takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters[2:])
