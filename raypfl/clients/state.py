"""The state of a group's clients, which persists between rounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import EvaluationError, MethodError
from raypfl.common.messages import PerClient, ReadOnly, per_client, unmarked
from raypfl.common.transfer import host_memory, refuse_without_array, to_device
from raypfl.storage.stacks import Contents, Stack

Default = Tensor | Callable[[Tensor], Tensor]


class ClientState(MutableMapping[str, Tensor]):
    """The state of K clients, which persists between rounds: name -> ``Tensor[K, ...]``.

    The state is loaded with the group and stored when the client function returns.

    `read_only` : whether a group of one gets its state without a copy, as :class:`ReadOnly`.

    Attributes
    ----------
    changed : whether something was set or deleted.
    is_stored : whether changes are stored. Otherwise they are refused.
    """

    def __init__(self, rows: list[Mapping[str, np.ndarray]], device: torch.device, read_only: bool = False):
        self._rows = rows
        self._device = device
        self._read_only = read_only and len(rows) == 1 and device.type == "cpu"
        self._written: dict[str, Tensor] = {}
        self._deleted = False
        self.changed = False
        self.is_stored = True

    @overload  # type: ignore[override]
    def get(self, name: str, default: None = None) -> Any: ...

    @overload
    def get(self, name: str, default: Default) -> Tensor: ...

    def get(self, name: str, default: Any = None) -> Any:
        """Return the clients' values of `name`, ``[K, ...]``; clients without one get `default`.

        A default is one row, rows ``[K, ...]``, or a function ``default(new)``. The function gets the positions
        ``int64[n]`` of the clients without a value and returns their rows ``[n, ...]``; it is not called if n is 0.
        """
        if name in self._written:
            return self._written[name]

        new = [k for k, row in enumerate(self._rows) if name not in row]
        if len(new) == len(self._rows):
            return None if default is None else self._default_rows(default, new)

        if default is None and new:
            # No KeyError: for `in`, `setdefault` and `pop` of a mapping, that would mean that no client has a value.
            raise LookupError(
                f"Some clients of the group have no {name!r} yet; give clients.state.get a default: a row for all, or "
                "a function default(new) that gives the rows of the clients at these positions."
            )

        if self._read_only:
            # torch warns that the array is read-only, which is intended here.
            with warnings.catch_warnings(action="ignore"):
                stored = torch.from_numpy(np.asarray(self._rows[0][name]))[None].as_subclass(ReadOnly)
            return stored.to(default.dtype) if isinstance(default, Tensor) else stored

        rows = self._stored_rows(name, default)
        if isinstance(default, Tensor):
            # After the copy: the host would convert into memory that is not pinned.
            rows = rows.to(default.dtype)
        if new:
            positions = to_device(np.array(new), self._device)
            rows[positions] = unmarked(self._default_rows(default, new)).to(rows.dtype)
        return per_client(rows)

    def _stored_rows(self, name: str, default: Any) -> Tensor:
        """Return the values on the device, ``[K, ...]``; rows of clients without a value are uninitialised."""
        # One copy of each row, since a state may be large.
        example = next(row[name] for row in self._rows if name in row)
        if isinstance(default, Tensor):
            shape_of_row = default.shape[1:] if isinstance(default, PerClient) else default.shape
            self._refuse_other_shape(name, example.shape, shape_of_row)
        stored = host_memory((len(self._rows), *example.shape), example.dtype, self._device)
        for k, row in enumerate(self._rows):
            if name in row:
                self._refuse_other_shape(name, row[name].shape, example.shape)
                stored.numpy()[k] = row[name]
        return stored.to(self._device, non_blocking=True)

    def __getitem__(self, name: str) -> Tensor:
        value = self.get(name)
        if value is None:
            raise KeyError(f"The clients have no {name!r} yet; give clients.state.get a default.")
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._refuse_unless_stored(name)
        if not isinstance(value, Tensor):
            raise MethodError(
                f"clients.state[{name!r}] is set to a {type(value).__name__}; store a tensor with a row for each "
                "client, such as torch.full((len(clients),), 0.5)."
            )
        if value.dim() == 0 or len(value) != len(self._rows):
            raise MethodError(
                f"clients.state[{name!r}] needs one row for each of the group's {len(self._rows)} clients, "
                f"this has shape {tuple(value.shape)}."
            )
        refuse_without_array(f"clients.state[{name!r}]", value.dtype)
        self._written[name] = per_client(unmarked(value).detach())
        self.changed = True

    def __delitem__(self, name: str) -> None:
        self._refuse_unless_stored(name)
        if name not in list(self):
            raise KeyError(f"The clients have no {name!r}.")
        self._written.pop(name, None)
        self.changed = True
        self._deleted = True

        self._rows = [{key: value for key, value in row.items() if key != name} for row in self._rows]

    def _refuse_unless_stored(self, name: str) -> None:
        if not self.is_stored:
            raise EvaluationError(
                f"clients.state[{name!r}] cannot be changed in an evaluation, which changes nothing. What clients keep "
                "is set in the functions that round(self, server, cohort) runs."
            )

    def __iter__(self) -> Iterator[str]:
        names = set(self._written)
        for row in self._rows:
            names.update(row)
        return iter(sorted(names))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def stack(self) -> tuple[Stack, Contents]:
        """Stack the written values, or the whole states if a name was deleted or nothing was written.

        Nothing was written if sparse stacks are rewritten to share one.
        """
        whole = self._deleted or not self._written
        changes = {name: unmarked(value).cpu().numpy() for name, value in self._written.items()}
        unchanged = self._rows if whole else [{} for _ in self._rows]
        stack = Stack.updated(unchanged, changes)
        return stack, stack.contents(len(self._rows), whole)

    def _refuse_other_shape(self, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
        """Raise an error if a client's value does not have the shape of the others' or of the default.

        NumPy and torch would say so about the line that reads it, or repeat a single number.
        """
        if tuple(shape) != tuple(expected):
            raise MethodError(
                f"clients.state[{name!r}] has the shape {tuple(shape)} for a client that stored it earlier, but "
                f"{tuple(expected)} for another client or as the default. Store the same shape for every client; the "
                "run's checkpoints have the wrong one, so start a new run."
            )

    def _default_rows(self, default: Default, new: list[int]) -> PerClient:
        """Return the default rows of the clients at the positions `new`."""
        if isinstance(default, PerClient):
            if len(new) == len(self._rows):
                return default
            return per_client(default[to_device(np.array(new), self._device)])

        if not isinstance(default, Tensor):
            if not callable(default):
                raise MethodError(
                    f"The default of clients.state.get is a {type(default).__name__}; give it a tensor, such as "
                    "torch.tensor(0.5), which is one row for all clients, or a function that returns rows."
                )
            return per_client(unmarked(default(torch.tensor(new))).to(self._device))

        if self._read_only:
            return default.to(self._device)[None].as_subclass(ReadOnly)

        # A copy, so that a change in place does not reach the initial model.
        return per_client(default.to(self._device).repeat(len(new), *[1] * default.dim()))
