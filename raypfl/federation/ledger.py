"""The byte count of a run: what crossed the wire, by round, exchange, direction and tensor."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Literal


@dataclass(frozen=True)
class Entry:
    """One named message of one exchange, the same size for each of the clients that it went to or came from.

    Attributes
    ----------
    round, exchange : both from 0; an exchange is one ``cohort.run``.
    direction : ``down`` to the clients, ``up`` from them.
    name : of the argument or reply.
    clients : how many clients.
    numbers, bytes : per client.
    """

    round: int
    exchange: int
    direction: Literal["down", "up"]
    name: str
    clients: int
    numbers: int
    bytes: int


class Ledger:
    """All entries so far."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def total(self, direction: str, round: int | None = None) -> int:
        """Bytes over all clients in one direction, in one round or in all."""
        return sum(
            e.clients * e.bytes
            for e in self.entries
            if e.direction == direction and (round is None or e.round == round)
        )

    def per_client(self, round: int) -> dict[tuple[str, str], int]:
        """Numbers (not bytes) per client in a round: ``{(direction, name): numbers}``, summed over its exchanges."""
        numbers: dict[tuple[str, str], int] = {}
        for e in self.entries:
            if e.round == round:
                numbers[e.direction, e.name] = numbers.get((e.direction, e.name), 0) + e.numbers
        return numbers

    def columns(self) -> dict[str, list[object]]:
        """The entries column by column, as for a table."""
        rows = [astuple(e) for e in self.entries]
        return {f.name: [row[i] for row in rows] for i, f in enumerate(fields(Entry))}

    def restore(self, columns: dict[str, list[object]]) -> None:
        """Take entries back from :meth:`columns`."""
        self.entries = [Entry(*row) for row in zip(*(columns[f.name] for f in fields(Entry)), strict=True)]
