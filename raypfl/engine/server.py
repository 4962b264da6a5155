"""The round loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch

from raypfl.clients.gpu_errors import gpu_failure
from raypfl.common.counting import counted
from raypfl.common.errors import (
    CheckpointError,
    ConfigError,
    Diverged,
    EmptyCohort,
    LostState,
    MethodError,
    RaypflError,
    Stopped,
)
from raypfl.common.global_draws import AT_START, ON_SERVER, refuse_unkeyed
from raypfl.common.stopping import signals_deferred
from raypfl.common.user_code import where_defined, with_location
from raypfl.common.user_warnings import user_warnings
from raypfl.devices import ClientTurns
from raypfl.engine.building.analysing import Analyses
from raypfl.engine.building.rounds import rounds_for
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.events import Evaluated, Listener, RunFinished, RunStarted, Warned
from raypfl.engine.facts import facts_of
from raypfl.engine.job import Job
from raypfl.engine.method_errors import (
    gpu_advice,
    refuse_returned,
    refuse_start,
    saved_state,
    server_failure,
    warning_of_first_round,
    warning_of_other_messages,
)
from raypfl.engine.prepared import Prepared
from raypfl.engine.state.run_checkpoints import RunCheckpoints
from raypfl.engine.state.run_state import RunState
from raypfl.engine.state.run_tables import RunTables, columns_of_rounds, with_privacy
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.ledger import Ledger
from raypfl.models.double_precision import refuse_mixed_precision
from raypfl.storage.states import StateTable


class Server:
    """Runs an experiment's rounds on a backend, from its newest checkpoint if there is one.

    Parameters
    ----------
    metadata : facts about the backend, for the run's record.
    clock : returns the seconds that the run has computed, from any origin.
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
        self._job = job
        self._experiment = job.experiment
        self._method = job.experiment.method
        self._task = prepared.task
        self._facts = facts_of(job, prepared)
        self._emit = emit
        self._metadata = metadata
        self._clock = clock
        self._turns = job.turns or ClientTurns(job.experiment.seed)
        self._warnings: set[str] = set()

        self._runner = prepared.runner(backend, StateTable(), Ledger(), emit, self._warn)
        self._state = RunState(self._runner)
        self._evaluator = Evaluator(prepared, self._runner)
        self._analyses = Analyses(prepared, job.run_dir)
        self._runner.keep_observations = self._analyses.keep
        self._rounds = rounds_for(self._experiment, self._turns, self._runner, job.together)
        self._checkpoints = RunCheckpoints(job, self._state, self._evaluator, self._rounds, emit, clock)

    # Something in this process may have left gradients off.
    @torch.enable_grad()
    def run(self) -> RunFinished:
        """Run the remaining rounds. A stop or a failure leaves a checkpoint of the last finished round.

        Raises
        ------
        RaypflError : if the run cannot begin, so that there is nothing to save.
        """
        start_failure = self._restore_or_start()
        try:
            facts = self._facts | self._metadata
            self._emit(RunStarted(self._job.name, self._job.run_dir, self._experiment, facts, self._state.round))
        except Stopped:
            return self._end("stopped", save=start_failure is None)

        while start_failure is None:
            try:
                return self._run_rounds()
            # Running the rounds since the checkpoint again gives the same bits.
            except LostState as error:
                reached = self._state.round
                start_failure = self._restore_or_start()
                back = counted(reached - self._state.round, "round")
                self._warn(f"{error} Going on from round {self._state.round} again, {back} back.")
        return self._end("failed", start_failure)

    def _restore_or_start(self) -> str | None:
        """Go back to the newest checkpoint or, without one, to the start of the run; return how the start failed.

        Raises
        ------
        RaypflError : if the run is refused, or its checkpoints are another run's.
        """
        if self._checkpoints.restore():
            return None

        columns = columns_of_rounds(self._turns.has_clock, self._experiment.asynchronous.buffer is not None)
        tables = RunTables(self._evaluator.measures.column_types, columns=columns)
        self._state.go_to(0, 0.0, {}, tables)
        self._evaluator.restore(None)
        self._rounds.restore({})
        try:
            self._start()
        except MethodError as error:
            return with_location(error)
        except RaypflError:
            raise
        except Exception as error:
            return server_failure(self._method, error, "before round 1", self._method.start)
        return None

    def _start(self) -> None:
        """Let the method and the analyses start."""
        start = self._method.start
        model = self._task.model
        with refuse_unkeyed(start, model.device, AT_START), refuse_mixed_precision(model.dtype):
            server_state = start(self._task)
        refuse_start(start, server_state)
        state = self._state
        state.server = saved_state(start, server_state)
        state.tables.add_logged(0, self._analyses.start(state.server))

    def _run_rounds(self) -> RunFinished:
        """Run the remaining rounds, with their evaluations and checkpoints, and end the run."""
        try:
            while self._goes_on():
                # A resumed run that was stopped between a round and its evaluation continues with the evaluation.
                if not self._is_evaluation_due():
                    self._run_round()
                if self._is_evaluation_due():
                    self._evaluate()
                if self._checkpoints.is_due():
                    self._checkpoints.save()
            return self._end("finished")
        except (Stopped, KeyboardInterrupt):
            return self._end("stopped")
        except LostState:
            raise
        except Diverged as error:
            return self._end("diverged", str(error))
        except (ConfigError, MethodError) as error:
            # If an evaluation fails, the server's state may be the cause, so it is not saved: every resume would fail.
            return self._end("failed", with_location(error), save=not self._is_evaluation_due())
        except RaypflError as error:
            return self._end("failed", str(error))
        except Exception as error:
            when = f"in round {self._state.round + 1}"
            function: Callable[..., Any] | None = self._method.round
            if self._is_evaluation_due():
                when = f"in the evaluation after round {self._state.round}"
                function = None
            names = self._state.server
            failure = server_failure(self._method, error, when, function, self._runner.last_exchange, names)
            return self._end("failed", failure)

    def _goes_on(self) -> bool:
        """Return whether anything is left to do; warns if the run ends before its last round."""
        if self._is_evaluation_due():
            return True
        if self._state.round >= self._experiment.rounds:
            return False

        reason = self._evaluator.reason_to_stop()
        if reason is not None:
            self._warn(f"The run ends after round {self._state.round}: {reason}")
        return reason is None

    def _is_evaluation_due(self) -> bool:
        return self._evaluator.is_due(self._state.round)

    def _run_round(self) -> None:
        """Draw a cohort, let the method do its round with it, and record the round."""
        started_at = self._clock()
        state = self._state
        number = state.round + 1
        self._runner.compact_states(number)
        cohort_draw = self._rounds.draw(number, self._turns, state.time)
        earlier_kinds = state.tables.logged_kinds()
        model_before = self._analyses.global_model(state.server)
        self._runner.observers = self._analyses.observers(number)

        with ExitStack() as recording:
            try:
                with state.all_or_nothing() as server_before:
                    with (
                        refuse_unkeyed(self._method.round, self._task.model.device, ON_SERVER),
                        refuse_mixed_precision(self._task.model.dtype),
                    ):
                        cohort = self._rounds.cohort(number, state.server, earlier_kinds, cohort_draw)
                        with user_warnings() as texts:
                            returned: object = self._method.round(state.server, cohort)  # type: ignore[func-returns-value]
                    for text in sorted(texts):
                        self._warn(text)
                    refuse_returned(self._method.round, returned, state.server)
                    # A resumed run begins its next round with no more than this, so this one does not either.
                    state.server = saved_state(self._method.round, state.server)
                    # Refuses a state that no evaluation could use: once it is saved, every resume would fail on it.
                    self._evaluator.global_model(
                        state.server, f"The state is what {where_defined(self._method.round)} left."
                    )
                    seconds = self._clock() - started_at

                    models = (model_before, self._analyses.global_model(state.server))
                    self._analyses.after_round(cohort, models, earlier_kinds)
                    self._rounds.update(cohort, cohort_draw)
                    # A second Ctrl-C waits from here on: a round that counts only in part would be saved as it is.
                    recording.enter_context(signals_deferred())
            except EmptyCohort as error:
                recording.enter_context(signals_deferred())
                self._warn(f"{error} Such a round changes nothing.")
                seconds = self._clock() - started_at

            self._rounds.commit(number)
            state.clients.commit()
            state.round = number
            state.time = cohort_draw.ends
            finished = state.tables.add_round(number, cohort, cohort_draw, seconds, self._runner.ledger)

        warnings = (
            warning_of_other_messages(self._method, self._turns.turn, cohort, cohort_draw, finished),
            warning_of_first_round(self._method, cohort, server_before, state),
        )
        for warning in filter(None, warnings):
            self._warn(warning)
        self._emit(finished)

    def _evaluate(self) -> None:
        state = self._state
        with state.all_or_nothing():
            columns, summary = self._evaluator.evaluate(state.server, state.round)
        with signals_deferred():
            self._evaluator.record(state.round, summary)
            state.tables.add_evaluations(columns)
            state.tables.add_spending(state.round, "prediction", self._evaluator.spent)
        self._emit(Evaluated(state.round, summary))

    def _warn(self, text: str) -> None:
        """Emit a warning, once per run."""
        if text not in self._warnings:
            self._warnings.add(text)
            self._emit(Warned(text))

    def _end(
        self,
        status: Literal["finished", "stopped", "diverged", "failed"],
        error: str | None = None,
        save: bool = True,
    ) -> RunFinished:
        """Write a checkpoint if the last round has none, and emit the event of the run's end, with all tables."""
        # A dict keeps each sentence once: saving and reading may fail with the same one.
        problems = dict.fromkeys([error] if error else [])
        failed_gpu = gpu_failure()
        if failed_gpu:
            problems[gpu_advice(failed_gpu, self._job.run_dir)] = None
        # What is on such a GPU can be neither saved nor hashed.
        is_readable = not failed_gpu or self._task.model.device.type == "cpu"
        # A method is mended after a failure, and a run that has no finished round then starts with the mended one.
        is_begun = status != "failed" or self._state.round > 0
        try:
            if save and is_begun and is_readable:
                self._checkpoints.save_unless_saved()
        except CheckpointError as problem:
            problems[str(problem)] = None

        tables = self._state.tables
        try:
            tables_by_name = tables.whole(self._job.checkpoints)
        except CheckpointError as problem:
            consequence = f"The tables in {self._job.run_dir} lack earlier rounds until the run has been resumed."
            problems[f"{problem} {consequence}"] = None
            tables_by_name = tables.waiting()

        images = tables_by_name.pop("images")
        finished = RunFinished(
            status="failed" if problems and status != "diverged" else status,
            round=self._state.round,
            weights_hash=self._state.weights_hash() if is_readable else "",
            error="\n".join(problems) if problems else None,
            tables=with_privacy(tables_by_name, self._experiment.privacy),
            best_round=self._evaluator.best_round,
            images=images,
        )
        self._emit(finished)
        return finished
