"""What a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raypfl.storage.checkpoints.state_files import StoredStates
from raypfl.storage.tables import RunTable


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to continue to the same bits.

    Attributes
    ----------
    round : the number of rounds finished.
    server : nested dicts (keys str or int), lists and tuples of tensors, int, float, str, bool, None. Tensors come back
        on the CPU.
    states : the clients' states, in files that are written before the snapshot is saved.
    tables : name -> table, whose files' names begin with this name. Saving moves the waiting rows into a file.
    meta : anything that JSON can hold.
    pending : what the next rounds need: what an asynchronous run has under way, or what the selection of clients
        remembers; a tree like `server`.
    held : states of clients that have trained, but whose reply is part of a later round.
    """

    round: int
    server: dict[str, Any]
    states: StoredStates
    tables: dict[str, RunTable]
    meta: dict[str, Any]
    pending: dict[str, Any] = field(default_factory=dict)
    held: StoredStates = field(default_factory=lambda: StoredStates(""))

    def state_of(self, client: int) -> dict[str, np.ndarray]:
        """Return what one client keeps, by name; empty if it keeps nothing."""
        return self.states.state_of(client)

    @property
    def states_bytes(self) -> int:
        """Bytes of the files with the clients' states."""
        return sum(file.bytes for file in self.states.state_files)
