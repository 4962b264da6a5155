"""The checkpoints of a run: when one is due, what is in it, and how a run goes back to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import torch

from raypfl.common.errors import CheckpointError
from raypfl.common.rounds import is_due
from raypfl.common.version import __version__
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.events import Checkpointed, Listener
from raypfl.engine.job import Job
from raypfl.engine.state import client_states
from raypfl.engine.state.run_state import RunState
from raypfl.engine.state.run_tables import RunTables
from raypfl.federation.rounds import Rounds
from raypfl.storage import checkpoints
from raypfl.storage.checkpoints import Snapshot, StoredStates
from raypfl.storage.lease import refuse_unless_held
from raypfl.storage.states import StateTable
from raypfl.storage.tables import read_parquet
from raypfl.storage.tree import on_device

ROUNDS_PER_CHECKPOINT = 10
SECONDS_PER_CHECKPOINT = 2.0
"""The rounds between checkpoints if ``checkpoint.every`` is None, and how long they take at least."""


class RunCheckpoints:
    """Saves what a run has reached, and goes back to it.

    `clock` : returns the seconds that the run has computed, from any origin.
    """

    def __init__(
        self,
        job: Job,
        state: RunState,
        evaluator: Evaluator,
        rounds: Rounds,
        emit: Listener,
        clock: Callable[[], float],
    ):
        self._job = job
        self._experiment = job.experiment
        self._state = state
        self._runner = state.runner
        self._evaluator = evaluator
        self._rounds = rounds
        self._emit = emit
        self._clock = clock
        self._saved_round: int | None = None
        self._saved_at = clock()

    def is_due(self) -> bool:
        """Return whether a checkpoint of the last finished round is due."""
        every = self._experiment.checkpoint.every
        if every is None:
            # A checkpoint waits for the disk, which takes as long as a short round.
            is_too_soon = self._clock() - self._saved_at < SECONDS_PER_CHECKPOINT
            every = 0 if is_too_soon else ROUNDS_PER_CHECKPOINT
        return self._state.round > 0 and is_due(self._state.round, every, self._experiment.rounds)

    def save(self) -> None:
        """Write a checkpoint, which shares an earlier one's files of clients' states that have not changed.

        Raises
        ------
        CheckpointError : if it cannot be written.
        """
        state = self._state
        permit = partial(refuse_unless_held, self._job.checkpoints, self._job.attempt, strict=True)
        with checkpoints.explain_write_errors(state.round, self._job.checkpoints):
            client_files = self._save_states(state.clients, permit)
            held_files = self._save_states(self._rounds.held_states(), permit)

        meta = {
            "experiment": self._description,
            "data": self._job.fingerprint,
            "weights": self._job.weights,
            "devices": self._job.device_files,
            "versions": {"raypfl": __version__, "torch": torch.__version__},
            "time": state.time,
        }
        snapshot = Snapshot(
            round=state.round,
            server=state.server,
            states=client_files,
            tables=state.tables.by_name,
            meta=meta | self._evaluator.saved(),
            pending=self._rounds.saved(state.round),
            held=held_files,
        )

        location = checkpoints.save(self._job.checkpoints, snapshot, self._experiment.checkpoint.keep, permit)
        self._saved_round = state.round
        self._saved_at = self._clock()
        self._emit(Checkpointed(state.round, location))

    def save_unless_saved(self) -> None:
        """Write a checkpoint if the last finished round has none; the errors are those of :meth:`save`."""
        if self._saved_round != self._state.round:
            self.save()

    def restore(self) -> bool:
        """Go back to the newest checkpoint; return whether there is one.

        Raises
        ------
        CheckpointError : if every checkpoint is damaged, or they belong to another run than the job describes.
        """
        self._saved_at = self._clock()
        # Free the current states before the checkpoint's are read.
        self._state.clients = StateTable()
        snapshot = checkpoints.load(
            self._job.checkpoints,
            self._runner.warn,
            # Without earlier spending, the reported epsilon would be too small.
            needed=("spending",),
            copy_of=self._table_of_run,
            use_states=self._use_states,
        )
        if snapshot is None:
            return False

        tables = RunTables(self._evaluator.measures.column_types, snapshot.tables)
        self._refuse_other_run(snapshot.meta, tables)
        time = snapshot.meta["time"]
        self._rounds.refuse_other_rounds(snapshot.round, time)
        tables.count_costs(self._job.checkpoints)
        server = on_device(snapshot.server, self._runner.task.model.device)
        self._state.go_to(snapshot.round, time, server, tables)
        self._saved_round = snapshot.round
        self._evaluator.restore(snapshot.meta)
        self._rounds.restore(snapshot.pending)
        if snapshot.held.state_files:
            self._state.clients.hold_again(client_states.restored(snapshot.held, self._runner.backend))
        return True

    @cached_property
    def _description(self) -> str:
        """The experiment as YAML text, whose writing takes a third of a small checkpoint."""
        return self._experiment.to_yaml()

    def _save_states(self, states: StateTable, permit: Callable[[], None]) -> StoredStates:
        return client_states.save(states, self._runner.backend, self._job.checkpoints, permit, self._runner.warn)

    def _use_states(self, stored: StoredStates) -> None:
        self._state.clients = client_states.restored(stored, self._runner.backend)

    def _table_of_run(self, table: str) -> pa.Table | None:
        """Read a table from the run's folder, where the run's last end wrote it; None if that fails."""
        with contextlib.suppress(OSError, pa.ArrowException):
            return read_parquet(f"{self._job.run_dir}/{table}.parquet")
        return None

    def _refuse_other_run(self, meta: Mapping[str, Any], tables: RunTables) -> None:
        """Raise a CheckpointError unless a checkpoint belongs to the run as it is now."""
        job = self._job
        if meta["data"] != job.fingerprint:
            raise CheckpointError(
                f"The checkpoint in {job.checkpoints} was made with other data than {self._experiment.data.name} "
                "has now, or with another partition. Restore the data it was made with, or start a new run."
            )
        if meta["weights"] != job.weights:
            raise CheckpointError(
                f"The run in {job.run_dir} began with other weights than {self._experiment.model.weights} holds "
                "now; new clients would begin with the new ones. Restore the file, or start a new run."
            )

        if meta["devices"] != job.device_files:
            raise CheckpointError(
                f"The run in {job.run_dir} began with other devices than the files of devices.hardware and "
                "devices.availability hold now. Restore the files, or start a new run."
            )

        recorded_columns = set(tables.by_name["evaluations"].waiting.kinds)
        different = recorded_columns ^ set(self._evaluator.measures.column_types)
        if different:
            raise CheckpointError(
                f"The run in {job.run_dir} was evaluated with other metrics than it would be now "
                f"({', '.join(sorted(different))}). Restore its objective and evaluation.metrics, or start a new run."
            )
