"""The clients of one round, as the server calls them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.clients.worker import Call, Group, Reply
from raypfl.common import rng
from raypfl.common.errors import ClientError, EmptyCohort, MethodError, RaypflError
from raypfl.common.messages import Broadcast, Scatter, numbers_charged
from raypfl.common.user_code import where_defined
from raypfl.federation.backend import Backend, Failed
from raypfl.federation.broadcasts import Broadcasts
from raypfl.federation.central import Central, Place
from raypfl.federation.ledger import Entry, Ledger, Phase
from raypfl.federation.logged import Logged, number, png
from raypfl.federation.logged import columns as checked_columns
from raypfl.federation.placement import Timings
from raypfl.federation.schedule import cut
from raypfl.federation.settings import FailureSettings
from raypfl.federation.task import Task
from raypfl.federation.totals import Means, Total
from raypfl.storage.states import StateTable
from raypfl.storage.tree import taken_apart

_MISTAKES = (
    *(TypeError, ValueError, NameError, AttributeError, LookupError, ArithmeticError, AssertionError, ImportError),
    NotImplementedError,
)
"""Errors of a method's own code that trying again gives again."""

_NAMED = 5  # clients, of more that failed together


@dataclass
class Exchanger:
    """Carries a run's exchanges: what all its cohorts share.

    Attributes
    ----------
    place : where the server computes.
    costs : ``float[num_clients]`` what each client's turn is expected to take, in any unit.
    cut_for : ``(sizes of the groups, executor)`` for a cohort of a given size.
    warn : told of what a person should know.
    said : the shapes of what the last cohort's last exchange sent and brought up, in a sentence.
    """

    task: Task
    backend: Backend
    states: StateTable
    ledger: Ledger
    failures: FailureSettings
    place: Place
    costs: np.ndarray
    cut_for: Callable[[int], tuple[list[int], str]]
    warn: Callable[[str], None]
    said: str = ""
    _numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self._timings = Timings(self.costs)
        self._broadcasts = Broadcasts(self.backend)

    @property
    def tries(self) -> int:
        """Of a group, before its failing clients are singled out."""
        return self.failures.retries + 1

    def call(
        self,
        function: str | Callable[..., Any],
        clients: Iterable[tuple[int, int]],
        round: int,
        lr: float,
        arguments: Mapping[str, Any],
        cut_for: Callable[[int], tuple[list[int], str]] | None = None,
    ) -> tuple[Call, list[Group]]:
        """An exchange and its groups, for ``(position, client)`` pairs; `cut_for` in place of the exchanger's own."""
        to_all, tensors = taken_apart({n: a for n, a in arguments.items() if not isinstance(a, Scatter)})
        rows = {n: a.rows.detach().cpu().numpy() for n, a in arguments.items() if isinstance(a, Scatter)}
        pairs = list(clients)
        ids, positions = np.array([c for _, c in pairs]), np.array([p for p, _ in pairs])
        sizes, executor = (cut_for or self.cut_for)(len(pairs))
        groups = [
            Group(
                index=index,
                clients=tuple(ids[members].tolist()),
                positions=positions[members],
                scattered={n: r[positions[members]] for n, r in rows.items()},
                states=[self.states.places(int(c)) for c in ids[members]],
                length=self._timings.length(ids[members]),
                seconds=self._timings.seconds(function, ids[members]),
                tries=self.tries,
            )
            for index, members in enumerate(cut(self.costs[ids], sizes, executor))
        ]
        return Call(next(self._numbers), function, round, lr, self._broadcasts.sent(tensors, round), to_all), groups

    def run(self, call: Call, groups: list[Group], losing: Callable[[int, str], None]) -> Iterable[tuple[Group, Reply]]:
        """Run groups until each has succeeded or lost its failing clients; replies in the order of the groups.

        A group's partial sums must be added in a fixed order, so replies that come early wait for those before them.
        """
        arrived: dict[int, tuple[Group, Reply] | None] = {}
        order = [g.index for g in groups]
        first: dict[tuple[int, ...], Failed] = {}
        while groups:
            failures: list[tuple[Group, Failed]] = []
            for group, outcome in self.backend.run(call, groups):
                if isinstance(outcome, Failed):
                    self._raise_if_hopeless(call, outcome)
                    spent = replace(group, tries=group.tries - 1)
                    failures.append((spent, first.setdefault(group.clients, outcome)))
                    continue
                for clients, stack, kept in outcome.stacks:
                    self.states.stage(clients, stack, outcome.home, kept)
                if isinstance(call.function, str):  # the engine's own cost other clients more
                    self._timings.note(call.function, group.clients, outcome.reply.seconds)
                arrived[group.index] = (group, outcome.reply)
                yield from _ready(order, arrived)
            groups = []
            for group, failed in failures:
                rest = self._rest(call, group, failed, losing)
                if rest is None:
                    arrived[group.index] = None
                else:
                    groups.append(rest)
            yield from _ready(order, arrived)

    def gather(self, round: int) -> None:
        """Put the states together anew that lie scattered in stacks kept by a few rows: all of them, or none if it is
        stopped or fails. No client does anything."""
        parts = self.states.scattered()
        if not parts:
            return
        groups = [
            Group(
                index=index,
                clients=tuple(part),
                positions=np.arange(len(part)),
                scattered={},
                states=[self.states.places(client) for client in part],
                tries=self.tries,
            )
            for index, part in enumerate(parts)
        ]
        call = Call(next(self._numbers), _as_they_are, round, 0.0, self._broadcasts.sent({}, round), {})
        try:
            for _ in self.run(call, groups, _not_lost):
                pass
            self.states.commit()
        except BaseException:
            self.states.abandon()
            raise

    def _raise_if_hopeless(self, call: Call, failed: Failed) -> None:
        error = failed.error
        if isinstance(error, RaypflError) and not isinstance(error, ClientError):
            raise error  # no client's fault
        if isinstance(error, ClientError) and error.repeatable and self.failures.on_client_failure == "raise":
            raise _sentence(error.clients[:1], call.round, failed, 1)

    def _rest(self, call: Call, group: Group, failed: Failed, losing: Callable[[int, str], None]) -> Group | None:
        """What of a failed group to try again: all of it, or what is left without the clients that fail; or None."""
        known = failed.error.clients if isinstance(failed.error, ClientError) else ()
        if not known and not isinstance(failed.error, _MISTAKES) and group.tries:
            return group
        tries = self.tries - group.tries
        culprits = dict.fromkeys(known, failed) or self._culprits(call, group) or dict.fromkeys(group.clients, failed)
        if self.failures.on_client_failure == "raise":
            raise _sentence(sorted(culprits), call.round, culprits[min(culprits)], tries, len(group.clients))
        for client, why in sorted(culprits.items()):
            losing(client, _sentence([client], call.round, why, tries).message)
        kept = [k for k, c in enumerate(group.clients) if c not in culprits]
        return _subgroup(group, kept, self.tries) if kept else None

    def _culprits(self, call: Call, group: Group) -> dict[int, Failed]:
        """Which clients of a failing group fail alone, at one try; nothing that they do counts."""
        if len(group.clients) == 1:
            return {}
        alone = [replace(_subgroup(group, [k], tries=1), index=k, alone=True) for k in range(len(group.clients))]
        failing: dict[int, Failed] = {}
        for one, outcome in self.backend.run(call, alone):
            if isinstance(outcome, Failed):
                self._raise_if_hopeless(call, outcome)
                failing[one.clients[0]] = outcome
        return failing


