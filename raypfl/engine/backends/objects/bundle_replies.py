"""The replies of client actors for bundles of groups, from whose sizes those of the next ones are expected."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

from raypfl.clients.worker import Group, Reply
from raypfl.federation.exchange.backend import BundleReply, Done, Failed
from raypfl.storage.stacks import Contents

SEPARATE_BYTES = 1_000_000
"""Bytes from which a client's state is a Ray object of its own, so that it is freed as soon as there is a newer one.
An object costs about a millisecond, as much as copying so many bytes."""

BUNDLE_BYTES = 100_000_000
"""Bytes of states and rows of ``Each`` that an actor may keep until all groups of a bundle are done."""


class BundleReplies:
    """Takes replies apart, and remembers how large they were.

    A function's replies are expected to be as large as the last time. The first time, states are stacked and groups
    come one by one.
    """

    def __init__(self) -> None:
        self._are_separate: dict[Hashable, bool] = {}
        self._client_bytes: dict[Hashable, float] = {}
        self._sum_bytes: dict[Hashable, int] = {}

    def are_separate(self, function: Hashable) -> bool:
        """Return whether each client's new state is an object of its own."""
        return self._are_separate.get(function, False)

    def most_clients(self, function: Hashable) -> float:
        """Return the most clients of a bundle of several groups."""
        if function not in self._client_bytes:
            return 1
        return BUNDLE_BYTES / max(1.0, self._client_bytes[function])

    def sum_bytes(self, function: Hashable) -> int:
        """Return the bytes of a reply's sums; 0 if unknown."""
        return self._sum_bytes.get(function, 0)

    def outcomes(
        self, function: Hashable, groups: Sequence[Group], reply: BundleReply, stacks: Sequence[Any], node: str
    ) -> list[tuple[Group, Done | Failed]]:
        """Return each group's outcome.

        Parameters
        ----------
        stacks : references to the states of all groups: one for each group or, if they are separate, for each client.
        node : the node that holds them.
        """
        num_clients = sum(len(group.clients) for group in groups)
        are_separate = len(stacks) == num_clients
        remaining = iter(stacks)
        # A bundle's sums go with the first of its groups that has succeeded.
        subtrees = reply.subtrees
        # Sums that stay on their node are not in the reply; assume the size of the last ones that came.
        self._sum_bytes[function] = _bytes_of_sums(reply) or self.sum_bytes(function)

        outcomes: list[tuple[Group, Done | Failed]] = []
        client_bytes = []
        for group, outcome in zip(groups, reply.outcomes, strict=True):
            group_stacks = list(islice(remaining, len(group.clients) if are_separate else 1))
            if isinstance(outcome, Failed):
                outcomes.append((group, outcome))
                continue

            client_bytes.append(_bytes_besides_sums(outcome) / len(group.clients))
            if outcome.new_states is None:
                done = Done(outcome, subtrees=subtrees)
            else:
                is_large = outcome.new_states.nbytes >= SEPARATE_BYTES * len(group.clients)
                self._are_separate[function] = is_large
                done = Done(outcome, _changes(group, outcome.new_states, group_stacks), node, subtrees)
            outcomes.append((group, done))
            subtrees = None if subtrees is None else ()

        if client_bytes:
            self._client_bytes[function] = max(client_bytes)
        return outcomes


def _changes(group: Group, contents: Contents, stacks: Sequence[Any]) -> list[tuple[tuple[int, ...], Any, Contents]]:
    """Return the changes of a group's states: its only stack, or one for each client."""
    if len(stacks) < len(group.clients):
        return [(group.clients, stacks[0], contents)]
    clients = [(client,) for client in group.clients]
    return list(zip(clients, stacks, contents.by_client(), strict=True))


def _bytes_of_sums(reply: BundleReply) -> int:
    """Return the bytes of the sums in a reply."""
    if reply.subtrees is None:
        (outcome,) = reply.outcomes
        values = [] if isinstance(outcome, Failed) else outcome.values.values()
        return sum(value.array.nbytes for value in values if not value.has_rows)
    return sum(total.array.nbytes for subtree in reply.subtrees for total in subtree.totals.values())


def _bytes_besides_sums(reply: Reply) -> int:
    """Return the bytes of a group's new states and of its rows, which no bundle adds up."""
    rows = sum(value.array.nbytes for value in reply.values.values() if value.has_rows)
    return rows + (reply.new_states.nbytes if reply.new_states else 0)
