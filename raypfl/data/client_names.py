"""Names of clients: those of the groups (domains, writers, hospitals) whose samples they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from raypfl.common.errors import ConfigError, did_you_mean, listed

_MOST_LISTED = 5
_MOST_COMPARED = 10_000


class ClientNames(Sequence[str]):
    """The name of each client, in the order of their numbers.

    A client that holds several groups has their names, joined by `` + ``. Clients that share a group have one name.

    Parameters
    ----------
    clients : ``int64[n]``, ascending: the client of each entry in `names`; each client has at least one.
    names : n names.

    Examples
    --------
    ``result.client_names[3]`` is the name of client 3, and ``result.client_names.client("Berlin")`` the client of that
    name.
    """

    def __init__(self, clients: np.ndarray, names: Sequence[str]):
        self.clients = clients
        self.names = names
        self._ends = np.cumsum(np.bincount(clients))

    @classmethod
    def of_groups(cls, clients: np.ndarray, groups: np.ndarray, group_names: Sequence[str]) -> ClientNames:
        """Return the names of clients by the groups that they hold.

        Parameters
        ----------
        clients, groups : ``int64[samples]``, each sample's client, and its group as an index into `group_names`.
        """
        pairs = np.unique(clients * len(group_names) + groups)
        client, group = np.divmod(pairs, len(group_names))
        return cls(client, [group_names[index] for index in group])

    def client(self, name: str) -> int:
        """Return the number of the client that has this name, or holds this group among others.

        Raises
        ------
        ConfigError : if there is no such client, or several share the name.
        """
        numbers = [int(self.clients[entry]) for entry, group_name in enumerate(self.names) if group_name == name]
        some_hold_several_groups = len(self.names) > len(self)
        if not numbers and some_hold_several_groups:
            numbers = [number for number, joint_name in enumerate(self) if joint_name == name]
        if len(numbers) == 1:
            return numbers[0]

        if not numbers:
            # Comparing a name with a million others would take a minute.
            hint = did_you_mean(name, set(self.names[:_MOST_COMPARED]))
            raise ConfigError(f"There is no client called {name!r}; {hint}")
        raise ConfigError(
            f"{name!r} is {len(numbers)} clients: {listed(numbers, _MOST_LISTED)}. Give the number of one."
        )

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, client: int) -> str: ...

    @overload
    def __getitem__(self, client: slice) -> list[str]: ...

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[number] for number in range(len(self))[client]]
        # Tables have -1 for a model that is no client's, so it must not be the last client.
        if not 0 <= client < len(self):
            raise IndexError(f"There is no client {client}; clients are numbered from 0 to {len(self) - 1}.")
        first = self._ends[client - 1] if client else 0
        return " + ".join(self.names[entry] for entry in range(first, self._ends[client]))

    def __repr__(self) -> str:
        more = ", ..." if len(self) > _MOST_LISTED else ""
        return f"ClientNames({', '.join(map(repr, self[:_MOST_LISTED]))}{more})"


def refuse_unknown_client(client: int, count: int) -> None:
    """Raise a ConfigError unless `client` is one of `count`."""
    if not 0 <= client < count:
        raise ConfigError(f"There is no client {client}; clients are numbered from 0 to {count - 1}.")


def number_of(client: int | str, names: ClientNames | None, count: int) -> int:
    """Return the number of the client, one of `count`, that has this number or name.

    Raises
    ------
    ConfigError : if there is no such client, clients have no names, or several share the name.
    """
    if not isinstance(client, str):
        refuse_unknown_client(client, count)
        return client
    if names is None:
        raise ConfigError(
            f"There is no client called {client!r}: clients have numbers only, unless partition is 'by_column' or the "
            "class that describes them has client_names."
        )
    return names.client(client)