def _as_they_are(clients: Clients, method: object) -> dict[str, Any]:
    clients.state.changed = True
    return {}


def _not_lost(client: int, why: str) -> None:
    raise ClientError(f"The state of client {client} cannot be copied. {why}", [client])


def _ready(order: list[int], arrived: dict[int, tuple[Group, Reply] | None]) -> Iterator[tuple[Group, Reply]]:
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


def _sentence(clients: Sequence[int], round: int, failed: Failed, tries: int, group: int = 1) -> ClientError:
    """What to say of clients that failed in a group of so many."""
    if isinstance(failed.error, RaypflError):
        return ClientError(str(failed.error), clients)
    rest = [f"{len(clients) - _NAMED} more"] * (len(clients) > _NAMED)
    named = " and ".join(filter(None, [", ".join(map(str, clients[:_NAMED])), *rest]))
    everyone = len(clients) == group > 1
    whom = f"All {group} clients of a group" if everyone else f"Client{'s' * (len(clients) > 1)} {named}"
    times = f" {tries} times in a row" if tries > 1 else ""
    which = f" ({named})" if everyone else ""
    return ClientError(f"{whom} failed{times} in round {round}{which}:\n{failed.trace.rstrip()}", clients)


class _Answer(dict[str, Tensor]):
    """What came up, by name; `who` returned it."""

    def __init__(self, values: Mapping[str, Tensor], who: str):
        super().__init__(values)
        self.who = who

    def __missing__(self, name: str) -> Tensor:
        raise MethodError(
            f"{self.who} returned {', '.join(map(repr, self)) or 'nothing'}; there is no {name!r}. What cohort.run "
            f"gives has the function's own names: ask for one of those, or return {{{name!r}: Mean(...)}} there."
        )


