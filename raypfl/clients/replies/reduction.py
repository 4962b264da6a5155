"""What a group sends back: its clients' rows, reduced where the clients are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.common.counting import counted
from raypfl.common.errors import MethodError
from raypfl.common.messages import Each, Mean, Sum, bytes_charged, numbers_charged, unmarked


@dataclass(frozen=True)
class Value:
    """One value of a reply.

    Attributes
    ----------
    kind : ``each`` (rows per client), or a partial ``sum`` or ``mean`` with its total `weight`.
    array : the rows, or their partial sum.
    weight : the total weight of a mean.
    numbers, num_bytes : how many numbers and bytes each client sends, ``int64[K]``; zeros if the value is not charged.
    masked : the dtype of the sum without its masks; None: there are no masks.
    contributors : under masks, the number of clients whose rows are not all zeros.
    can_be_empty : whether a mean without weight is left out of the reply.
    weights : the weight of each row, ``float64[K]``, if the rows of a sum or mean are sent as they are; None: they were
        added.
    """

    kind: Literal["each", "sum", "mean"]
    array: np.ndarray
    weight: float
    numbers: np.ndarray
    num_bytes: np.ndarray
    masked: torch.dtype | None = None
    contributors: int = 0
    can_be_empty: bool = False
    weights: np.ndarray | None = None

    @property
    def has_rows(self) -> bool:
        """Whether `array` has a row for each client."""
        return self.kind == "each" or self.weights is not None


def logged_means(logged: Mapping[str, Tensor]) -> dict[str, Value]:
    """Sum the numbers that clients logged; NaN stands for a client without one."""
    values = {}
    for name, rows in logged.items():
        numbers = rows.double()[~rows.isnan()]
        if len(numbers):
            not_charged = np.zeros(len(numbers), np.int64)
            values[name] = Value("mean", numbers.sum().cpu().numpy(), len(numbers), not_charged, not_charged)
    return values


def reduced(function: str, name: str, value: object, num_clients: int, keeps_rows: bool = False) -> Value:
    """Reduce a returned value to one row for the group, or keep its rows if it is `Each` or if `keeps_rows`.

    `function` describes the client function that returned it, for errors.

    Raises
    ------
    MethodError : if the name is no text, or the value has no row, or its weights no number, for each client.
    """
    if not isinstance(name, str):
        raise MethodError(f"{function} returned a value named {name!r}; names in a reply are text, such as '{name}'.")
    if not isinstance(value, Mean | Sum | Each):
        kind_of_value = "bare tensor" if isinstance(value, Tensor) else type(value).__name__
        raise MethodError(f"{function} returned {name!r} as a {kind_of_value}; wrap it in Mean, Sum or Each.")
    rows = unmarked(value.rows).detach()
    if rows.dim() == 0 or len(rows) != num_clients:
        raise MethodError(
            f"{function} returned {name!r} of shape {tuple(rows.shape)}, but the group has "
            f"{counted(num_clients, 'client')}: its first axis must run over them."
        )

    numbers = numbers_charged(name, value.charged, num_clients, rows[0].numel())
    num_bytes = bytes_charged(name, value, numbers)
    # Half precision is too coarse for sums, and NumPy has no bfloat16.
    if rows.dtype == torch.bfloat16 or (rows.dtype == torch.float16 and not isinstance(value, Each)):
        rows = rows.float()
    if isinstance(value, Each):
        return Value("each", rows.cpu().numpy(), 0.0, numbers, num_bytes)
    if isinstance(value, Sum):
        if keeps_rows:
            return Value("sum", rows.cpu().numpy(), 0.0, numbers, num_bytes, weights=np.ones(num_clients))
        return Value("sum", rows.sum(0).cpu().numpy(), 0.0, numbers, num_bytes)

    weight, weights_on_host = _weights(function, name, value, num_clients)
    if not rows.is_floating_point():
        # In the rows' own type, weights would become whole numbers too, and sums could overflow.
        is_exact = value.weight is None and rows.dtype != torch.bool
        rows = rows.long() if is_exact else rows.double()
    if keeps_rows:
        array = rows.cpu().numpy()
        weights = weights_on_host.numpy()
        return Value("mean", array, 0.0, numbers, num_bytes, can_be_empty=value.can_be_empty, weights=weights)

    weighted_sum = torch.tensordot(weight.to(rows), rows, dims=1).cpu().numpy()
    total = float(weights_on_host.sum())
    return Value("mean", weighted_sum, total, numbers, num_bytes, can_be_empty=value.can_be_empty)


def _weights(function: str, name: str, mean: Mean, num_clients: int) -> tuple[Tensor, Tensor]:
    """Return the weights ``[K]`` of a mean's rows, where they are and as ``float64[K]`` in the host's memory."""
    if mean.weight is None:
        equal = torch.ones(num_clients, dtype=torch.float64)
        return equal, equal
    if not isinstance(mean.weight, Tensor):
        raise MethodError(
            f"The weight of Mean {name!r}, which {function} returned, is a {type(mean.weight).__name__}; "
            "it must be a tensor with a number for each client, such as clients.num_samples."
        )

    weight = unmarked(mean.weight)
    # A GPU is waited for once, not for each look at the weights.
    weights_on_host = weight.cpu()
    if weight.shape != (num_clients,) or any(not 0 <= number < math.inf for number in weights_on_host.tolist()):
        raise MethodError(
            f"The weight of Mean {name!r}, which {function} returned, must be a finite, non-negative number for "
            f"each of the group's {counted(num_clients, 'client')}; it is {weight.tolist()}."
        )
    return weight, weights_on_host.double()
