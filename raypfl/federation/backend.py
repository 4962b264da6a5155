"""Where groups are run. `inline` is this process; Ray's is in :mod:`raypfl.federation.ray_backend`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from raypfl.authors import located, told
from raypfl.errors import MethodError, Stopped
from raypfl.federation.states import Kept, Place, Stack, merged
from raypfl.federation.stopping import StopRequest
from raypfl.federation.threads import threads
from raypfl.federation.work import Call, Group, Reply, Worker


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
    trace : what to show of it, as :func:`raypfl.authors.told` does.
    """

    error: BaseException
    trace: str


def failure(error: Exception) -> Failed:
    """What to tell of an error that is being handled; one that cannot travel between processes goes as its text."""
    trace = told(error)
    if isinstance(error, MethodError):
        error = MethodError(located(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failed(error, trace)


class Backend(Protocol):
    """Runs the groups of an exchange somewhere."""

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Put what all groups need where they can get at it, as it is now."""
        ...

    def opened(self, handle: Any) -> Mapping[str, np.ndarray]:
        """What :meth:`broadcast` was given."""
        ...

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        """Run the groups, the longest first; results in the order in which they come.

        A group whose actor dies begins again at once if it has tries left. One that fails comes back with what it had
        left at its last try.
        """
        ...

    def keep(self, stack: Stack) -> Any:
        """Put states where groups can get at them; returns the handle that a :class:`Place` holds."""
        ...

    def fetch(self, handle: Any) -> Stack:
        """The states behind a handle."""
        ...


class Inline:
    """Groups run one after the other in this process: for a breakpoint, or a machine with torch alone.

    Parameters
    ----------
    threads : that torch has while a group is at work; None: as many as otherwise.
    """

    def __init__(self, worker: Worker, stop: StopRequest | None = None, threads: int | None = None):
        self._worker = worker
        self._stop = stop or StopRequest()
        self._threads = threads

    def broadcast(self, arrays: Mapping[str, np.ndarray]) -> Any:
        return {name: np.array(array) for name, array in arrays.items()}

    def opened(self, handle: Any) -> Mapping[str, np.ndarray]:
        return handle

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        for group in groups:
            if self._stop.made:
                raise Stopped("The run was asked to stop.")
            try:
                with self._stop.interruptible(), threads(self._threads or torch.get_num_threads()):
                    states = states_of(group.states, lambda stacks: stacks)
                    reply, stack = self._worker.work(call, list, group, states)
            except Exception as error:
                yield group, failure(error)
            else:
                yield group, Done(reply, [] if reply.kept is None else [(group.clients, stack, reply.kept)])

    def keep(self, stack: Stack) -> Any:
        return stack

    def fetch(self, handle: Any) -> Stack:
        return handle


def states_of(
    clients: Sequence[tuple[Place, ...]], fetch: Callable[[list[Any]], list[Stack]]
) -> list[Mapping[str, np.ndarray]]:
    """Each client's state, of its places; `fetch` gets every handle once, all at a time."""
    handles = {id(place.stack): place.stack for places in clients for place in places}
    stacks = dict(zip(handles, fetch(list(handles.values())), strict=True))
    return [merged(stacks[id(place.stack)].of(place.k) for place in places) for places in clients]
