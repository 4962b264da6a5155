"""What a backend is: it runs groups of clients, in this process or in Ray's actors (:mod:`raypfl.engine.backends`)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from raypfl.clients.gpu_errors import gpu_failure
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.user_code import located, traceback_text
from raypfl.federation.exchange.tree_sum import Subtree
from raypfl.storage.stacks import Contents, Fetch, StackRef, merged
from raypfl.storage.states import StateFile, StateShard

ONE_SAMPLE = "Expected more than 1 value per channel when training"
"""The message of torch's batch norm for a mini-batch of one sample."""


@dataclass(frozen=True)
class Done:
    """A group that succeeded.

    Attributes
    ----------
    stacks : changes of the clients' states as ``(clients, stack, contents)``; a stack is a :class:`Stack` or a
        reference to one. Empty if no state changed.
    home : the node that holds the stacks.
    subtrees : the sums of several groups, which come with one of them; None: the group's sums are in its reply.
    is_again : whether the group had succeeded before: its sums were lost, and perhaps its clients' states.
    """

    reply: Reply
    stacks: Sequence[tuple[tuple[int, ...], Any, Contents]] = ()
    home: str = ""
    subtrees: Sequence[Subtree] | None = None
    is_again: bool = False


@dataclass(frozen=True)
class Failed:
    """A group whose function raised, or whose actors died.

    Attributes
    ----------
    error : the error that the function raised, or the actor's death.
    trace : the traceback, as :func:`raypfl.common.user_code.traceback_text` reduces it.
    deaths : the number of times in a row that its actors died; 0: the function raised.
    gpu_failure : the error after which the process that ran it can no longer use its GPU; empty if there is none.
    """

    error: BaseException
    trace: str
    deaths: int = 0
    gpu_failure: str = ""


@dataclass(frozen=True)
class BundleReply:
    """An actor's reply for a bundle of groups.

    Attributes
    ----------
    outcomes : each group's reply or failure.
    subtrees : the sums of the groups that succeeded, added up and taken out of their replies. Empty: they stay on the
        node; None: the bundle is one group, whose sums are in its reply.
    """

    outcomes: Sequence[Reply | Failed]
    subtrees: Sequence[Subtree] | None


def failure(error: Exception) -> Failed:
    """Describe an error that a group raised; one that cannot be pickled is replaced by its text."""
    trace = traceback_text(error)
    if ONE_SAMPLE in str(error):
        error = MethodError(
            "Batch norm cannot train on a mini-batch of one sample. Set training.smallest_batch=2, which leaves such "
            "batches out, or choose a network without batch norm."
        )
    elif isinstance(error, ConfigError | MethodError):
        error = located(error)

    # The driver must be able to unpickle it. Some errors can be pickled but not unpickled, hence both calls.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = Exception(f"{type(error).__name__}: {error}")
    return Failed(error, trace, gpu_failure=gpu_failure())


class StoredStack(NamedTuple):
    """A stack of states from a checkpoint.

    Attributes
    ----------
    shard : the outline of the shard that it was made of.
    stack : a :class:`Stack` or a reference to one.
    node : the node that holds it.
    """

    shard: StateShard
    stack: Any
    contents: Contents
    node: str = ""


def read_stacks(location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
    """Read a checkpoint's states in this process; the errors are those of :meth:`Backend.read_states`."""
    # Groups run without PyArrow.
    from raypfl.storage.checkpoints import read_file

    for file in files:
        for shard in read_file(location, file):
            stack = shard.stack()
            yield StoredStack(shard.outline(), stack, stack.contents(len(shard.clients)))


class Backend(Protocol):
    """Runs the groups of an exchange somewhere."""

    @property
    def num_actors(self) -> int:
        """The number of groups that run at a time."""
        ...

    def broadcast(self, arrays: Mapping[str, np.ndarray], inside: bool = True) -> Any:
        """Make a copy of arrays available to all groups; small ones may travel `inside` each group's call."""
        ...

    def get_broadcast(self, handle: Any) -> Mapping[str, np.ndarray]:
        """Return the arrays of a :meth:`broadcast`."""
        ...

    def run(self, call: Call, groups: Sequence[Group]) -> Iterator[tuple[Group, Done | Failed]]:
        """Run the groups, the longest first; yield results as they arrive.

        A group whose actor dies runs again, unless that has happened too often.
        """
        ...

    def map_states(self, function: Callable[[Fetch, Any], Any], jobs: Sequence[tuple[str, Any]]) -> list[Any]:
        """Return ``function(fetch, job)`` of each job, computed on the node that it comes with; "" is this process.

        `fetch` returns the stacks behind the handles that a :class:`StackRef` holds.
        """
        ...

    def read_states(self, location: str, files: Sequence[StateFile]) -> Iterator[StoredStack]:
        """Read a checkpoint's states, and make them available to groups.

        Raises
        ------
        Damaged : if a file is not as it was written.
        OSError : if a file cannot be read.
        """
        ...


def states_of(clients: Sequence[tuple[StackRef, ...]], fetch: Fetch) -> list[Mapping[str, np.ndarray]]:
    """Return each client's state; `fetch` is called once, with every handle."""
    # Many clients share a stack.
    handles = {id(ref.stack): ref.stack for refs in clients for ref in refs}
    stacks = dict(zip(handles, fetch(list(handles.values())), strict=True))

    states: list[Mapping[str, np.ndarray]] = []
    for refs in clients:
        if not refs:
            states.append({})
            continue
        changes = (stacks[id(ref.stack)].state_of(ref.slot) for ref in refs)  # the oldest first
        states.append(merged(changes))
    return states
