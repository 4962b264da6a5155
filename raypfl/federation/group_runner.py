"""Runs the groups of an exchange on a backend: retries, failing clients, replies in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raypfl.clients.group import ClientGroup
from raypfl.clients.observation import Observation
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common.errors import ClientError, OutOfMemory, RaypflError
from raypfl.common.memory import out_of_memory
from raypfl.common.messages import Scatter
from raypfl.federation.backend import Backend, Failed
from raypfl.federation.broadcasts import Broadcasts
from raypfl.federation.ledger import Ledger
from raypfl.federation.placement import Timings
from raypfl.federation.schedule import cut
from raypfl.federation.server_training import ServerContext
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.learning.privacy import PrivacySettings
from raypfl.storage.states import StateTable
from raypfl.storage.tree import flatten

_DETERMINISTIC = (
    *(TypeError, ValueError, NameError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError),
    NotImplementedError,
)
"""Errors of a method's own code that another try would raise again."""

_MAX_NAMED = 5  # clients that a message names, of those that failed together

CutFor = Callable[[int], tuple[list[int], str]]
Lose = Callable[[int, str], None]


@dataclass
class GroupRunner:
    """What all cohorts of a run share: the backend, the clients' states, the ledger. Runs groups of clients.

    Attributes
    ----------
    context : with what the server computes.
    costs : ``float[num_clients]`` expected duration of each client's turn, in any unit.
    cut_for : ``(group sizes, executor)`` for a cohort of a given size.
    warn : called with warnings for the user.
    privacy : how training is made private.
    last_exchange : shapes of what the cohort's last exchange sent and returned, as a sentence.
    observers : numbers of the analyses that see the local steps of this round.
    keep : called with a round and what analyses keep of a group's steps, as soon as the group has replied.
    """

    task: Task
    backend: Backend
    states: StateTable
    ledger: Ledger
    failures: FailureSettings
    context: ServerContext
    costs: np.ndarray
    cut_for: CutFor
    warn: Callable[[str], None]
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    last_exchange: str = ""
    observers: tuple[int, ...] = ()
    keep: Callable[[int, Mapping[int, list[Observation]]], None] | None = None

    def __post_init__(self) -> None:
        self._timings = Timings(self.costs)
        self._broadcasts = Broadcasts(self.backend)

    @property
    def tries(self) -> int:
        """Tries of a group before its failing clients are singled out."""
        return self.failures.retries + 1

    def prepare(
        self,
        function: str | Callable[..., Any],
        clients: Sequence[tuple[int, int]],
        round: int,
        lr: float,
        arguments: Mapping[str, Any],
        cut_for: CutFor | None = None,
        server: Mapping[str, Any] | None = None,
        observers: tuple[int, ...] = (),
        exchange: str = "",
        training: bool = False,
    ) -> tuple[Call, list[Group]]:
        """The call and the groups of an exchange.

        Parameters
        ----------
        clients : ``(position in the cohort, client)`` pairs.
        cut_for : instead of the run's own.
        server : the server's state, which the function gets as `server` and fetches entry by entry. It is not charged.
        exchange : what tells it from others of the round.
        training : whether it is part of training.
        """
        to_all, tensors = flatten({n: a for n, a in arguments.items() if not isinstance(a, Scatter)})
        rows = {n: a.rows.detach().cpu().numpy() for n, a in arguments.items() if isinstance(a, Scatter)}
        ids, positions = np.array([c for _, c in clients]), np.array([p for p, _ in clients])
        sizes, executor = (cut_for or self.cut_for)(len(clients))
        groups = [
            Group(
                index=index,
                clients=tuple(ids[members].tolist()),
                positions=positions[members],
                scattered={n: r[positions[members]] for n, r in rows.items()},
                states=[self.states.refs(int(c)) for c in ids[members]],
                length=self._timings.length(ids[members]),
                seconds=self._timings.seconds(function, ids[members]),
                tries=self.tries,
                deaths=self.failures.deaths,
            )
            for index, members in enumerate(cut(self.costs[ids], sizes, executor))
        ]
        entries, on_demand = (None, {}) if server is None else flatten(dict(server), "server")
        sent = self._broadcasts.sent(tensors, round, on_demand)
        masked = tuple(ids.tolist()) if self.privacy.secure_aggregation and isinstance(function, str) else ()
        return Call(function, round, lr, sent, to_all, exchange, entries, observers, masked, training), groups

    def run(self, call: Call, groups: list[Group], lose: Lose) -> Iterator[tuple[Group, Reply]]:
        """Run groups until each has succeeded or lost its failing clients, which `lose` is called with.

        Yields replies in the order of the groups, so that partial sums are always added in the same order. A reply that
        arrives early waits.
        """
        arrived: dict[int, tuple[Group, Reply] | None] = {}
        order = [g.index for g in groups]
        first: dict[tuple[int, ...], Failed] = {}
        while groups:
            failures: list[tuple[Group, Failed]] = []
            for group, outcome in self.backend.run(call, groups):
                if isinstance(outcome, Failed):
                    self._raise_if_fatal(call, group, outcome)
                    shown = first.setdefault(group.clients, outcome)
                    failures.append((replace(group, tries=group.tries - 1), replace(shown, deaths=outcome.deaths)))
                    continue
                for clients, stack, kept in outcome.stacks:
                    self.states.stage(clients, stack, outcome.home, kept)
                if isinstance(call.function, str):  # the engine's own functions cost other clients more
                    self._timings.note(call.function, group.clients, outcome.reply.seconds)
                if self.keep is not None and outcome.reply.observed:  # not kept in memory until its turn
                    self.keep(call.round, outcome.reply.observed)
                    outcome.reply.observed = {}
                arrived[group.index] = (group, outcome.reply)
                yield from _in_order(order, arrived)
            groups = []
            for group, failed in failures:
                rest = self._rest(call, group, failed, lose)
                if rest is None:
                    arrived[group.index] = None
                else:
                    groups.append(rest)
            yield from _in_order(order, arrived)

    def compact_states(self, round: int) -> None:
        """Copy the states that keep mostly dead stacks alive into new stacks: all of them or, on an error, none."""
        groups = [
            Group(
                index=index,
                clients=tuple(part),
                positions=np.arange(len(part)),
                scattered={},
                states=[self.states.refs(client) for client in part],
                tries=self.tries,
                deaths=self.failures.deaths,
            )
            for index, part in enumerate(self.states.sparse())
        ]
        if not groups:
            return
        call = Call(_copy_state, round, 0.0, self._broadcasts.sent({}, round))
        try:
            for _ in self.run(call, groups, _refuse_lost_state):
                pass
            self.states.commit()
        except BaseException:
            self.states.abandon()
            raise

    def _raise_if_fatal(self, call: Call, group: Group, failed: Failed) -> None:
        error = failed.error
        if out_of_memory(error):  # a backend that can give an actor more of it has done so
            raise OutOfMemory(
                f"The GPU's memory is too small for a group of {len(group.clients)} clients. Lower engine.group_size, "
                f"training.batch_size or evaluation.batch_size. {str(error).splitlines()[0]}"
            ) from error
        if isinstance(error, RaypflError) and not isinstance(error, ClientError):
            raise error  # no client's fault
        if isinstance(error, ClientError) and error.repeatable and self.failures.on_client_failure == "raise":
            raise _client_error(error.clients[:1], call.round, failed, 1)

    def _rest(self, call: Call, group: Group, failed: Failed, lose: Lose) -> Group | None:
        """What of a failed group to try again: all of it, or the clients that do not fail; None if there are none."""
        known = failed.error.clients if isinstance(failed.error, ClientError) else ()
        worth_a_try = not known and not isinstance(failed.error, _DETERMINISTIC) and group.tries > 0
        if worth_a_try and not failed.deaths:
            return group
        failing = dict.fromkeys(known, failed) or self._failing_alone(call, group)
        if worth_a_try and not failing and len(group.clients) > 1:
            return group  # none of its clients kills its process: something else does

        failing = failing or dict.fromkeys(group.clients, failed)
        tries = failed.deaths or self.tries - group.tries
        if self.failures.on_client_failure == "raise":
            raise _client_error(sorted(failing), call.round, failing[min(failing)], tries, len(group.clients))
        for client, why in sorted(failing.items()):
            lose(client, _client_error([client], call.round, why, tries).message)
        kept = [k for k, c in enumerate(group.clients) if c not in failing]
        return _subgroup(group, kept, self.tries) if kept else None

    def _failing_alone(self, call: Call, group: Group) -> dict[int, Failed]:
        """The clients of a failing group that fail alone, after one try each; its results are thrown away."""
        if len(group.clients) == 1:
            return {}
        alone = [replace(_subgroup(group, [k], tries=1), index=k, alone=True) for k in range(len(group.clients))]
        failing: dict[int, Failed] = {}
        for one, outcome in self.backend.run(call, alone):
            if isinstance(outcome, Failed):
                self._raise_if_fatal(call, one, outcome)
                failing[one.clients[0]] = outcome
        return failing


