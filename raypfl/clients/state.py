"""What stays with a group's clients between rounds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import MethodError
from raypfl.common.messages import PerClient, ReadOnly, per_client, unmarked
from raypfl.storage.states import Contents, Stack

Default = Tensor | Callable[[Tensor], Tensor]


class ClientState(MutableMapping[str, Tensor]):
    """What stays with the group's clients between rounds: name -> ``Tensor[K, ...]``.

    It is loaded with the group and stored when its function returns.

    Parameters
    ----------
    read_only : give the state of a group of one without a copy, as :class:`ReadOnly`.
    """

    def __init__(self, rows: list[Mapping[str, np.ndarray]], device: torch.device, read_only: bool = False):
        self._rows = rows
        self._device = device
        self._read_only = read_only and len(rows) == 1 and device.type == "cpu"
        self._new: dict[str, Tensor] = {}
        self._deleted = False
        self.changed = False

    def get(self, name: str, default: Any = None) -> Any:
        """The clients' values of `name` ``[K, ...]``; clients without one get `default`.

        A default is one row, rows ``[K, ...]``, or a function ``default(new)`` that gives rows ``[n, ...]`` for the
        positions ``int64[n]`` of these clients in the group, if there are any.
        """
        if name in self._new:
            return self._new[name]
        new = [k for k, row in enumerate(self._rows) if name not in row]
        if len(new) == len(self._rows):
            return None if default is None else self._default_rows(default, new)
        if default is None and new:
            raise KeyError(
                f"Some clients of the group have no {name!r} yet; give clients.state.get a default: a row for all, or "
                "a function default(new) that gives the rows of the clients at these positions."
            )
        if self._read_only:
            with warnings.catch_warnings(action="ignore"):  # that the array is read-only
                return torch.from_numpy(np.asarray(self._rows[0][name]))[None].as_subclass(ReadOnly)
        # One copy of each row, since a state may be large.
        one = next(row[name] for row in self._rows if name in row)
        stored = np.empty((len(self._rows), *one.shape), one.dtype)
        for k, row in enumerate(self._rows):
            if name in row:
                stored[k] = row[name]
        rows = torch.from_numpy(stored).to(self._device, default.dtype if isinstance(default, Tensor) else None)
        if new:
            rows[new] = unmarked(self._default_rows(default, new)).to(rows.dtype)
        return per_client(rows)

    def __getitem__(self, name: str) -> Tensor:
        value = self.get(name)
        if value is None:
            raise KeyError(f"The clients have no {name!r} yet; give clients.state.get a default.")
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        if len(value) != len(self._rows):
            raise MethodError(
                f"clients.state[{name!r}] needs one row for each of the group's {len(self._rows)} clients, "
                f"this has shape {tuple(value.shape)}."
            )
        self._new[name] = per_client(unmarked(value).detach())
        self.changed = True

    def __delitem__(self, name: str) -> None:
        if name not in list(self):  # names that any client has
            raise KeyError(f"The clients have no {name!r}.")
        self._new.pop(name, None)
        self.changed = self._deleted = True
        self._rows = [{n: v for n, v in row.items() if n != name} for row in self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({name for row in self._rows for name in row} | set(self._new)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def stack(self) -> tuple[Stack, Contents]:
        """What was set; if a name was deleted, or states are rewritten to share one stack, everything."""
        whole = self._deleted or not self._new
        changes = {name: unmarked(value).cpu().numpy() for name, value in self._new.items()}
        stack = Stack.updated(self._rows if whole else [{} for _ in self._rows], changes)
        return stack, stack.contents(len(self._rows), whole)

    def _default_rows(self, default: Default, new: list[int]) -> PerClient:
        """The rows of the clients at the positions `new`."""
        if isinstance(default, PerClient):
            return default if len(new) == len(self._rows) else per_client(default[new])
        if not isinstance(default, Tensor):
            return per_client(unmarked(default(torch.tensor(new))).to(self._device))
        if self._read_only:
            return default.to(self._device)[None].as_subclass(ReadOnly)
        # A copy, so that a change in place does not reach the initial model.
        return per_client(default.to(self._device).repeat(len(new), *[1] * default.dim()))
