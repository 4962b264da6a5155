"""The loss that a client trains on, and the part of it that is reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from raypfl.common.errors import MethodError
from raypfl.learning.objectives.batch import Batch
from raypfl.models.flat import FlatModel

LossFunction = Callable[..., Any]
ReportedLoss = LossFunction | Literal["loss"] | None


@dataclass(frozen=True)
class LocalLoss:
    """A function of one client's parameters and batch, with two values: the loss to descend and the loss to report.

    Attributes
    ----------
    model : the network; a separate `report` does not move its statistics.
    loss : ``loss(p, batch, **extras) -> scalar``; or a pair of scalars from one forward pass, the loss and a penalty
        that is not reported.
    penalty : ``penalty(p, batch, **extras) -> scalar``, added to the loss and not reported.
    report : what is reported: ``"loss"``, another function of the same form, or None for nothing.
    apart : whether the penalty is left out of the loss, since :meth:`pull` gives its gradient.
    """

    model: FlatModel
    loss: LossFunction
    penalty: LossFunction | None = None
    report: ReportedLoss = "loss"
    apart: bool = False

    def __call__(self, p: Tensor, batch: Batch, **extras: Any) -> tuple[Tensor, Tensor]:
        """The value to descend and the value to report, which is NaN if nothing is reported."""
        value, reported = self._parted(self.loss(p, batch, **self._for(self.loss, extras)))
        if self.penalty is not None and not self.apart:
            value = value + self.penalty(p, batch, **self._for(self.penalty, extras))
        if self.report is None:
            return value, torch.full_like(value.detach(), torch.nan)
        if self.report == "loss":
            return value, reported
        with torch.no_grad(), self.model.side_call():
            return value, self.report(p.detach(), batch, **self._for(self.report, extras))

    def for_samples(self, p: Tensor, extras: Mapping[str, Any]) -> LocalLoss:
        """The loss of single samples: a penalty that does not look at the batch is apart from it."""
        if self.penalty is None:
            return self
        try:
            with torch.no_grad():
                self._penalty_alone(p, extras)
        except _Looked:
            return self
        return replace(self, apart=True)

    def pull(self, p: Tensor, extras: Mapping[str, Any]) -> Tensor:
        """The value of a penalty that is apart; it has a gradient at ``p[P]``."""
        return self._penalty_alone(p, extras) + 0 * p.sum()

    def _penalty_alone(self, p: Tensor, extras: Mapping[str, Any]) -> Tensor:
        assert self.penalty is not None
        nothing: Any = _Nothing()
        return self.penalty(p, nothing, **self._for(self.penalty, dict(extras)))

    def refuse_unknown(self, extras: Mapping[str, Any]) -> None:
        """Raise a MethodError for an extra that no function takes."""
        taken = {name for names in self._names.values() for name in (extras if names is None else names)}
        if self._names and (strange := sorted(set(extras) - taken)):
            raise MethodError(
                f"Neither the loss nor its penalty or report takes {strange[0]!r}, which is passed to them by name; "
                "give one of them a parameter of that name, or leave it out."
            )

    @cached_property
    def _names(self) -> dict[LossFunction, frozenset[str] | None]:
        """The extras that each function takes, None for all; empty if there is only the loss, which gets all extras."""
        functions = [f for f in (self.loss, self.penalty, self.report) if callable(f)]
        return {f: _extras_of(f) for f in functions} if len(functions) > 1 else {}

    def _for(self, function: LossFunction, extras: dict[str, Any]) -> dict[str, Any]:
        names = self._names.get(function)
        return extras if names is None else {name: extra for name, extra in extras.items() if name in names}

    @staticmethod
    def _parted(returned: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(returned, tuple):
            return returned, returned
        loss, added = returned
        return loss + added, loss


class _Looked(Exception):
    """A penalty looks at the batch."""


class _Nothing:
    """In place of a batch that must not be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise _Looked

    def __getitem__(self, index: Any) -> Any:
        raise _Looked

    def __iter__(self) -> Any:
        raise _Looked

    def __len__(self) -> int:
        raise _Looked


def _extras_of(function: LossFunction) -> frozenset[str] | None:
    """Names of the parameters after ``p`` and ``batch``; None if the function takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters[2:])
