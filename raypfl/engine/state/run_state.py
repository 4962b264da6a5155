"""What a run has reached."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from raypfl.common.errors import EmptyCohort
from raypfl.engine.state import client_states
from raypfl.engine.state.run_tables import RunTables
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.storage.states import StateTable
from raypfl.storage.tree import Copies, flatten


class RunState:
    """All that rounds change, and that a checkpoint keeps.

    Attributes
    ----------
    round : the last finished round; 0 before the first one.
    time : simulated seconds since the start of the run.
    server : the server's state, which the method changes.
    """

    def __init__(self, runner: GroupRunner):
        self.runner = runner
        self._copies = Copies()
        self.go_to(0, 0.0, {}, RunTables({}))

    @property
    def clients(self) -> StateTable:
        """References to the clients' states."""
        return self.runner.states

    @clients.setter
    def clients(self, states: StateTable) -> None:
        self.runner.states = states

    def go_to(self, round: int, time: float, server: dict[str, Any], tables: RunTables) -> None:
        """Set all but the clients' states; parameters like the attributes."""
        self.round = round
        self.time = time
        self.server = server
        self.tables = tables
        self.runner.ledger.rows = tables.by_name["ledger"].waiting

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[dict[str, Any]]:
        """Undo every change of the block if it is stopped or fails; yields a copy of the server's state."""
        ledger = self.runner.ledger
        server_before = self._copies.of(self.server)
        entries_before = len(ledger)
        try:
            yield server_before
        except BaseException as error:
            self.server = server_before
            self._copies = Copies()
            self.clients.abandon()
            # An empty cohort changes nothing, but its messages were sent: the ledger keeps them.
            if not isinstance(error, EmptyCohort):
                ledger.cut(entries_before)
            raise

    def weights_hash(self) -> str:
        """Return the SHA-256 of the server's tensors, by name, and then of each client's own SHA-256, by client."""
        digest = hashlib.sha256()
        for name, tensor in sorted(flatten(self.server)[1].items()):
            # As bytes, since NumPy has no bfloat16.
            content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode() + content.numpy().tobytes())

        digest_of_client = client_states.all_digests(self.clients, self.runner.backend)
        for client in sorted(digest_of_client):
            digest.update(digest_of_client[client])
        return digest.hexdigest()
