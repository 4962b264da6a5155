"""The messages of a run, counted by round, exchange, direction and tensor."""

from __future__ import annotations

from typing import Literal, NamedTuple

from raypfl.storage.columns import Columns

LEDGER = {
    "round": "int32",
    "exchange": "int32",
    "direction": "text",
    "name": "text",
    "clients": "int32",
    "numbers": "int64",
    "bytes": "int64",
    "phase": "text",
}

Phase = Literal["training", "prediction"]

MessageSize = tuple[int, int, int]
"""The numbers and bytes of a client's message, and how many clients send or receive one of this size."""


class LedgerEntry(NamedTuple):
    """A message that clients sent or received in an exchange; one entry for each size of it.

    Attributes
    ----------
    round : the round's number, from 1.
    exchange : the number of the ``cohort.run`` within the round and phase, from 0.
    direction : ``down`` to the clients, ``up`` from them.
    name : the name of the argument or reply.
    clients : the number of clients.
    numbers, bytes : the size of one client's message.
    phase : ``training``, or ``prediction`` for what :meth:`raypfl.Method.personalize` sends in an evaluation.
    """

    round: int
    exchange: int
    direction: Literal["down", "up"]
    name: str
    clients: int
    numbers: int
    bytes: int
    phase: Phase = "training"


class Ledger:
    """The entries of a run since its last checkpoint, and of the current round.

    `rows` : the entries by column, in the order of rounds.
    """

    def __init__(self) -> None:
        self.rows = Columns(LEDGER)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, entry: LedgerEntry) -> None:
        self.rows.append(**entry._asdict())

    def cut(self, length: int) -> None:
        """Remove all entries after the first `length`."""
        self.rows.cut(length)

    @property
    def entries(self) -> list[LedgerEntry]:
        return [LedgerEntry(*row) for row in self.rows.rows()]

    def total(self, direction: str, round: int) -> int:
        """Return the bytes of training in one direction (``up`` or ``down``) in a round, over all clients."""
        total = 0
        for row in self.rows.rows(*self.rows.span("round", round)):
            entry = LedgerEntry(*row)
            if entry.phase == "training" and entry.direction == direction:
                total += entry.clients * entry.bytes
        return total
