"""The byte count of a run: what crossed the wire, by round, exchange, direction and tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True)
class Entry:
    """One named message of one exchange, the same size for each of the clients that it went to or came from.

    Where clients sent different amounts, there is an entry for each size.

    Attributes
    ----------
    round : from 1.
    exchange : within the round and phase, from 0; one is one ``cohort.run``.
    direction : ``down`` to the clients, ``up`` from them.
    name : of the argument or reply.
    clients : how many clients.
    numbers, bytes : per client.
    phase : ``training``: of the round itself; ``prediction``: of what clients were given to be judged after it.
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
    """The entries of a run that are not in a file yet, in the order of rounds; those of the round at hand always are.

    Attributes
    ----------
    rows : the entries, column by column.
    """

    def __init__(self) -> None:
        self.rows = Columns(LEDGER)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, entry: Entry) -> None:
        self.rows.append(**vars(entry))

    def cut(self, length: int) -> None:
        """Forget all entries after the first `length`."""
        self.rows.cut(length)

    @property
    def entries(self) -> list[Entry]:
        return [Entry(*row) for row in self.rows.rows()]

    def total(self, direction: str, round: int) -> int:
        """Bytes over all clients in one direction in a round; of training alone."""
        return sum(e.clients * e.bytes for e in self._of(round, "training") if e.direction == direction)

    def per_client(self, round: int, phase: Phase = "training") -> dict[tuple[str, str], float]:
        """Numbers (not bytes) per client in a round: ``{(direction, name): numbers}``, summed over a phase's exchanges.

        Where clients sent different amounts: the mean over those that sent any.
        """
        sent: dict[tuple[str, str], dict[int, list[Entry]]] = {}
        for e in self._of(round, phase):
            sent.setdefault((e.direction, e.name), {}).setdefault(e.exchange, []).append(e)
        return {message: sum(_mean(entries) for entries in of.values()) for message, of in sent.items()}

    def _of(self, round: int, phase: Phase) -> list[Entry]:
        entries = (Entry(*row) for row in self.rows.rows(*self.rows.span("round", round)))
        return [e for e in entries if e.phase == phase]


def _mean(entries: list[Entry]) -> float:
    """Numbers a client of one message."""
    return sum(e.clients * e.numbers for e in entries) / sum(e.clients for e in entries)
