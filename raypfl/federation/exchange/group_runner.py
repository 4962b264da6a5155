"""Runs the groups of an exchange on a backend: retries and failing clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.clients.gpu_errors import out_of_memory
from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import Observation
from raypfl.clients.replies.turns import Turns
from raypfl.clients.worker import Call, Group
from raypfl.common.counting import counted
from raypfl.common.errors import ClientError, Diverged, OutOfMemory, RaypflError, listed
from raypfl.common.messages import Scatter
from raypfl.common.transfer import refuse_without_array
from raypfl.federation.exchange.backend import Backend, Done, Failed
from raypfl.federation.exchange.broadcasts import Broadcasts
from raypfl.federation.exchange.grouping import cut_into_groups
from raypfl.federation.exchange.mistakes import is_mistake
from raypfl.federation.exchange.timings import Timings
from raypfl.federation.ledger import Ledger
from raypfl.federation.robustness import Wire
from raypfl.federation.server_training import ServerContext
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.learning.privacy import PrivacySettings
from raypfl.storage.states import StateTable
from raypfl.storage.tree import flatten

_MAX_NAMED = 5
"""Clients whose numbers a message lists, of those that failed together."""

GroupSizes = Callable[[int], list[int]]
"""The sizes of the groups that a cohort of a given size is cut into."""

DropClient = Callable[[int, ClientError], None]
"""Called with a client that failed and its error; the exchange goes on without it."""


@dataclass
class GroupRunner:
    """Runs groups of clients; shared by all cohorts of a run.

    Attributes
    ----------
    failures : how often a group is tried, and whether failing clients are skipped.
    costs : ``float[num_clients]`` expected duration of each client's turn, in any unit.
    last_exchange : a sentence with the shapes of what the cohort's last exchange sent and returned.
    observers : numbers of the analyses that see the local steps of this round.
    keep_observations : called with a round and what analyses keep of a group's steps, as soon as the group has replied.
    """

    task: Task
    backend: Backend
    states: StateTable
    ledger: Ledger
    failures: FailureSettings
    context: ServerContext
    costs: np.ndarray
    group_sizes: GroupSizes
    executor: str
    warn: Callable[[str], None]
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    wire: Wire = field(default_factory=Wire)
    last_exchange: str = ""
    observers: tuple[int, ...] = ()
    keep_observations: Callable[[int, Mapping[int, list[Observation]]], None] | None = None

    def __post_init__(self) -> None:
        self._timings = Timings(self.costs)
        self._broadcasts = Broadcasts(self.backend)

    @property
    def tries(self) -> int:
        """The tries of a group before its failing clients are singled out."""
        return self.failures.retries + 1

    def prepare(
        self,
        function: str | Callable[..., Any],
        clients: Sequence[tuple[int, int]],
        round: int,
        lr: float,
        arguments: Mapping[str, Any],
        group_sizes: GroupSizes | None = None,
        server: Mapping[str, Any] | None = None,
        observers: tuple[int, ...] = (),
        exchange: str = "",
        training: bool = False,
        work: np.ndarray | None = None,
    ) -> tuple[Call, list[Group]]:
        """Prepare the call and the groups of an exchange.

        Parameters
        ----------
        function : the name of the method's client function, or a function of the engine's own.
        clients : ``(position in the cohort, client)`` pairs.
        group_sizes : replaces the run's own.
        server : the server's state, which the function gets as `server` and fetches entry by entry. It is not charged.
        exchange : the exchange's name, different from all others of the round.
        work : the share of its local steps that each client of the cohort does; None: all do all of them.
        """
        to_all, rows = _split_arguments(arguments)
        ids = np.array([client for _, client in clients])
        positions = np.array([position for position, _ in clients])
        groups = []
        for index, members in enumerate(self.cut(ids, group_sizes)):
            group_positions = positions[members]
            scattered = {name: array[group_positions] for name, array in rows.items()}
            group_work = None if work is None else work[group_positions]
            groups.append(self._group(function, index, ids[members], group_positions, scattered, work=group_work))

        skeleton, tensors = flatten(to_all)
        server_skeleton, on_demand = (None, {}) if server is None else flatten(dict(server), "server")
        # Masks cover the method's own messages; the engine's functions, such as an evaluation, send none of them.
        is_masked = self.privacy.secure_aggregation and isinstance(function, str)
        call = Call(
            function,
            round,
            lr,
            shared=self._broadcasts.send(tensors, round, on_demand),
            arguments=skeleton,
            exchange=exchange,
            server=server_skeleton,
            observers=observers,
            masked=tuple(ids.tolist()) if is_masked else (),
            training=training,
        )
        return call, groups

    def prepare_turns(
        self,
        function: str,
        clients: Sequence[np.ndarray],
        turns: Sequence[Turns],
        indices: Sequence[int],
        messages: Mapping[int, Mapping[str, Any]],
        round: int,
    ) -> tuple[Call, list[Group]]:
        """Prepare the call and the groups of clients that were sent their messages in several rounds.

        Parameters
        ----------
        clients, turns, indices : for each group its clients' numbers, ``int64[K]``, their turns, and its index.
        messages : round -> what the clients received in it, by name.
        round : the first round that these clients reply to.
        """
        groups = []
        for index, ids, group_turns in zip(indices, clients, turns, strict=True):
            groups.append(self._group(function, index, ids, np.arange(len(ids)), {}, turns=group_turns))

        skeletons = {}
        tensors: dict[str, Tensor] = {}
        for sent_in, message in messages.items():
            skeletons[sent_in], message_tensors = flatten(dict(message), str(sent_in))
            tensors |= message_tensors
        shared = self._broadcasts.send(tensors, round)
        call = Call(function, round, 0.0, shared, exchange="training 0", training=True, messages=skeletons)
        return call, groups

    def cut(self, ids: np.ndarray, group_sizes: GroupSizes | None = None) -> list[np.ndarray]:
        """Cut clients into groups that have the same network; return the positions of each group's clients."""
        groups = []
        for positions in self.task.by_architecture(ids):
            sizes = (group_sizes or self.group_sizes)(len(positions))
            cut = cut_into_groups(self.costs[ids[positions]], sizes, self.executor)
            groups += [positions[members] for members in cut]
        return groups

    def length(self, ids: np.ndarray) -> float:
        """Return the expected duration of a group of these clients, in any unit."""
        return self._timings.length(ids)

    def _group(
        self,
        function: str | Callable[..., Any],
        index: int,
        ids: np.ndarray,
        positions: np.ndarray,
        scattered: Mapping[str, np.ndarray],
        work: np.ndarray | None = None,
        turns: Turns | None = None,
    ) -> Group:
        """Return a group of these clients, with what each is to do."""
        clients = tuple(ids.tolist())
        return Group(
            index=index,
            clients=clients,
            positions=positions,
            scattered=scattered,
            states=[self.states.refs(client) for client in clients],
            length=self._timings.length(ids),
            seconds=self._timings.seconds(function, ids),
            tries=self.tries,
            deaths=self.failures.deaths,
            work=work,
            turns=turns,
        )

    def run(self, call: Call, groups: list[Group], drop_client: DropClient) -> Iterator[tuple[Group, Done]]:
        """Run groups until each has succeeded or lost its failing clients; `drop_client` is called with each of these.

        Yields groups as they finish, in any order.
        """
        first_failures: dict[tuple[int, ...], Failed] = {}

        while groups:
            failures: list[tuple[Group, Failed]] = []
            for group, outcome in self.backend.run(call, groups):
                if isinstance(outcome, Failed):
                    self._raise_if_fatal(call, group, outcome)
                    # The error that the user reads is the first one; how often the process died is the latest count.
                    first_failure = first_failures.setdefault(group.clients, outcome)
                    failure = replace(first_failure, deaths=outcome.deaths)
                    failures.append((replace(group, tries=group.tries - 1), failure))
                    continue

                for clients, stack, contents in outcome.stacks:
                    self.states.stage(clients, stack, outcome.home, contents)
                if outcome.is_again:
                    continue

                reply = outcome.reply
                # The engine's own functions are not timed: a client that trains slowly may be evaluated fast.
                if isinstance(call.function, str):
                    self._timings.note(call.function, group.clients, reply.seconds)
                if self.keep_observations is not None and reply.observed:
                    self.keep_observations(call.round, reply.observed)
                    reply.observed = {}
                yield group, outcome

            groups = []
            for group, failure in sorted(failures, key=lambda failed: failed[0].index):
                remaining = self._remaining(call, group, failure, drop_client)
                if remaining is not None:
                    groups.append(remaining)

    def compact_states(self, round: int) -> None:
        """Copy the live states of mostly dead stacks into new stacks: all of them or, on an error, none."""
        groups: list[Group] = []
        for all_clients in self.states.clients_to_rewrite():
            for members in self.task.by_architecture(all_clients):
                ids = np.array(all_clients)[members]
                groups.append(self._group(_copy_state, len(groups), ids, np.arange(len(ids)), {}))
        if not groups:
            return

        call = Call(_copy_state, round, 0.0, self._broadcasts.send({}, round))
        try:
            for _ in self.run(call, groups, _refuse_lost_state):
                pass
            self.states.commit()
        except BaseException:
            self.states.abandon()
            raise

    def _raise_if_fatal(self, call: Call, group: Group, failed: Failed) -> None:
        error = failed.error
        # The backend of one process has no other to try it in.
        if failed.gpu_failure:
            plural = "s" if len(group.clients) > 1 else ""
            raise RaypflError(
                f"The GPU failed in round {call.round}, in the work of client{plural} "
                f"{listed(group.clients, _MAX_NAMED)}:\n{failed.trace.rstrip()}"
            ) from error
        # A backend that could give an actor more memory has already done so.
        if out_of_memory(error):
            size = counted(len(group.clients), "client")
            raise OutOfMemory(
                f"The GPU's memory is too small for a group of {size}. Lower engine.group_size, "
                f"training.batch_size or evaluation.batch_size. {str(error).splitlines()[0]}"
            ) from error
        if isinstance(error, RaypflError) and not isinstance(error, ClientError):
            raise error  # not the fault of a client
        if isinstance(error, ClientError) and error.repeatable and self.failures.on_client_failure == "raise":
            raise _client_error(error.clients[:1], call.round, failed, 1)

    def _remaining(self, call: Call, group: Group, failed: Failed, drop_client: DropClient) -> Group | None:
        """Return the part of a failed group to try again: the group, the clients that do not fail, or None."""
        named = failed.error.clients if isinstance(failed.error, ClientError) else ()
        may_succeed = not named and not is_mistake(failed.error) and group.tries > 0
        if may_succeed and not failed.deaths:
            return group

        failing = dict.fromkeys(named, failed) or self._failing_alone(call, group)
        if may_succeed and not failing and len(group.clients) > 1:
            return group  # no client kills its process alone, so something else does

        failing = failing or dict.fromkeys(group.clients, failed)
        tries = failed.deaths or self.tries - group.tries
        if self.failures.on_client_failure == "raise":
            raise _client_error(sorted(failing), call.round, failing[min(failing)], tries, len(group.clients))

        for client, client_failure in sorted(failing.items()):
            drop_client(client, _client_error([client], call.round, client_failure, tries))
        remaining = [k for k, client in enumerate(group.clients) if client not in failing]
        return _subgroup(group, remaining, self.tries) if remaining else None

    def _failing_alone(self, call: Call, group: Group) -> dict[int, Failed]:
        """Try each client of a failing group alone, once; return those that fail and throw all results away."""
        if len(group.clients) == 1:
            return {}

        singles = []
        for k in range(len(group.clients)):
            singles.append(replace(_subgroup(group, [k], tries=1), index=k, alone=True))

        failing: dict[int, Failed] = {}
        for single, outcome in self.backend.run(call, singles):
            if isinstance(outcome, Failed):
                self._raise_if_fatal(call, single, outcome)
                failing[single.clients[0]] = outcome
        return failing


