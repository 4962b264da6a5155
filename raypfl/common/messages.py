"""The messages of an exchange: what a method sends down to clients, and how their replies are reduced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import MethodError, did_you_mean

Weighting = Literal["samples", "uniform"]
"""The weight of a client in a :class:`Mean`: its number of training samples, or the same for all."""


class _Message:
    """Base of the messages, which refuses misspelt arguments in one sentence."""

    def __new__(cls, *_: Any, **named: Any) -> Self:
        arguments = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        unknown = [name for name in named if name not in arguments]
        if unknown:
            raise MethodError(f"{cls.__name__} has no argument {unknown[0]!r}; {did_you_mean(unknown[0], arguments)}")
        return super().__new__(cls)


@dataclass(frozen=True)
class Broadcast(_Message):
    """Down: `tensor`, or each of a list of tensors, goes to every client of the cohort, as a bare one does.

    Parameters
    ----------
    tensor : the tensor or tensors to send.
    charged : how many of the numbers each client gets, if not all: one count for all clients, ``[C]``, or ``[N]`` for
        all clients of the run. With ``[C]``, clients that drop out are charged the largest count. False for tensors
        that clients already have by messages that were counted (global models of past rounds), and that are sent only
        so that not every client's state holds a copy.
    """

    tensor: Tensor | Sequence[Tensor]
    charged: bool | int | Tensor = True


@dataclass(frozen=True)
class Scatter(_Message):
    """Down: row i of `rows` (``[C, ...]``, in cohort order) goes to client i alone; `charged` as for `Broadcast`."""

    rows: Tensor
    charged: bool | int | Tensor = True


@dataclass(frozen=True)
class Mean(_Message):
    """Up: the weighted mean over the cohort of ``rows[K, ...]``, reduced where the clients are.

    Parameters
    ----------
    rows : one row for each client of the group.
    weight : ``[K]``, not negative; None: every client counts the same. It is not charged, since the server knows it
        beforehand (the clients' sample counts).
    charged : how many numbers of its row each client sends, if not all (rows of zeros for classes that it lacks): one
        count for all clients, or ``[K]``. False for values that the server itself could compute from messages already
        counted, and that are reduced on the actors only because the models are there (a teacher ensemble's logits on a
        public pool).
    can_be_empty : whether all weights may be zero; the reply then lacks this name. Otherwise that is an error.
    num_bytes : how many bytes each client sends, if its row is encoded: one count for all clients, or ``[K]``. None:
        those of the numbers that are charged.
    """

    rows: Tensor
    weight: Tensor | None = None
    charged: bool | int | Tensor = True
    can_be_empty: bool = False
    num_bytes: int | Tensor | None = None


@dataclass(frozen=True)
class Sum(_Message):
    """Up: the sum over the cohort of ``rows[K, ...]``, reduced where the clients are.

    Parameters
    ----------
    rows, charged, num_bytes : as for `Mean`.
    counts_late : whether a row counts in full in an asynchronous run, however old the model that the client was sent:
        true of what describes the client alone, such as class means, or by how much its control variate moved. Without
        it, a method that returns a sum is refused there.
    """

    rows: Tensor
    charged: bool | int | Tensor = True
    counts_late: bool = False
    num_bytes: int | Tensor | None = None


@dataclass(frozen=True)
class Each(_Message):
    """Up: ``rows[K, ...]`` as they are; the server gets ``[C, ...]`` in cohort order. The rest is as for `Mean`."""

    rows: Tensor
    charged: bool | int | Tensor = True
    num_bytes: int | Tensor | None = None


def numbers_charged(name: str, charged: bool | int | Tensor, clients: int, size: int) -> np.ndarray:
    """Return how many of a message's `size` numbers each client sends or gets, ``int64[clients]``."""
    if isinstance(charged, bool):
        return np.full(clients, size * charged, dtype=np.int64)

    numbers = np.asarray(unmarked(torch.as_tensor(charged)).cpu())
    if numbers.shape not in ((), (clients,)) or ((numbers < 0) | (numbers > size) | (numbers % 1 != 0)).any():
        raise MethodError(
            f"The argument charged of {name!r} must be a whole number from 0 to {size}, the size of a row, or one such "
            f"number for each of the {clients} clients; it is {numbers.tolist()}."
        )
    return np.broadcast_to(numbers, clients).astype(np.int64)


def bytes_charged(name: str, message: Mean | Sum | Each, numbers: np.ndarray) -> np.ndarray:
    """Return the bytes of each client's message, ``int64[K]``, of which ``numbers[K]`` are charged."""
    if message.num_bytes is None:
        return numbers * unmarked(message.rows).element_size()

    num_bytes = np.asarray(unmarked(torch.as_tensor(message.num_bytes)).cpu())
    if num_bytes.shape not in ((), numbers.shape) or num_bytes.dtype.kind not in "iu" or (num_bytes < 0).any():
        raise MethodError(
            f"The argument num_bytes of {name!r} must be a whole number from 0, or one for each of the {len(numbers)} "
            f"clients; it is {num_bytes.tolist()}."
        )
    return np.where(numbers > 0, num_bytes, 0).astype(np.int64)


class PerClient(torch.Tensor):
    """A tensor whose first axis runs over the clients of a group: a ``Scatter``'s rows, a state, a training's result.

    Results computed from it are of this type too. Inside a loss, which sees one client at a time, it must come as an
    argument: a loss that closes over it would mix all clients' rows, so that is refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _one_client.active:
            raise MethodError(
                "A loss sees one client at a time, but this one uses a tensor that holds a row for every client of the "
                "group. Pass it by name instead: clients.sgd(loss, start, anchor=personal), with loss(p, batch, "
                "anchor). The same goes for the function of a Predictor: Predictor(function, memory=rows)."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class ReadOnly(PerClient):
    """A state that was not copied: it may lie in read-only memory, so operations that change it in place are refused.

    Results computed from it are read-only too, since they may be views.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # torch marks in-place operations by a trailing underscore: add_, mul_, ...
        is_in_place = name in _IN_PLACE if name.endswith("__") else name.endswith("_")
        if is_in_place or (kwargs and "out" in kwargs):
            raise ReadOnlyChanged
        return super().__torch_function__(func, types, args, kwargs)


class ReadOnlyChanged(Exception):
    """Error for an operation that would change a :class:`ReadOnly` state in place; it needs a copy."""


_OPERATORS = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = {"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS.split())}


def per_client(rows: Tensor) -> PerClient:
    """Mark a tensor's first axis as the clients of the group."""
    return rows.as_subclass(PerClient)


def unmarked(tensor: Tensor) -> Tensor:
    """Return the same tensor without the mark."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, PerClient) else tensor


class _OneClient(threading.local):
    active = False


_one_client = _OneClient()


def inside_a_loss() -> bool:
    """Return whether a function of one client is running."""
    return _one_client.active


@contextlib.contextmanager
def one_client_at_a_time() -> Iterator[None]:
    """While active, touching a :class:`PerClient` tensor is an error."""
    before = _one_client.active
    _one_client.active = True
    try:
        yield
    finally:
        _one_client.active = before
