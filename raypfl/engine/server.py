"""The round loop."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, Literal

import pyarrow as pa
import torch

from raypfl.common.counting import counted
from raypfl.common.errors import CheckpointError, EmptyCohort, LostState, MethodError, RaypflError, Stopped
from raypfl.common.global_draws import AT_START, ON_SERVER, refuse_unkeyed
from raypfl.common.rounds import is_due
from raypfl.common.user_code import explain_user_errors, with_location
from raypfl.common.version import __version__
from raypfl.devices import ClientTurns
from raypfl.engine import client_states
from raypfl.engine.building.analysing import Analyses
from raypfl.engine.building.rounds import rounds_for
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.events import Checkpointed, Evaluated, Listener, RunFinished, RunStarted, Warned
from raypfl.engine.facts import facts_of
from raypfl.engine.job import Job
from raypfl.engine.method_errors import refuse_returned, refuse_start, server_failure, warning_of_other_messages
from raypfl.engine.prepared import Prepared
from raypfl.engine.run_tables import ROUNDS, STALENESS, TIMED_ROUNDS, RunTables
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.ledger import Ledger
from raypfl.learning.privacy.accounting import accounted
from raypfl.storage import checkpoints
from raypfl.storage.checkpoints import Snapshot
from raypfl.storage.lease import refuse_unless_held
from raypfl.storage.states import StateTable
from raypfl.storage.tables import read_parquet
from raypfl.storage.tree import clone, encode, flatten, on_device

ROUNDS_PER_CHECKPOINT = 10
SECONDS_PER_CHECKPOINT = 2.0
"""The rounds between checkpoints if ``checkpoint.every`` is None, and how long they take at least."""


class Server:
    """Runs an experiment's rounds on a backend, from its newest checkpoint if there is one.

    Parameters
    ----------
    job : the run's names, folders and hashes.
    prepared : the job's experiment, its data and its task, on the server's device.
    backend : where groups of clients run.
    emit : a function that is called with every event, in order.
    metadata : facts about the backend, for the run's record.
    clock : returns the seconds that the run has computed, from any origin.

    Attributes
    ----------
    round : the last finished round.
    state : the server's state, which the method changes.
    states : references to the clients' states.
    time : simulated seconds since the start of the run.
    """

    def __init__(
        self,
        job: Job,
        prepared: Prepared,
        backend: Backend,
        emit: Listener,
        metadata: dict[str, Any],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.job = job
        self.task = prepared.task
        self.backend = backend
        self.emit = emit
        self.metadata = metadata
        self._clock = clock
        self.experiment = job.experiment
        self.method = job.experiment.method
        self.round = 0
        self.state: dict[str, Any] = {}
        self.states = StateTable()
        self.ledger = Ledger()
        self.time = 0.0
        self._turns = job.turns or ClientTurns(job.experiment.seed)
        self._records = RunTables({})
        self._warnings: set[str] = set()
        self._saved_round: int | None = None
        self._saved_at = clock()

        self._runner = prepared.runner(backend, self.states, self.ledger, self.emit, self._warn)
        self._evaluator = Evaluator(prepared, self._runner)
        self._analyses = Analyses(prepared, job.run_dir)
        self._runner.keep_observations = self._analyses.keep
        self._rounds = rounds_for(self.experiment, self._turns, self._runner, job.together)

    # Something in this process may have left gradients off.
    @torch.enable_grad()
    def run(self) -> RunFinished:
        """Run the remaining rounds. A stop or a failure leaves a checkpoint of the last finished round.

        Raises
        ------
        RaypflError : if the run cannot begin, so that there is nothing to save.
        """
        self._restore_or_start()
        try:
            self._announce()
        except Stopped:
            return self._end("stopped")

        while True:
            try:
                return self._run_rounds()
            # Running the rounds since the checkpoint again gives the same bits.
            except LostState as error:
                reached = self.round
                self._restore_or_start()
                back = counted(reached - self.round, "round")
                self._warn(f"{error} Going on from round {self.round} again, {back} back.")

    def _announce(self) -> None:
        """Emit the event of the run's start, with the facts for its record."""
        facts = facts_of(self.job, self.task) | self.metadata
        self.emit(RunStarted(self.job.name, self.job.run_dir, self.experiment, facts, self.round))

    def _run_rounds(self) -> RunFinished:
        """Run the remaining rounds, with their evaluations and checkpoints, and end the run."""
        evaluator = self._evaluator
        try:
            # A resumed run that was stopped between a round and its evaluation continues with the evaluation.
            while evaluator.is_due(self.round) or (self.round < self.experiment.rounds and not self._stops_early()):
                if not evaluator.is_due(self.round):
                    self._run_round()
                if evaluator.is_due(self.round):
                    self._evaluate()
                if self._is_save_due():
                    self._save()
            return self._end("finished")
        except (Stopped, KeyboardInterrupt):
            return self._end("stopped")
        except LostState:
            raise
        except MethodError as error:
            # What is wrong in an evaluation may be the state: a resume from it could fail again and again.
            return self._end("failed", with_location(error), save=not evaluator.is_due(self.round))
        except RaypflError as error:
            return self._end("failed", str(error))
        except Exception as error:
            return self._end("failed", self._describe_failure(error))

    def _describe_failure(self, error: Exception) -> str:
        """What failed and where, for an error that the method raised on the server."""
        is_evaluation = self._evaluator.is_due(self.round)
        failed = self.round if is_evaluation else self.round + 1
        return server_failure(self.method, error, failed, is_evaluation, self._runner.last_exchange)

    def _stops_early(self) -> bool:
        reason = self._evaluator.reason_to_stop()
        if reason is None:
            return False
        self._warn(f"The run ends after round {self.round}: {reason}")
        return True

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Undo every change of the block if it is stopped or fails."""
        state_before = clone(self.state)
        entries_before = len(self.ledger)
        try:
            yield
        except BaseException as error:
            self.state = state_before
            self.states.abandon()
            # An empty cohort changes nothing, but its messages were sent: the ledger keeps them.
            if not isinstance(error, EmptyCohort):
                self.ledger.cut(entries_before)
            raise

    def _run_round(self) -> None:
        """Draw a cohort, let the method do its round with it, and record the round."""
        start = self._clock()
        number = self.round + 1
        self._runner.compact_states(number)
        cohort_draw = self._rounds.draw(number, self._turns, self.time)
        logged_columns = self._records.logged_columns()
        model_before = self._analyses.global_model(self.state)
        self._runner.observers = self._analyses.observers(number)

        try:
            with self._all_or_nothing():
                with refuse_unkeyed(self.method.round, self.task.model.device, ON_SERVER):
                    cohort = self._rounds.cohort(number, self.state, logged_columns, cohort_draw)
                    returned: object = self.method.round(self.state, cohort)  # type: ignore[func-returns-value]
                refuse_returned(self.method.round, returned, self.state)
                # Refuses what no checkpoint can store, before anything uses it.
                encode(self.state, {})
                # Refuses a state that no evaluation could use: once it is saved, every resume would fail on it.
                self._evaluator.global_model(self.state)
                seconds = self._clock() - start
                models = (model_before, self._analyses.global_model(self.state))
                self._analyses.after_round(cohort, models, logged_columns)
                self._rounds.update(cohort, cohort_draw)
        except EmptyCohort as error:
            self._warn(f"{error} Such a round changes nothing.")
            seconds = self._clock() - start

        self._rounds.commit()
        self.states.commit()
        self.round = number
        self.time = cohort_draw.ends
        finished = self._records.add_round(number, cohort, cohort_draw, seconds, self.ledger)
        warning = warning_of_other_messages(self.method, self._turns.turn, finished)
        if warning is not None:
            self._warn(warning)
        self.emit(finished)

    def _evaluate(self) -> None:
        with self._all_or_nothing():
            columns, summary = self._evaluator.evaluate(self.state, self.round)
        self._records.add_evaluations(columns)
        self._records.add_spending(self.round, "prediction", self._evaluator.spent)
        self.emit(Evaluated(self.round, summary))

    def _warn(self, text: str) -> None:
        """Emit a warning, once per run."""
        if text not in self._warnings:
            self._warnings.add(text)
            self.emit(Warned(text))

    def _end(
        self, status: Literal["finished", "stopped", "failed"], error: str | None = None, save: bool = True
    ) -> RunFinished:
        """Write a checkpoint if the last round has none, and emit the event of the run's end, with all tables."""
        # A dict keeps each sentence once: saving and reading may fail with the same one.
        problems = dict.fromkeys([error] if error else [])
        try:
            if save and self._saved_round != self.round:
                self._save()
        except CheckpointError as problem:
            problems[str(problem)] = None

        try:
            tables = self._records.whole(self.job.checkpoints)
        except CheckpointError as problem:
            consequence = f"The tables in {self.job.run_dir} lack earlier rounds until the run has been resumed."
            problems[f"{problem} {consequence}"] = None
            tables = self._records.waiting()

        images = tables.pop("images")
        spending = tables.pop("spending")
        if spending.num_rows:
            tables["privacy"] = pa.table(accounted(spending.to_pydict(), self.experiment.privacy))
        finished = RunFinished(
            status="failed" if problems else status,
            round=self.round,
            weights_hash=self._hash(),
            error="\n".join(problems) if problems else None,
            tables=tables,
            best_round=self._evaluator.best_round,
            images=images,
        )
        self.emit(finished)
        return finished

    def _hash(self) -> str:
        """SHA-256 of the server's tensors, sorted by name, and then of each client's own SHA-256, sorted by client."""
        digest = hashlib.sha256()
        for name, tensor in sorted(flatten(self.state)[1].items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())

        digest_of_client = client_states.all_digests(self.states, self.backend)
        for client in sorted(digest_of_client):
            digest.update(digest_of_client[client])
        return digest.hexdigest()

    def _is_save_due(self) -> bool:
        every = self.experiment.checkpoint.every
        if every is None:
            # A checkpoint takes as long as a short round, and waits for the disk.
            is_too_soon = self._clock() - self._saved_at < SECONDS_PER_CHECKPOINT
            every = 0 if is_too_soon else ROUNDS_PER_CHECKPOINT
        return self.round > 0 and is_due(self.round, every, self.experiment.rounds)

    def _save(self) -> None:
        """Write a checkpoint, which shares an earlier one's files of clients' states that have not changed."""
        location = self.job.checkpoints
        permit = partial(refuse_unless_held, location, self.job.attempt, strict=True)
        with checkpoints.explain_write_errors(self.round, location):
            states = client_states.save(self.states, self.backend, location, permit, self._warn)
            held_states = client_states.save(self._rounds.held_states(), self.backend, location, permit, self._warn)

        snapshot = Snapshot(
            round=self.round,
            server=self.state,
            states=states,
            tables=self._records.tables,
            meta={
                "experiment": self._description,
                "data": self.job.fingerprint,
                "weights": self.job.weights,
                "devices": self.job.device_files,
                "versions": {"raypfl": __version__, "torch": torch.__version__},
                "time": self.time,
            }
            | self._evaluator.saved(),
            pending=self._rounds.saved(self.round),
            held=held_states,
        )

        path = checkpoints.save(location, snapshot, self.experiment.checkpoint.keep, permit)
        self._saved_round = self.round
        self._saved_at = self._clock()
        self.emit(Checkpointed(self.round, path))

    @cached_property
    def _description(self) -> str:
        """The experiment as YAML text, whose writing takes a third of a small checkpoint."""
        return self.experiment.to_yaml()

    def _restore_or_start(self) -> None:
        """Go back to the newest checkpoint or, without one, to the start of the run."""
        self._saved_at = self._clock()
        self._use_states(StateTable())
        # Without what was spent, the epsilon that the run reports would be too small.
        snapshot = checkpoints.load(
            self.job.checkpoints,
            self._warn,
            needed=("spending",),
            copies=self._table_of_run,
            use_states=lambda stored: self._use_states(client_states.restored(stored, self.backend)),
        )
        if snapshot is not None:
            self._restore(snapshot)
        else:
            self._start()
        self._rounds.restore(snapshot.pending if snapshot else {})
        if snapshot and snapshot.held.state_files:
            self.states.hold_again(client_states.restored(snapshot.held, self.backend))
        self.ledger.rows = self._records.tables["ledger"].waiting

    def _use_states(self, states: StateTable) -> None:
        self.states = states
        self._runner.states = states

    def _start(self) -> None:
        """Make the server's state before the first round, with the method's `start`."""
        start = self.method.start
        with (
            explain_user_errors("before round 1", function=start),
            refuse_unkeyed(start, self.task.model.device, AT_START),
        ):
            self.round = 0
            self.time = 0.0
            self.state = start(self.task)
        refuse_start(start, self.state)

        self._records = RunTables(self._evaluator.measures.column_types, columns=self._columns_of_rounds())
        self._evaluator.restore(None)
        self._records.add_logged(self.round, self._analyses.start(self.state))

    def _columns_of_rounds(self) -> dict[str, str]:
        columns = TIMED_ROUNDS if self._turns.has_clock else ROUNDS
        return columns if self.experiment.asynchronous.buffer is None else columns | STALENESS

    def _table_of_run(self, table: str) -> pa.Table | None:
        """Read a table from the run's folder, where the run's last end wrote it; None if that fails."""
        with contextlib.suppress(OSError, pa.ArrowException):
            return read_parquet(f"{self.job.run_dir}/{table}.parquet")
        return None

    def _restore(self, snapshot: Snapshot) -> None:
        """Go back to a checkpoint."""
        self._records = RunTables(self._evaluator.measures.column_types, snapshot.tables)
        self._refuse_other_run(snapshot.meta)

        self.state = on_device(snapshot.server, self.task.model.device)
        self._records.count_costs(self.job.checkpoints)
        self.round = snapshot.round
        # Checkpoints of versions without simulated time lack it.
        self.time = snapshot.meta.get("time", 0.0)
        self._saved_round = snapshot.round
        self._evaluator.restore(snapshot.meta)

    def _refuse_other_run(self, meta: Mapping[str, Any]) -> None:
        """Raise a CheckpointError unless a checkpoint belongs to the run as it is now."""
        if meta["data"] != self.job.fingerprint:
            raise CheckpointError(
                f"The checkpoint in {self.job.checkpoints} was made with other data or another partition than "
                f"{self.experiment.data.name} is now. Restore the data it was made with, or start a new run."
            )
        if meta["weights"] != self.job.weights:
            raise CheckpointError(
                f"The run in {self.job.run_dir} began with other weights than {self.experiment.model.weights} holds "
                "now, with which new clients would begin. Restore the file, or start a new run."
            )

        if meta.get("devices", "") != self.job.device_files:
            raise CheckpointError(
                f"The run in {self.job.run_dir} began with other devices than the files of devices.hardware and "
                "devices.availability hold now. Restore the files, or start a new run."
            )

        recorded_columns = set(self._records.tables["evaluations"].waiting.kinds)
        different = recorded_columns ^ set(self._evaluator.measures.column_types)
        if different:
            raise CheckpointError(
                f"The run in {self.job.run_dir} was evaluated by other metrics than it would be now "
                f"({', '.join(sorted(different))}). Restore its objective and evaluation.metrics, or start a new run."
            )