def _split_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the arguments that go to all clients, and the rows ``[C, ...]`` of those that are scattered."""
    to_all = {}
    rows = {}
    for name, argument in arguments.items():
        if isinstance(argument, Scatter):
            refuse_without_array(f"What the server sends as {name!r}", argument.rows.dtype)
            rows[name] = argument.rows.detach().cpu().numpy()
        else:
            to_all[name] = argument
    return to_all, rows


def _copy_state(client_group: ClientGroup, method: object) -> dict[str, Any]:
    client_group.state.changed = True
    return {}


def _refuse_lost_state(client: int, error: ClientError) -> None:
    raise ClientError(f"The state of client {client} cannot be copied. {error}", [client])


def _subgroup(group: Group, members: list[int], tries: int) -> Group:
    return replace(
        group,
        clients=tuple(group.clients[k] for k in members),
        positions=group.positions[members],
        scattered={name: rows[members] for name, rows in group.scattered.items()},
        states=[group.states[k] for k in members],
        work=None if group.work is None else group.work[members],
        tries=tries,
        turns=None if group.turns is None else group.turns.of(members),
    )


def _client_error(clients: Sequence[int], round: int, failed: Failed, tries: int, group_size: int = 1) -> ClientError:
    """Describe the failure of clients in a group of `group_size` clients, as the error to raise."""
    if isinstance(failed.error, RaypflError):
        error_class = Diverged if isinstance(failed.error, Diverged) else ClientError
        return error_class(str(failed.error), clients)

    numbers = listed(clients, _MAX_NAMED)
    times = f" {tries} times in a row" if tries > 1 else ""
    trace = failed.trace.rstrip()

    if len(clients) == group_size > 1:
        sentence = f"All {group_size} clients of a group failed{times} in round {round} ({numbers})"
    else:
        plural = "s" if len(clients) > 1 else ""
        sentence = f"Client{plural} {numbers} failed{times} in round {round}"
    return ClientError(f"{sentence}:\n{trace}", clients)
