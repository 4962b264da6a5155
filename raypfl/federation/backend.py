"""Where groups are run. `inline` is this process; Ray's is in :mod:`raypfl.backends.ray_backend`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import MethodError
from raypfl.common.user_code import traceback_text, with_location
from raypfl.storage.states import Kept, Place, Stack, merged


@dataclass(frozen=True)
class Done:
    """A group that succeeded.

    Attributes
    ----------
    stacks : what is new of its clients' states, in one or more stacks (a :class:`Stack` or a reference), each with
        those whose it is and what it holds; none if they did not change.
    home : the node that made them.
    """

    reply: Reply
    stacks: Sequence[tuple[tuple[int, ...], Any, Kept]] = ()
    home: str = ""


@dataclass(frozen=True)
class Failed:
    """A group whose function raised, or whose actors died.

    Attributes
    ----------
    trace : what to show of it, as :func:`raypfl.common.user_code.traceback_text` does.
    """

    error: BaseException
    trace: str


def failure(error: Exception) -> Failed:
    """What to tell of an error that is being handled; one that cannot travel between processes goes as its text."""
    trace = traceback_text(error)
    if isinstance(error, MethodError):
        error = MethodError(with_location(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failed(error, trace)


class Backend(Protocol):
    """Runs the groups of an exchange somewhere."""

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        """Make a copy of arrays available to all groups; small ones may travel `inside` each group's call."""
        ...

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        """What :meth:`broadcast` was given."""
        ...

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        """Run the groups, the longest first; results in the order in which they come.

        A group whose actor dies begins again at once if it has tries left. One that fails comes back with what it had
        left at its last try.
        """
        ...

    def put_states(self, stack: Stack) -> Any:
        """Put states where groups can get at them; returns the handle that a :class:`Place` holds."""
        ...

    def get_states(self, handle: Any) -> Stack:
        """The states behind a handle."""
        ...


def states_of(
    clients: Sequence[tuple[Place, ...]], fetch: Callable[[list[Any]], list[Stack]]
) -> list[Mapping[str, np.ndarray]]:
    """Each client's state, of its places; `fetch` gets every handle once, all at a time."""
    handles = {id(place.stack): place.stack for places in clients for place in places}
    stacks = dict(zip(handles, fetch(list(handles.values())), strict=True))
    return [merged(stacks[id(place.stack)].of(place.k) for place in places) for places in clients]