class Cohort(Central):
    """The clients of one round, and the server that asks them.

    Attributes
    ----------
    ids : their numbers, ascending. Rows of a ``Scatter`` and of an ``Each`` reply are in this order.
    present : ``bool[C]``; False for a client that failed in an earlier exchange of this round and was skipped.
    round, lr : the round's number, from 1, and learning rate.
    unseen : whether these are clients that are never trained.
    task : what the method was started with.
    logged : what was logged so far.
    """

    phase: ClassVar[Phase] = "training"

    def __init__(
        self,
        exchanger: Exchanger,
        ids: tuple[int, ...],
        dropped: tuple[int, ...],
        round: int,
        lr: float,
        analysis: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ):
        self.ids = ids
        self.unseen = False
        self.round = round
        self.lr = lr
        self.task = exchanger.task
        self.place = exchanger.place
        self.present = np.ones(len(ids), dtype=bool)
        self.losses: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        self.seconds = 0.0
        self.logged = Logged()
        self._analysis = analysis  # kinds of the columns of tables that were logged in earlier rounds
        self._exchanger = exchanger
        self._exchanger.said = ""
        self._dropped = dropped
        self._exchanges = 0

    def __len__(self) -> int:
        return len(self.ids)

    def generator(self, stream: str = "") -> torch.Generator:
        """A generator of the server's own draws, the same for the same stream in a round.

        It draws on the CPU, so that any device has the same numbers: ``torch.randn(3, generator=g).to(device)``.
        """
        return torch.Generator().manual_seed(rng.key(self.task.seed, "server" + stream, self.round))

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        """One exchange: call one of the method's client functions on every client of the cohort.

        Parameters
        ----------
        function : a client function of the method, ``self.train``: called as ``function(clients, **arguments)`` on
            groups of clients, returning ``{name: Mean | Sum | Each}``.
        arguments : go down. A tensor is a broadcast, as is a list of them, and a ``Broadcast``, which says what of it
            is charged; a ``Scatter`` sends each client its row; numbers and strings go to everybody.

        Returns
        -------
        name -> tensor: the mean or the sum over the cohort, or ``[C, ...]`` for ``Each`` (a row of zeros where
        `present` is False).
        """
        name = self._name_of(function)
        self._check(arguments)
        self._charge_down(arguments)
        arguments = {name: _unwrapped(value) for name, value in arguments.items()}
        pairs = [(p, c) for p, c in enumerate(self.ids) if self.present[p]]
        if not pairs:
            raise EmptyCohort(f"Nobody is left in the cohort of round {self.round}.")
        call, groups = self._exchanger.call(name, pairs, self.round, self.lr, arguments)
        total, logged = Total(len(self.ids), self.task.model.device), Means()
        for group, reply in self._exchanger.run(call, groups, self._lose):
            total.add(group, reply.values)
            logged.add(reply.logged)
            self._note(group, reply)
        if not self.present.any():
            raise EmptyCohort(f"Nobody is left in the cohort of round {self.round}.")
        self._charge_up(total)
        self.log(**logged.result())
        self._exchanges += 1
        answer = _Answer(total.result(), where_defined(function))
        self._exchanger.said = f"{answer.who} got {_shapes(arguments)} and returned {_shapes(answer)}."
        return answer

    def log(self, **values: float | Tensor) -> None:
        """Log numbers of this round, such as ``cohort.log(distillation_loss=0.3)``.

        They are in ``result.logged``, the report and MLflow. Under one name, the last of a round counts.
        """
        self.logged.values.update({name: number(name, value) for name, value in values.items()})

    def log_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Log a table of this round: column -> ``[n]`` numbers or texts, the same columns in every round that has one.

        All rounds' rows are in ``result.analysis[name]``.
        """
        self.logged.tables[name] = checked_columns(name, columns, self._analysis.get(name))

    def log_image(self, name: str, images: Tensor) -> None:
        """Log images ``[n, C, H, W]`` of this round, as one PNG file with all of them in a grid.

        C is 1 or 3; values are uint8, or floats from 0 to 1. The files are in ``result.images``.
        """
        self.logged.images[name] = png(name, images)

    def _name_of(self, function: Callable[..., Any]) -> str:
        owner = getattr(function, "__self__", None)
        theirs = getattr(type(owner), getattr(function, "__name__", ""), None)
        if owner is None or theirs is None or theirs is not getattr(function, "__func__", None):
            raise MethodError(
                "cohort.run takes a client function of the method itself, as in cohort.run(self.train, ...)."
            )
        return function.__name__

    def _check(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if isinstance(value, Scatter) and len(value.rows) != len(self.ids):
                raise MethodError(
                    f"Scatter for {name!r} has {len(value.rows)} rows, but the cohort of round {self.round} has "
                    f"{len(self.ids)} clients."
                )
            if not isinstance(value, Scatter | int | float | str) and not _is_broadcast(value):
                raise MethodError(
                    f"cohort.run cannot send {name!r}, a {type(value).__name__}; send tensors, Broadcast, "
                    "Scatter, numbers or strings."
                )

    def _lose(self, client: int, why: str) -> None:
        self.failed[client] = why
        self.present[self.ids.index(client)] = False
        self._exchanger.warn(f"Skipped: {why}")
        share = self.present.mean()
        if share < self._exchanger.failures.min_success_fraction:
            raise ClientError(
                f"Only {self.present.sum()} of {len(self.ids)} clients of round {self.round} succeeded, fewer than "
                f"failures.min_success_fraction = {self._exchanger.failures.min_success_fraction} asks for. "
                f"The last failure: {why}",
                [client],
            )

    def _note(self, group: Group, reply: Reply) -> None:
        self.seconds += reply.seconds
        if reply.losses is not None:
            self.losses.update(zip(group.clients, reply.losses.tolist(), strict=True))
        for note in reply.notes:
            self._exchanger.warn(note)

    def _charge_down(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if isinstance(value, Scatter):
                rows = value.rows
                self._charge_received(name, rows.shape[1:].numel(), value.charged, rows.element_size())
            else:
                charged = value.charged if isinstance(value, Broadcast) else True
                for each, tensor in taken_apart(_unwrapped(value), name)[1].items():
                    self._charge_received(each, tensor.numel(), charged, tensor.element_size())

    def _charge_received(self, name: str, whole: int, charged: bool | int | Tensor, size: int) -> None:
        numbers = numbers_charged(name, charged, len(self.ids), whole)
        received = Counter(numbers[self.present].tolist())
        if self._exchanges == 0:  # a client that drops out still receives the round's first message
            received[max(numbers.tolist(), default=whole)] += len(self._dropped)
        self._charge_each("down", name, received, size)

    def _charge_up(self, total: Total) -> None:
        for name, senders in total.senders.items():
            self._charge_each("up", name, senders, total.sample[name].array.itemsize)

    def _charge_each(self, direction: Any, name: str, clients: Mapping[int, int], size: int) -> None:
        for numbers, count in sorted(clients.items(), reverse=True):
            if numbers and count:
                sent = (direction, name, count, numbers, numbers * size)
                self._exchanger.ledger.add(Entry(self.round, self._exchanges, *sent, self.phase))


class Judged(Cohort):
    """Clients that are about to be judged, which :meth:`raypfl.Method.personalize` is given.

    Nobody drops out, and a client that fails ends the run: to judge the others alone would give another mean.
    """

    phase = "prediction"

    def __init__(self, exchanger: Exchanger, ids: Sequence[int], round: int, lr: float, unseen: bool):
        super().__init__(exchanger, tuple(ids), (), round, lr)
        self.unseen = unseen

    def _lose(self, client: int, why: str) -> None:
        raise RaypflError(f"Client {client} could not be given its model. {why}")


def _unwrapped(value: Any) -> Any:
    return value.tensor if isinstance(value, Broadcast) else value


def _is_broadcast(value: Any) -> bool:
    tensors = _unwrapped(value)
    return all(isinstance(one, Tensor) for one in (tensors if isinstance(tensors, list | tuple) else [tensors]))


def _shapes(values: Mapping[str, Any]) -> str:
    """``"theta [9610]"``, of a client's."""
    sent = {name: value.rows[0] if isinstance(value, Scatter) else value for name, value in values.items()}
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in taken_apart(sent)[1].items()]
    return ", ".join(shapes) or "nothing"
