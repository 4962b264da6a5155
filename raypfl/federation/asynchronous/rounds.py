"""Trains clients as the schedule says, many rounds at once, and gives each round its replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raypfl.clients.replies.turns import Turns
from raypfl.common.errors import CheckpointError, ClientError, LateReplyError
from raypfl.common.user_code import where_defined
from raypfl.devices import ClientTurns
from raypfl.federation.asynchronous.batches import TurnBatch, TurnGroup, batch_of, groups_that_fit
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
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.logged import EarlierKinds
from raypfl.federation.method import Method
from raypfl.federation.rounds import Rounds
from raypfl.storage.states import StateTable
from raypfl.storage.tree import flatten, on_device


class _JoiningTurns(NamedTuple):
    """Clients, ascending, the rounds that sent them their messages, and those that they reply to, ``int64[n]`` each."""

    clients: np.ndarray
    rounds: np.ndarray
    joins: np.ndarray


class AsynchronousRounds(Rounds):
    """Gives each round its cohort; clients train when their replies are needed, or earlier.

    Which clients train in one group, and how replies are added up, follows from the schedule alone; see
    :class:`TurnBatch`. When a group trains depends on the number of actors.

    Parameters
    ----------
    clients : the number of each client of the schedule, ``int64[n]``.
    together : whether clients that were sent different models may train in one group. The method's client function
        then gets a row for each client where it sends a tensor to all.
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
        self._batches: dict[int, TurnBatch] = {}
        self._replies: dict[int, RoundReplies] = {}
        self._joules: np.ndarray | None = None

    def cohort(
        self,
        round: int,
        server: dict[str, Any],
        earlier_kinds: EarlierKinds,
        cohort_draw: CohortDraw | None = None,
    ) -> Cohort:
        """Send this round's messages, and return the cohort whose replies end it.

        Its clients train now unless they have. The schedule has drawn them, so `cohort_draw` is not read.
        """
        for sent_in in list(self._messages):
            if not self._is_needed(sent_in, after=round - 1):
                del self._messages[sent_in]

        self._send(round, server)
        if round not in self._replies:
            self._train(round)
        replies = self._replies[round]
        self.runner.states.release(replies.clients)
        return ReplyingCohort(self.runner, replies, round, self._learning_rate(round), earlier_kinds)

    def draw(self, round: int, turns: ClientTurns, time: float = 0.0) -> CohortDraw:
        """Return who takes part in a round: whose replies end it, and who was sent its message but will not reply.

        The schedule says when the round begins.
        """
        schedule = self.schedule
        joining = schedule.joining(round, round)
        joining = joining[np.argsort(schedule.clients[joining])]
        sent = schedule.sent_in(round)
        dropped = sent[schedule.drops[sent]]
        begins = schedule.end_of(round - 1)
        if self._joules is None:
            assert turns.devices is not None
            self._joules = schedule.joules(turns.devices.watts[self._clients])
        return CohortDraw(
            clients=tuple(self._clients[schedule.clients[joining]].tolist()),
            dropped=tuple(self._clients[schedule.clients[dropped]].tolist()),
            begins=begins,
            seconds=schedule.end_of(round) - begins,
            joules=float(self._joules[round - 1]),
            staleness=tuple((round - schedule.rounds[joining]).tolist()),
        )

    def message(self, round: int, clients: tuple[int, ...], server: dict[str, Any]) -> Message:
        """Return what the method sends to clients, ascending, in a round, at a state of the server.

        Raises
        ------
        LateReplyError : if late replies to it could not be used, or come from another function than those before.
        """
        cohort = SendingCohort(self.runner, clients, round, self._learning_rate(round))
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

    def update(self, cohort: Cohort, cohort_draw: CohortDraw) -> None:
        """Do nothing: the schedule was made before the first round."""

    def commit(self, round: int) -> None:
        """Drop the replies of a round, which no checkpoint needs any more."""
        del self._replies[round]

    def saved(self, round: int) -> dict[str, Any]:
        """Return what a checkpoint after a round needs: the messages to clients that have yet to train, and replies.

        Where only some clients of a round have trained, all of them train again.
        """
        needed = {}
        for sent_in, message in self._messages.items():
            if sent_in <= round and self._is_needed(sent_in, after=round):
                needed[sent_in] = {"function": message.function, "arguments": dict(message.arguments)}
        return {"messages": needed, "replies": {round: vars(replies) for round, replies in self._replies.items()}}

    def held_states(self) -> StateTable:
        """Return the states that a checkpoint needs beside :meth:`saved`: those of clients whose replies are in it."""
        clients = [client for replies in self._replies.values() for client in replies.clients]
        return self.runner.states.held(clients)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go back to what :meth:`saved` returned; an empty mapping: to the start of the run."""
        saved = on_device(dict(saved), self.runner.task.model.device)
        self._messages = {sent_in: Message(**message) for sent_in, message in saved.get("messages", {}).items()}
        self._batches = {}
        self._replies = {round: RoundReplies(**replies) for round, replies in saved.get("replies", {}).items()}

    def refuse_other_rounds(self, round: int, time: float) -> None:
        """Raise a CheckpointError unless the schedule ends the round at `time`: it says which clients are at work."""
        end = self.schedule.end_of(round)
        if end != time:
            raise CheckpointError(
                f"The checkpoint does not fit this schedule, in which round {round} ends at {end:.1f} simulated "
                f"seconds, not at {time:.1f}. Asynchronous rounds can only continue a run that has had the same "
                "clients, devices, training, messages and settings of asynchronous since its first round; leave these "
                "as they were, or start another run, with `raypfl run`."
            )

    def _send(self, round: int, server: dict[str, Any]) -> None:
        turns = self.schedule.sent_in(round)
        if len(turns):
            clients = tuple(sorted(self._clients[self.schedule.clients[turns]].tolist()))
            self._messages[round] = self.message(round, clients, server)

    def _train(self, round: int) -> None:
        """Train the clients whose replies end a round, and others on actors that would otherwise be idle."""
        required = self._batch(round).waiting
        groups = [*required, *self._groups_meanwhile(round, required)]
        messages: dict[int, Mapping[str, Any]] = {}
        for group in groups:
            for sent_in in group.turns.rounds.tolist():
                messages[sent_in] = self._messages[sent_in].arguments

        call, prepared = self.runner.prepare_turns(
            self._function,
            [group.clients for group in groups],
            [group.turns for group in groups],
            [group.index for group in groups],
            messages,
            round,
        )
        batches = {group.batch: self._batches[group.batch] for group in groups}
        batch_of_client = {}
        for group in groups:
            for client in group.clients.tolist():
                batch_of_client[client] = batches[group.batch]

        def skip(client: int, error: ClientError) -> None:
            batch_of_client[client].drop(client, error)

        for prepared_group, done in self.runner.run(call, prepared, skip):
            batches[batch_of(prepared_group.index)].add(prepared_group, done)
            for subtree in done.subtrees or ():
                batches[batch_of(subtree.place << subtree.level)].add_sums(subtree)
            for note in done.reply.notes:
                self.runner.warn(note)
            done.reply.values = {}  # added up, and large
        self.runner.states.hold()

        trained = {group.index for group in groups}
        for first, batch in batches.items():
            batch.waiting = [group for group in batch.waiting if group.index not in trained]
            if not batch.waiting:
                function = where_defined(getattr(self._method, self._function))
                self._replies |= self._batches.pop(first).finished(function)

    def _groups_meanwhile(self, round: int, required: Sequence[TurnGroup]) -> list[TurnGroup]:
        """Return groups of later rounds for which actors have time while others train the required ones."""
        actors = self.runner.backend.num_actors
        if self._is_vectorised or actors < 2:
            return []

        later_rounds: set[int] = set()
        for sent_in in self._messages:
            joins = self.schedule.joins[self.schedule.sent_in(sent_in)]
            later_rounds |= set(joins[joins > round].tolist())

        further = []
        for later_round in sorted(later_rounds - self._replies.keys()):
            further += [group for group in self._batch(later_round).waiting if group.turns.rounds[0] in self._messages]
        places = groups_that_fit(self._lengths(required), self._lengths(further), actors)
        return [further[place] for place in places]

    def _lengths(self, groups: Sequence[TurnGroup]) -> list[float]:
        return [self.runner.length(group.clients) for group in groups]

    @property
    def _is_vectorised(self) -> bool:
        return self.runner.executor == "vectorised"

    @property
    def _function(self) -> str:
        return next(iter(self._messages.values())).function

    def _batch(self, round: int) -> TurnBatch:
        """Return the batch that begins with a round.

        If clients train together, it has as many rounds as possible: a client costs less in a large group, and with the
        fewest batches, training waits for the fewest models. If they train one by one, it has one round, and the
        clients of a group were sent the same model, so that some can train before others are sent theirs.
        """
        if round not in self._batches:
            last = self.schedule.wave_from(round) if self._is_vectorised else round
            turns = self._turns_joining(round, last)
            as_sent = self._as_sent(turns)
            self._batches[round] = TurnBatch(
                round,
                self._function,
                self._parts(turns, as_sent),
                as_sent,
                self.runner.cut,
                self.runner.task.model.device,
            )
        return self._batches[round]

    def _turns_joining(self, first: int, last: int) -> _JoiningTurns:
        turns = self.schedule.joining(first, last)
        clients = self._clients[self.schedule.clients[turns]]
        order = np.argsort(clients)
        return _JoiningTurns(
            clients=clients[order],
            rounds=self.schedule.rounds[turns][order].astype(np.int64),
            joins=self.schedule.joins[turns][order].astype(np.int64),
        )

    def _as_sent(self, turns: _JoiningTurns) -> dict[int, bool]:
        """Return, for each round that turns join, whether its replies count like those of a synchronous round."""
        counts_whole = self._shares(turns) == 1.0
        if self._settings.mixing is None:
            counts_whole &= turns.joins == turns.rounds
        return {int(round): bool(counts_whole[turns.joins == round].all()) for round in np.unique(turns.joins)}

    def _shares(self, turns: _JoiningTurns) -> np.ndarray:
        """Return how much of each reply counts, ``float64[n]``."""
        shares = self._settings.weights(turns.joins - turns.rounds)
        return shares if self._settings.mixing is None else self._settings.mixing * shares

    def _parts(self, turns: _JoiningTurns, as_sent: Mapping[int, bool]) -> list[tuple[np.ndarray, Turns]]:
        """Divide clients into parts that can train in one group: with the same rate and the same kinds of arguments."""
        members_by_key: dict[Any, list[int]] = {}
        for position, sent_in in enumerate(turns.rounds.tolist()):
            lr = self._learning_rate(sent_in)
            if self._is_vectorised:
                skeleton, _ = flatten(dict(self._messages[sent_in].arguments))
                alone = None if self._together else sent_in
                key = (lr, alone, repr(skeleton))
            else:
                key = (lr, sent_in, "")
            members_by_key.setdefault(key, []).append(position)

        shares = self._shares(turns)
        are_as_sent = np.array([as_sent[round] for round in turns.joins.tolist()])
        parts = []
        for (lr, _, _), members in members_by_key.items():
            part_turns = Turns(
                rounds=turns.rounds[members],
                joins=turns.joins[members],
                shares=shares[members],
                as_sent=are_as_sent[members],
                lr=lr,
                mixes_models=self._settings.mixing is not None,
            )
            parts.append((turns.clients[members], part_turns))
        return parts

    def _is_needed(self, sent_in: int, after: int) -> bool:
        """Return whether a client that was sent the message of a round may train after another round."""
        turns = self.schedule.sent_in(sent_in)
        joins = self.schedule.joins[turns]
        # At the end of the schedule, clients are still at work: the run may be extended.
        is_at_work = (joins == 0) & (self.schedule.ends[turns] >= self.schedule.end_of(after))
        return bool(((joins > after) | is_at_work).any())
