"""The way of clients' messages to the server: malicious clients change theirs, and a rule combines all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import AggregationError
from raypfl.common.messages import Scatter
from raypfl.common.user_code import refuse_result
from raypfl.federation.robustness.attacks import UpdateAttack, Updates
from raypfl.federation.robustness.rules import Aggregation

Kind = Literal["each", "sum", "mean"]


@dataclass(frozen=True)
class Messages:
    """One message of an exchange, as honest clients send it.

    Attributes
    ----------
    clients : the clients' numbers, ``int64[C]``.
    rows : ``[C, ...]``; zeros for a client that sent nothing.
    weights : ``float64[C]``, the weights in a mean; NaN for a client that sent nothing.
    argument : what the clients were sent under the message's name; None: nothing.
    generator : a generator for the attack's draws.
    """

    clients: np.ndarray
    rows: Tensor
    weights: np.ndarray
    argument: Any
    generator: torch.Generator

    @property
    def counts(self) -> np.ndarray:
        """Which clients' rows count, ``bool[C]``: a row that was not sent, or has a weight of 0, does not."""
        return self.weights > 0

    def before(self) -> Tensor:
        """Return what the clients were sent, ``[1, ...]`` or ``[C, ...]``; zeros if nothing of a message's shape."""
        argument = self.argument
        if isinstance(argument, Scatter) and argument.rows.shape == self.rows.shape:
            return argument.rows.detach().to(self.rows)
        if isinstance(argument, Tensor) and argument.shape == self.rows.shape[1:]:
            return argument.detach().to(self.rows)[None]
        return torch.zeros_like(self.rows[:1])


@dataclass(frozen=True)
class Wire:
    """An attack on messages and a rule that replaces their mean; either may be None.

    `malicious` : which clients are, ``bool[num_clients]``.
    """

    attack: UpdateAttack | None = None
    aggregation: Aggregation | None = None
    malicious: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def needs_rows(self) -> bool:
        """Whether the server needs each client's message, and not only their sum."""
        return self.attack is not None or self.aggregation is not None

    def refuse_unless_means(self, function: str, kinds: Mapping[str, str]) -> None:
        """Raise an AggregationError if there is a rule, but `function` returns messages that are not means."""
        if self.aggregation is None:
            return
        for name, kind in kinds.items():
            if kind != "mean":
                returned = "a row for each client" if kind == "each" else "a sum"
                raise AggregationError(
                    f"{function} returns {name!r} as {returned}, but aggregation replaces means only, so malicious "
                    f"clients could still decide this message. A method of your own can return {name!r} as a Mean; or "
                    "choose a method that returns means (fedavg, ditto, fedper, ...), or leave aggregation out."
                )

    def combine(self, kind: Kind, messages: Messages) -> Tensor:
        """Return the rows ``[C, ...]`` as they arrive or, for a sum or mean, their result, ``[...]``."""
        rows = self._attacked(messages)
        if kind == "each":
            return rows
        if kind == "sum":
            return rows.sum(0)
        if not rows.is_floating_point():
            rows = rows.double()
        if self.aggregation is None:
            weights = np.nan_to_num(messages.weights)
            return torch.tensordot(torch.from_numpy(weights).to(rows), rows, dims=1) / weights.sum()

        before = messages.before()
        if self.aggregation.bounds_updates and len(before) > 1:
            raise AggregationError(
                f"aggregation is {type(self.aggregation).__name__}, which bounds changes of what all clients were "
                "sent, but this method sends each client something of its own. Choose another rule, such as median."
            )
        counts = torch.from_numpy(messages.counts)
        combined = self.aggregation.combine(_flat(rows)[counts], before[0].flatten())
        if not isinstance(combined, Tensor) or combined.numel() != rows[0].numel():
            must_return = f"one row, as a client sends it: {[rows[0].numel()]}"
            refuse_result(self.aggregation.combine, combined, must_return)
        return combined.reshape(rows.shape[1:])

    def _attacked(self, messages: Messages) -> Tensor:
        """Return the rows ``[C, ...]`` with those of malicious clients forged."""
        can_be_forged = messages.rows.is_floating_point() and messages.rows.numel() > 0
        if self.attack is None or not can_be_forged:
            return messages.rows
        is_malicious = torch.from_numpy(self.malicious[messages.clients] & messages.counts)
        if not is_malicious.any():
            return messages.rows
        is_honest = torch.from_numpy(messages.counts) & ~is_malicious

        rows = _flat(messages.rows)
        before = _flat(messages.before()).expand_as(rows)
        malicious = rows[is_malicious] - before[is_malicious]
        honest = rows[is_honest] - before[is_honest]
        forged = self.attack.forge(Updates(honest, malicious, messages.generator))
        if not isinstance(forged, Tensor) or forged.shape != malicious.shape:
            must_return = f"a row for each malicious client of the round: {list(malicious.shape)}"
            refuse_result(self.attack.forge, forged, must_return)

        attacked = rows.clone()
        attacked[is_malicious] = before[is_malicious] + forged.to(rows.dtype)
        return attacked.view_as(messages.rows)


def _flat(rows: Tensor) -> Tensor:
    """Return rows ``[C, ...]`` as ``[C, P]``."""
    return rows.reshape(len(rows), -1)
