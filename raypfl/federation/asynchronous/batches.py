"""Turns whose replies are added up together, and the groups in which their clients train."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raypfl.clients.replies.turns import Turns, round_and_name
from raypfl.clients.worker import Group
from raypfl.common.errors import ClientError, Diverged
from raypfl.federation.asynchronous.cohorts import RoundReplies
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.federation.exchange.backend import Done
from raypfl.federation.exchange.tree_sum import Subtree

MOST_GROUPS = 1 << 20
"""More than the groups of any batch, and a power of two. Indices of a batch's groups begin at a multiple of it, so that
none of the subtrees in which their sums are added up has groups of another batch."""

OVERTIME = 1.1
"""Other groups may take this many times as long as the required ones are expected to: expectations are never exact."""


@dataclass(frozen=True, eq=False)
class TurnGroup:
    """Clients that train in one group.

    `clients` : the clients' numbers, ``int64[K]``.
    """

    index: int
    clients: np.ndarray
    turns: Turns

    @property
    def batch(self) -> int:
        """The first round of the group's batch."""
        return batch_of(self.index)


class TurnBatch:
    """The turns whose replies end one round, or several.

    Parameters
    ----------
    first : the first of these rounds.
    parts : clients, ``int64[n]``, and their turns; those of different parts train in different groups.
    function : the name of the client function.
    as_sent : round -> whether its replies count like those of a synchronous one.
    cut : cuts clients into groups, and returns the positions of each group's.

    Attributes
    ----------
    waiting : the groups that have yet to train.
    """

    def __init__(
        self,
        first: int,
        function: str,
        parts: Iterable[tuple[np.ndarray, Turns]],
        as_sent: Mapping[int, bool],
        cut: Callable[[np.ndarray], Sequence[np.ndarray]],
        device: torch.device,
    ):
        self.waiting: list[TurnGroup] = []
        clients_of_round: dict[int, list[int]] = {round: [] for round in as_sent}
        self._round_of: dict[int, int] = {}
        for clients, turns in parts:
            for members in cut(clients):
                index = first * MOST_GROUPS + len(self.waiting)
                self.waiting.append(TurnGroup(index, clients[members], turns.of(members)))
            for client, round in zip(clients.tolist(), turns.joins.tolist(), strict=True):
                clients_of_round[round].append(client)
                self._round_of[client] = round

        self._replies: dict[int, RoundReplies] = {}
        for round, round_clients in clients_of_round.items():
            self._replies[round] = RoundReplies(function, tuple(sorted(round_clients)), as_sent[round])
        self._sums = ReplyAggregator(len(self._round_of), device)
        self._logged = ReplyAggregator(len(self._round_of), device)
        self._summed: set[str] = set()

    def drop(self, client: int, error: ClientError) -> None:
        """Note that a client was skipped."""
        replies = self._replies[self._round_of[client]]
        replies.failed[client] = error.message
        if isinstance(error, Diverged):
            replies.diverged += (client,)

    def add(self, group: Group, done: Done) -> None:
        """Add a group's reply, except the sums of a bundle; see :meth:`add_sums`."""
        reply = done.reply
        self._sums.add(group, reply.values, None if done.subtrees is None else ())
        self._logged.add(group, reply.logged)
        self._summed |= {name for name, value in reply.values.items() if value.kind == "sum"}
        if reply.losses is not None:
            for client, loss in zip(group.clients, reply.losses.tolist(), strict=True):
                self._replies[self._round_of[client]].losses[client] = loss

    def add_sums(self, subtree: Subtree) -> None:
        """Add the sums of groups of this batch that ran in a bundle."""
        self._sums.add_sums(subtree)

    def finished(self, function: str) -> dict[int, RoundReplies]:
        """Return the replies of each round, once all groups have trained; `function` describes what returned them."""
        sizes = self._sums.sent
        for full_name, value in self._sums.result(function).items():
            round, name = round_and_name(full_name)
            replies = self._replies[round]
            values = replies.sums if full_name in self._summed else replies.means
            values[name] = value
            replies.sent[name] = sizes[full_name]

        for full_name, mean in self._logged.result(function).items():
            round, name = round_and_name(full_name)
            self._replies[round].logged[name] = mean
        return self._replies


def batch_of(index: int) -> int:
    """Return the first round of the batch of the group with this index."""
    return index // MOST_GROUPS


def groups_that_fit(required: Iterable[float], further: Sequence[float], actors: int) -> list[int]:
    """Return which further groups actors can train while others are busy with required ones, as places in `further`.

    Parameters
    ----------
    required, further : the groups' expected durations, in the same unit; of the further ones, earlier ones take
        precedence.
    """
    busy_until = [0.0] * actors
    for duration in sorted(required, reverse=True):
        heapq.heapreplace(busy_until, busy_until[0] + duration)
    end = OVERTIME * max(busy_until)

    places = []
    for place, duration in enumerate(further):
        if busy_until[0] + duration <= end:
            heapq.heapreplace(busy_until, busy_until[0] + duration)
            places.append(place)
    return places