def _copy_state(clients: ClientGroup, method: object) -> dict[str, Any]:
    clients.state.changed = True
    return {}


def _refuse_lost_state(client: int, why: str) -> None:
    raise ClientError(f"The state of client {client} cannot be copied. {why}", [client])


def _in_order(order: list[int], arrived: dict[int, tuple[Group, Reply] | None]) -> Iterator[tuple[Group, Reply]]:
    while order and order[0] in arrived:
        ready = arrived.pop(order.pop(0))
        if ready is not None:
            yield ready


def _subgroup(group: Group, kept: list[int], tries: int) -> Group:
    return replace(
        group,
        clients=tuple(group.clients[k] for k in kept),
        positions=group.positions[kept],
        scattered={n: r[kept] for n, r in group.scattered.items()},
        states=[group.states[k] for k in kept],
        tries=tries,
    )


def _client_error(clients: Sequence[int], round: int, failed: Failed, tries: int, group: int = 1) -> ClientError:
    """The error for clients that failed in a group of `group` clients."""
    if isinstance(failed.error, RaypflError):
        return ClientError(str(failed.error), clients)
    rest = [f"{len(clients) - _MAX_NAMED} more"] * (len(clients) > _MAX_NAMED)
    named = " and ".join(filter(None, [", ".join(map(str, clients[:_MAX_NAMED])), *rest]))
    everyone = len(clients) == group > 1
    who = f"All {group} clients of a group" if everyone else f"Client{'s' * (len(clients) > 1)} {named}"
    times = f" {tries} times in a row" if tries > 1 else ""
    which = f" ({named})" if everyone else ""
    return ClientError(f"{who} failed{times} in round {round}{which}:\n{failed.trace.rstrip()}", clients)
