"""The round loop."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from raypfl.analysis.base import AnalysedRun
from raypfl.common.errors import CheckpointError, EmptyCohort, LostState, MethodError, RaypflError, Stopped
from raypfl.common.user_code import describe_failure, explain_user_errors, traceback_text, where_defined, with_location
from raypfl.common.version import __version__
from raypfl.engine.analysing import Analyses
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.events import Checkpointed, Evaluated, Listener, RoundFinished, RunFinished, RunStarted, Warned
from raypfl.engine.groups import groups_for
from raypfl.engine.job import Job
from raypfl.engine.prepared import Prepared
from raypfl.evaluation import Measures
from raypfl.federation.cohort import Cohort, round_record
from raypfl.federation.exchange.backend import Backend
from raypfl.federation.ledger import LEDGER, Ledger
from raypfl.federation.logged import ANALYSIS, IMAGES, LOGGED, Logged, kinds
from raypfl.federation.schedule import CohortDraw, cohort_size, draw_cohort, is_due
from raypfl.learning.privacy import SPENDING, Spending
from raypfl.learning.privacy.accounting import accounted
from raypfl.learning.unkeyed import AT_START, ON_SERVER, refuse_unkeyed
from raypfl.models.weights import origin
from raypfl.storage import checkpoint
from raypfl.storage.checkpoint import Snapshot
from raypfl.storage.columns import Columns
from raypfl.storage.lease import refuse_unless_held
from raypfl.storage.states import StateTable, digests, merged
from raypfl.storage.tables import Table, arrow, read
from raypfl.storage.tree import clone, encoded, flatten, unflatten

if TYPE_CHECKING:
    pass

ROUNDS = {
    "round": "int32",
    "loss": "float64",
    "seconds": "float64",
    "bytes_up": "int64",
    "bytes_down": "int64",
    "clients": "int32",
    "dropped": "int32",
    "failed": "int32",
    "cohort": "int32 list",
}


class Server:
    """Runs an experiment's rounds on a backend, from its newest checkpoint if there is one.

    Parameters
    ----------
    prepared : the experiment, its data and its task, on the server's device.
    emit : called with every event, in order.
    metadata : about the backend, for the run's record.
    """

    def __init__(self, job: Job, prepared: Prepared, backend: Backend, emit: Listener, metadata: dict[str, Any]):
        self.job = job
        self.task = prepared.task
        self.backend = backend
        self.emit = emit
        self.metadata = metadata
        self.experiment = job.experiment
        self.method = job.experiment.method
        self.round = 0
        self.state: dict[str, Any] = {}
        self.states = StateTable()
        self.ledger = Ledger()
        self._tables: dict[str, Table] = {}
        self._sent = {"up": 0, "down": 0}  # bytes of all finished rounds
        self._warned: set[str] = set()
        self._saved: int | None = None
        self._runner = prepared.runner(backend, self.states, self.ledger, self.emit, self._warn)
        self._evaluator = Evaluator(prepared, self._runner)
        run = AnalysedRun(
            task=self.task,
            method=self.method,
            training=self.experiment.training,
            cohort_size=cohort_size(self.experiment.cohort, self.task.num_clients),
            samples=prepared.training_samples,
            pools=prepared.server_pools,
        )
        self._analyses = Analyses(job.experiment.analyses, run, job.run_dir)
        self._runner.keep_observations = self._analyses.keep

    @torch.enable_grad()  # whatever this process did before
    def run(self) -> RunFinished:
        """Run all rounds that are left. A stop or a failure leaves a checkpoint of the last finished round.

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
                return self._finish_rounds()
            except LostState as error:  # running the rounds since the checkpoint again gives the same bits
                reached = self.round
                self._restore_or_start()
                self._warn(f"{error} Going on from round {self.round} again, {reached - self.round} rounds back.")

    def _announce(self) -> None:
        cohort = cohort_size(self.experiment.cohort, self.task.num_clients)
        metadata = {
            "num_clients": self.task.num_clients,
            "parameters": self.task.model.num_parameters,
            "weights": origin(self.task.model.module),
            "executor": self.experiment.engine.executor,
            "channels_last": bool(self.experiment.training.channels_last),
            "why": self.job.why,
            "group_size": max(groups_for(self.experiment, cohort)),
            "data": self.job.fingerprint,
            "server_device": str(self.task.model.device),
            "system": f"{platform.system()} {platform.machine()}",
            "versions": {
                "raypfl": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        if self.job.parent:
            metadata["parent"] = dict(self.job.parent)
        self.emit(RunStarted(self.job.name, self.job.run_dir, self.experiment, metadata | self.metadata, self.round))

    def _finish_rounds(self) -> RunFinished:
        evaluator = self._evaluator
        try:
            # A run that was stopped between a round and its evaluation begins with the evaluation when it is resumed.
            while evaluator.is_due(self.round) or (self.round < self.experiment.rounds and not self._stops_early()):
                if not evaluator.is_due(self.round):
                    self._run_round()
                if evaluator.is_due(self.round):
                    self._evaluate()
                if self.round and is_due(self.round, self.experiment.checkpoint.every, self.experiment.rounds):
                    self._save()
            return self._end("finished")
        except (Stopped, KeyboardInterrupt):
            return self._end("stopped")
        except LostState:
            raise
        except RaypflError as error:
            return self._end("failed", with_location(error) if isinstance(error, MethodError) else str(error))
        except Exception as error:
            due = evaluator.is_due(self.round)
            when = f"in the evaluation after round {self.round}" if due else f"in round {self.round + 1}"
            said = describe_failure(error, when, None if due else self.method.round)
            if said is None:
                said = f"{type(self.method).__name__} failed on the server {when}:\n{traceback_text(error)}"
            return self._end("failed", f"{said}\n{self._runner.last_exchange}".rstrip())

    def _stops_early(self) -> bool:
        if (reason := self._evaluator.reason_to_stop()) is None:
            return False
        self._warn(f"The run ends after round {self.round}: {reason}")
        return True

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If the work within is stopped or fails, everything is as it was before."""
        before, entries = clone(self.state), len(self.ledger)
        try:
            yield
        except BaseException as error:
            self.state = before
            self.states.abandon()
            if not isinstance(error, EmptyCohort):
                self.ledger.cut(entries)
            raise

    def _run_round(self) -> None:
        start, number = time.perf_counter(), self.round + 1
        self._runner.compact_states(number)
        drawn = self._draw(number)
        lr = self.experiment.training.learning_rate(self.round, self.experiment.rounds)
        cohort = Cohort(self._runner, drawn.clients, drawn.dropped, number, lr, self._known_tables())
        before = self._global_model()
        self._runner.observers = self._analyses.observers(number)
        try:
            with self._all_or_nothing():
                with refuse_unkeyed(self.method.round, self.task.model.device, ON_SERVER):
                    returned: object = self.method.round(self.state, cohort)  # type: ignore[func-returns-value]
                self._refuse_returned(returned)
                encoded(self.state, {})  # refuses what no checkpoint can store, before anything uses it
                seconds = time.perf_counter() - start
                here = tuple(c for c, present in zip(cohort.ids, cohort.present, strict=True) if present)
                models = before, self._global_model()
                _, logged = round_record(cohort)
                self._analyses.after_round(number, here, models, logged, self._known_tables())
        except EmptyCohort as error:
            self._warn(f"{error} Such a round changes nothing.")
            seconds = time.perf_counter() - start
        self.states.commit()
        self._record(cohort, len(drawn.dropped), seconds)

    def _refuse_returned(self, returned: object) -> None:
        """Raise a MethodError if a round returns something, which would be lost: a coroutine, or a new state."""
        if returned is not None and returned is not self.state:
            raise MethodError(
                f"{where_defined(self.method.round)} returned {_kind(returned)}; it must return nothing, and change "
                'the server\'s state in place, as in server["theta"] = ...'
            )

    def _global_model(self) -> Tensor | None:
        """A copy, where analyses need it."""
        model = self.method.global_model(self.state) if self._analyses else None
        return None if model is None else model.clone()

    def _draw(self, number: int) -> CohortDraw:
        unseen = self.task.unseen
        drawn = draw_cohort(self.experiment.cohort, self.task.num_clients - len(unseen), self.experiment.seed, number)
        if not len(unseen):
            return drawn
        trained = np.setdiff1d(np.arange(self.task.num_clients), unseen)
        return CohortDraw(*(tuple(trained[list(some)].tolist()) for some in (drawn.clients, drawn.dropped)))

    def _record(self, cohort: Cohort, dropped: int, seconds: float) -> None:
        loss_of, logged = round_record(cohort)
        losses = [loss_of[c] for c in cohort.ids if c in loss_of]
        self.round += 1
        sent = {way: self.ledger.total(way, self.round) for way in self._sent}
        self._sent = {way: before + sent[way] for way, before in self._sent.items()}
        finished = RoundFinished(
            round=self.round,
            loss=float(np.mean(losses)) if losses else math.nan,
            seconds=seconds,
            bytes_up=sent["up"],
            bytes_down=sent["down"],
            clients=int(cohort.present.sum()),
            dropped=dropped,
            failed=len(cohort.failed),
            bytes_up_total=self._sent["up"],
            bytes_down_total=self._sent["down"],
            logged=logged,
        )
        row = {**vars(finished), "cohort": cohort.ids}
        self._tables["rounds"].waiting.append(**{name: row[name] for name in ROUNDS})
        self._record_logged(logged)
        self._record_spent("training", cohort.spent)
        self.emit(finished)

    def _record_logged(self, logged: Logged) -> None:
        for name, value in logged.values.items():
            self._tables["logged"].waiting.append(round=self.round, name=name, value=value)
        for name, png in logged.images.items():
            self._tables["images"].waiting.append(round=self.round, name=name, png=png)
        for name, columns in logged.tables.items():
            new = Table(Columns({"round": "int32", **kinds(columns)}))
            rows = len(next(iter(columns.values())))
            table = self._tables.setdefault(f"{ANALYSIS}{name}", new)
            table.waiting.extend({"round": [self.round] * rows, **columns})

    def _record_spent(self, phase: str, spent: list[Spending]) -> None:
        for row in spent:
            self._tables["spending"].waiting.append(round=self.round, phase=phase, **row._asdict())

    def _known_tables(self) -> dict[str, dict[str, str]]:
        """The columns and their kinds of each table that was logged."""
        return {
            name.removeprefix(ANALYSIS): {c: kind for c, kind in table.waiting.kinds.items() if c != "round"}
            for name, table in self._tables.items()
            if name.startswith(ANALYSIS)
        }

    def _evaluate(self) -> None:
        with self._all_or_nothing():
            columns, summary = self._evaluator.evaluate(self.state, self.round)
        self._tables["evaluations"].waiting.extend(columns)
        self._record_spent("prediction", self._evaluator.spent)
        self.emit(Evaluated(self.round, summary))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self.emit(Warned(text))

    def _end(self, status: Literal["finished", "stopped", "failed"], error: str | None = None) -> RunFinished:
        problems = dict.fromkeys([error] if error else [])
        try:
            if self._saved != self.round:
                self._save()
        except CheckpointError as problem:
            problems[str(problem)] = None
        try:
            tables = {name: checkpoint.whole(self.job.checkpoints, table) for name, table in self._tables.items()}
        except CheckpointError as problem:
            less = f"The tables in {self.job.run_dir} lack earlier rounds until the run has been resumed."
            problems[f"{problem} {less}"] = None
            tables = {name: arrow(table.waiting) for name, table in self._tables.items()}
        status, error = ("failed", "\n".join(problems)) if problems else (status, None)
        images, best = tables.pop("images"), self._evaluator.best_round
        spending = tables.pop("spending")
        if spending.num_rows:
            tables["privacy"] = pa.table(accounted(spending.to_pydict(), self.experiment.privacy))
        finished = RunFinished(status, self.round, self._hash(), error, tables, best, images)
        self.emit(finished)
        return finished

    def _hash(self) -> str:
        """SHA-256 of the server's tensors, in the order of names, and of every client's SHA-256, in that of clients."""
        digest = hashlib.sha256()
        for name, tensor in sorted(flatten(self.state)[1].items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        clients: dict[int, bytes] = {}
        for held, slots in self.states.by_stacks():  # a few stacks at a time: all of them may be more than memory
            stacks = [self.backend.get_states(one.stack) for one in held]
            of = {c: [stack.of(k) for stack, k in zip(stacks, ks, strict=True)] for c, ks in slots.items()}
            clients |= digests((client, merged(parts)) for client, parts in of.items())
        for client in sorted(clients):
            digest.update(clients[client])
        return digest.hexdigest()

    def _save(self) -> None:
        files = [(file, held) for file, held in self.states.files() if checkpoint.holds(self.job.checkpoints, file)]
        unchanged = {stack for _, held in files for stack in held}
        snapshot = Snapshot(
            round=self.round,
            server=self.state,
            states=self.states.shards(self.backend.get_states, without=unchanged),
            files=files,
            tables=self._tables,
            meta={
                "experiment": self.experiment.to_yaml(),
                "data": self.job.fingerprint,
                "weights": self.job.weights,
                "versions": {"raypfl": __version__, "torch": torch.__version__},
            }
            | self._evaluator.saved(),
        )
        permit = partial(refuse_unless_held, self.job.checkpoints, self.job.attempt, surely=True)
        path = checkpoint.save(self.job.checkpoints, snapshot, self.experiment.checkpoint.keep, permit)
        self._saved = self.round
        self.emit(Checkpointed(self.round, path))

    def _restore_or_start(self) -> None:
        self.states = self._runner.states = StateTable()
        # Without what was spent, the epsilon that the run reports would be too small.
        snapshot = checkpoint.load(self.job.checkpoints, self._warn, needed=("spending",), copies=self._copy)
        if snapshot is not None:
            self._restore(snapshot)
        else:
            start = self.method.start
            device = self.task.model.device
            with explain_user_errors("before round 1", function=start), refuse_unkeyed(start, device, AT_START):
                self.round = 0
                self.state = start(self.task)
            if not isinstance(self.state, dict):
                raise MethodError(
                    f"{where_defined(start)} returned {_kind(self.state)}; it must return the server's state, a dict "
                    'such as {"theta": task.model.init(task.seed)}.'
                )
            self._tables = _empty_tables(self._evaluator.measures)
            self._sent = {"up": 0, "down": 0}
            self._evaluator.restore(None)
            logged = Logged()
            self._analyses.start(self._global_model(), logged, {})
            self._record_logged(logged)
        self.ledger.rows = self._tables["ledger"].waiting

    def _copy(self, table: str) -> pa.Table | None:
        """A table as the run's folder has it since the run last ended; None if it has none."""
        with contextlib.suppress(OSError, pa.ArrowException):
            return read(f"{self.job.run_dir}/{table}.parquet")
        return None

    def _restore(self, snapshot: Snapshot) -> None:
        self._tables = _empty_tables(self._evaluator.measures) | snapshot.tables
        self._refuse_other_run(snapshot.meta)
        device = self.task.model.device
        skeleton, tensors = flatten(snapshot.server)
        self.state = unflatten(skeleton, {name: t.to(device) for name, t in tensors.items()})
        for shard in snapshot.states:
            clients, stack = shard.clients.tolist(), shard.stack()
            handle = self.backend.put_states(stack)
            self.states.stage(clients, handle, contents=stack.contents(len(clients)), shard=shard)
        self.states.commit()
        rounds = checkpoint.whole(self.job.checkpoints, self._tables["rounds"])
        self._sent = {way: sum(rounds[f"bytes_{way}"].to_pylist()) for way in self._sent}
        self.round = self._saved = snapshot.round
        self._evaluator.restore(snapshot.meta)

    def _refuse_other_run(self, meta: Mapping[str, Any]) -> None:
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
        if different := set(self._tables["evaluations"].waiting.kinds) ^ set(self._evaluator.measures.column_types):
            raise CheckpointError(
                f"The run in {self.job.run_dir} was evaluated by other metrics than it would be now "
                f"({', '.join(sorted(different))}). Restore its objective and evaluation.metrics, or start a new run."
            )


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _empty_tables(measures: Measures) -> dict[str, Table]:
    of = {"rounds": ROUNDS, "evaluations": measures.column_types, "ledger": LEDGER, "logged": LOGGED, "images": IMAGES}
    of["spending"] = SPENDING
    return {name: Table(Columns(columns)) for name, columns in of.items()}
