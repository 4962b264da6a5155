"""Trains clients as the schedule says, many rounds at once, and gives each round its replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypfl.clients.replies.turns import Turns, round_and_name
from raypfl.common.errors import LateReplyError
from raypfl.devices import ClientTurns
from raypfl.federation.asynchronous.cohorts import (
    Message,
    ReplyingCohort,
    RoundReplies,
    SendingCohort,
    message_of,
)
from raypfl.federation.asynchronous.schedule import Schedule
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.cohort import Cohort
from raypfl.federation.cohort_draw import CohortDraw
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.method import Method
from raypfl.storage.tree import flatten, on_device


@dataclass(frozen=True)
class _Wave:
    """The turns of all clients that train at once.

    Attributes
    ----------
    clients : the clients' numbers, ascending, ``int64[n]``.
    rounds, joins : the rounds in which they were sent their messages, and those that they reply to, ``int64[n]``.
    """

    clients: np.ndarray
    rounds: np.ndarray
    joins: np.ndarray


class AsynchronousRounds:
    """Gives each round its cohort. Clients train in waves, each of all the turns that the finished models allow.

    Parameters
    ----------
    clients : the number of each client of the schedule, ``int64[n]``.
    learning_rate : a function that returns the learning rate of a round.
    together : whether clients that were sent different models may train in one group. The method's client function
        then gets a row for each client where it sends a tensor to all.

    Attributes
    ----------
    runner : the runner of the server's exchanges.
    """

    def __init__(
        self,
        settings: AsynchronousSettings,
        schedule: Schedule,
        clients: np.ndarray,
        method: Method,
        runner: GroupRunner,
        learning_rate: Callable[[int], float],
        together: bool,
    ):
        self.schedule = schedule
        self.runner = runner
        self._settings = settings
        self._clients = clients
        self._method = method
        self._learning_rate = learning_rate
        self._together = together
        self._messages: dict[int, Message] = {}
        self._replies: dict[int, RoundReplies] = {}
        self._joules: np.ndarray | None = None

    def cohort(self, round: int, server: dict[str, Any], earlier_kinds: Mapping[str, Mapping[str, str]]) -> Cohort:
        """Send this round's messages, and return the cohort whose replies end it.

        Its clients, and those of further rounds that need no later message, train now unless they have.

        Parameters
        ----------
        server : the server's state after the round before.
        """
        for sent_in in list(self._messages):
            if not self._is_needed(sent_in, after=round - 1):
                del self._messages[sent_in]

        self._send(round, server)
        if round not in self._replies:
            self._train(round)
        replies = self._replies.pop(round)
        self.runner.states.release(replies.clients)
        return ReplyingCohort(self.runner, replies, round, self._learning_rate(round), earlier_kinds)

    def draw(self, round: int, turns: ClientTurns) -> CohortDraw:
        """Return who takes part in a round: whose replies end it, and who was sent its message but will not reply."""
        schedule = self.schedule
        joining = schedule.joining(round, round)
        joining = joining[np.argsort(schedule.clients[joining])]
        sent = schedule.sent_in(round)
        dropped = sent[schedule.drops[sent]]
        begins = float(schedule.round_begins[round - 1])
        if self._joules is None:
            assert turns.devices is not None
            self._joules = schedule.joules(turns.devices.watts[self._clients])
        return CohortDraw(
            clients=tuple(self._clients[schedule.clients[joining]].tolist()),
            dropped=tuple(self._clients[schedule.clients[dropped]].tolist()),
            begins=begins,
            seconds=float(schedule.round_ends[round - 1]) - begins,
            joules=float(self._joules[round - 1]),
            staleness=tuple((round - schedule.rounds[joining]).tolist()),
        )

    def message(self, round: int, clients: tuple[int, ...], server: dict[str, Any]) -> Message:
        """Return what the method sends to clients, ascending, in a round, at a state of the server.

        Raises
        ------
        LateReplyError : if replies to it could not be met, or come from another function than those before.
        """
        cohort = SendingCohort(self.runner, clients, (), round, self._learning_rate(round))
        message = message_of(self._method, server, cohort)
        for earlier in self._messages.values():
            if earlier.function != message.function:
                raise LateReplyError(
                    f"{type(self._method).__name__} calls {message.function!r} on clients in round {round}, and "
                    f"{earlier.function!r} in a round before. Clients of both train at once in an asynchronous run, so "
                    "all rounds must call the same function.",
                    "rounds call different functions",
                )
        return message

    def saved(self, round: int) -> dict[str, Any]:
        """Return what a checkpoint after a round needs: the messages to clients that have yet to train, and replies.

        The states of clients that have trained are held by the table of states.
        """
        needed = {}
        for sent_in, message in self._messages.items():
            if sent_in <= round and self._is_needed(sent_in, after=round):
                needed[sent_in] = {"function": message.function, "arguments": dict(message.arguments)}
        return {"messages": needed, "replies": {round: vars(replies) for round, replies in self._replies.items()}}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned; an empty mapping: to the start of the run."""
        saved = on_device(dict(saved), self.runner.task.model.device)
        self._messages = {sent_in: Message(**message) for sent_in, message in saved.get("messages", {}).items()}
        self._replies = {round: RoundReplies(**replies) for round, replies in saved.get("replies", {}).items()}

    def _send(self, round: int, server: dict[str, Any]) -> None:
        turns = self.schedule.sent_in(round)
        if len(turns):
            clients = tuple(sorted(self._clients[self.schedule.clients[turns]].tolist()))
            self._messages[round] = self.message(round, clients, server)

    def _train(self, first: int) -> None:
        """Train all clients whose replies end the rounds from the first one to the last that can be known now."""
        last = self.schedule.wave_from(first)
        wave = self._wave(first, last)
        as_sent = self._as_sent(wave)
        needed = {sent_in: self._messages[sent_in] for sent_in in np.unique(wave.rounds).tolist()}
        function = next(iter(needed.values())).function

        parts = self._parts(wave, as_sent)
        messages = {sent_in: message.arguments for sent_in, message in needed.items()}
        call, groups = self.runner.prepare_turns(function, parts, messages, first, exchange="training 0")

        replies: dict[int, RoundReplies] = {}
        for round in range(first, last + 1):
            clients = wave.clients[wave.joins == round].tolist()
            replies[round] = RoundReplies(function, tuple(clients), as_sent[round])
        round_of_client = dict(zip(wave.clients.tolist(), wave.joins.tolist(), strict=True))

        def skip(client: int, why: str) -> None:
            replies[round_of_client[client]].failed[client] = why

        device = self.runner.task.model.device
        sums = ReplyAggregator(len(wave.clients), device)
        logged = ReplyAggregator(len(wave.clients), device)
        summed: set[str] = set()
        for group, done in self.runner.run(call, groups, skip):
            reply = done.reply
            sums.add(group, reply.values, done.subtrees)
            logged.add(group, reply.logged)
            summed |= {name for name, value in reply.values.items() if value.kind == "sum"}
            reply.values = {}  # added up, and large
            for note in reply.notes:
                self.runner.warn(note)
            if reply.losses is not None:
                for client, loss in zip(group.clients, reply.losses.tolist(), strict=True):
                    replies[round_of_client[client]].losses[client] = loss

        sent = sums.sent
        for full_name, value in sums.result().items():
            round, name = round_and_name(full_name)
            values = replies[round].sums if full_name in summed else replies[round].means
            values[name] = value
            replies[round].senders[name] = sent[full_name]
        for full_name, mean in logged.result().items():
            round, name = round_and_name(full_name)
            replies[round].logged[name] = mean

        self.runner.states.hold()
        self._replies = replies

    def _wave(self, first: int, last: int) -> _Wave:
        turns = self.schedule.joining(first, last)
        clients = self._clients[self.schedule.clients[turns]]
        order = np.argsort(clients)
        return _Wave(
            clients=clients[order],
            rounds=self.schedule.rounds[turns][order].astype(np.int64),
            joins=self.schedule.joins[turns][order].astype(np.int64),
        )

    def _as_sent(self, wave: _Wave) -> dict[int, bool]:
        """Return, for each round of a wave, whether its replies count like those of a synchronous round."""
        counts_whole = self._shares(wave) == 1.0
        if self._settings.mixing is None:
            counts_whole &= wave.joins == wave.rounds
        return {int(round): bool(counts_whole[wave.joins == round].all()) for round in np.unique(wave.joins)}

    def _shares(self, wave: _Wave) -> np.ndarray:
        """Return how much of each reply counts, ``float64[n]``."""
        shares = self._settings.weights(wave.joins - wave.rounds)
        return shares if self._settings.mixing is None else self._settings.mixing * shares

    def _parts(self, wave: _Wave, as_sent: Mapping[int, bool]) -> list[tuple[np.ndarray, Turns]]:
        """Part the clients of a wave that cannot train in one group: they have other rates, or other arguments."""
        members_of_part: dict[Any, list[int]] = {}
        for position, sent_in in enumerate(wave.rounds.tolist()):
            skeleton, _ = flatten(dict(self._messages[sent_in].arguments))
            alone = None if self._together else sent_in
            part = (alone, self._learning_rate(sent_in), repr(skeleton))
            members_of_part.setdefault(part, []).append(position)

        shares = self._shares(wave)
        counts_whole = np.array([as_sent[round] for round in wave.joins.tolist()])
        parts = []
        for (_, lr, _), members in members_of_part.items():
            turns = Turns(
                rounds=wave.rounds[members],
                joins=wave.joins[members],
                shares=shares[members],
                as_sent=counts_whole[members],
                lr=lr,
                mixes_models=self._settings.mixing is not None,
            )
            parts.append((wave.clients[members], turns))
        return parts

    def _is_needed(self, sent_in: int, after: int) -> bool:
        """Return whether a client that was sent the message of a round may train after another round."""
        turns = self.schedule.sent_in(sent_in)
        joins = self.schedule.joins[turns]
        # At the end of the schedule, clients are still at work: the run may be extended.
        now = self.schedule.round_ends[after - 1] if after else 0.0
        is_at_work = (joins == 0) & (self.schedule.ends[turns] >= now)
        return bool(((joins > after) | is_at_work).any())
