"""One trial: a configuration's run, in the process that Ray Tune gives it.

What a trial reports carries no copy of its checkpoint but says where that is: a trial keeps its checkpoints in its own
folder, all of them if other trials may continue from them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.common.errors import ConfigError, Stopped
from raypfl.common.files import write

if TYPE_CHECKING:
    from raypfl.engine.events import Event, Listener
    from raypfl.evaluation import Measures
    from raypfl.experiment import Experiment
    from raypfl.integrations.tuning.sweep import Sweep

WHERE = "where.json"
"""The file in a reported checkpoint: the folder of a run, the round, and the `SCHEDULE` up to it."""

SCHEDULE = "schedule.json"
"""The file in a run's folder with the configurations under which it was trained, where PBT or PB2 may change them: a
list of ``{"after": round, "drawn": configuration}``, in the order of rounds."""

STOP_SECONDS = 120
"""Seconds that Tune waits for a stopped trial to save its state, before it starts another process."""


@dataclass
class Trial:
    """What is known of a trial.

    Attributes
    ----------
    name : of its folder. status : ``waiting``, ``running``, ``finished``, ``stopped`` (by the scheduler) or ``failed``.
    drawn : its configuration, as :func:`raypfl.integrations.tuning.spaces.chosen` takes it.
    round : of its last report. values : name of each metric -> value in it.
    error : a sentence, if it failed.
    """

    name: str
    drawn: dict[str, Any]
    status: str = "waiting"
    round: int = 0
    values: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of it to run."""
        return self.status in ("finished", "stopped", "failed")


def end_of(sweep: Sweep, trial: Trial) -> str:
    """The status of a trial that did not fail: ``finished`` after all its rounds, else ``stopped``."""
    return "finished" if trial.round >= sweep.configured(trial.drawn).rounds else "stopped"


@dataclass(frozen=True)
class Order:
    """What all trials of a sweep share.

    Attributes
    ----------
    sweep : its description. metrics : their names (:func:`metric_names`). folder : of the sweep.
    home : working directory, to which paths and modules are relative.
    events : a Ray queue for ``(trial, seed, pickled event)``.
    """

    sweep: Sweep
    metrics: list[str]
    folder: Path
    home: str
    events: Any


def finished_runs(sweep: Sweep, folder: Path) -> Iterator[tuple[str, int, Path]]:
    """The name of the trial, the number of the seed and the folder of each run that is finished."""
    from raypfl.runs.result import is_finished

    for one in sorted((folder / "trials").glob("*")):
        for seed in range(sweep.seeds):
            run = run_folder(sweep, folder, one.name, seed)
            if is_finished(run):
                yield one.name, seed, run


def run_folder(sweep: Sweep, folder: Path, trial: str, seed: int) -> Path:
    """The folder of one run of a trial."""
    inside = "" if sweep.seeds == 1 else f"seed-{seed}"
    return folder / "trials" / trial / inside


def schedule_of(run: Path) -> list[dict[str, Any]]:
    """The content of a run's `SCHEDULE`; empty where no scheduler changes configurations."""
    file = run / SCHEDULE
    return json.loads(file.read_text()) if file.exists() else []


def name_of(trial_id: str) -> str:
    """A trial's name, of its id at Ray Tune: a number such as ``00003`` or, of a searcher's own trials, hexadecimal."""
    return trial_id.rpartition("_")[2]


def run_trial(config: Mapping[str, Any], order: Order) -> None:
    """Run a configuration to its end, or until Tune stops it; continues from a checkpoint that Tune gives."""
    from ray import tune

    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(STOP_SECONDS)
    with contextlib.suppress(OSError):
        os.chdir(order.home)
    _refuse_without_folder(order.folder)
    trial = name_of(tune.get_context().get_trial_id())
    finals = []
    for seed in range(order.sweep.seeds):
        run = _Run(order, trial, seed, dict(config), order.sweep.configured(config, seed))
        run.carry_out(tune.get_checkpoint() if order.sweep.seeds == 1 else None)
        finals.append(run.values)
    if order.sweep.seeds > 1:
        mean = {name: sum(one[name] for one in finals) / len(finals) for name in finals[0]}
        tune.report({**mean, "round": run.experiment.rounds})


def _refuse_without_folder(folder: Path) -> None:
    """Raise a ConfigError on a node without the sweep's folder: one that joined after the sweep had begun."""
    from raypfl.integrations.tuning.sweep import SWEEP

    if not (folder / SWEEP).exists():
        raise ConfigError(
            f"The node {platform.node()} has no {folder / SWEEP}: a sweep's folder has to be the same on all nodes. "
            "Set output to a folder that all nodes share, and keep nodes without it out of the cluster."
        )


def close(folder: Path, hear: Listener) -> None:
    """Write the results of a stopped trial, as of its last checkpoint, if its process does not do so.

    At a sweep's end Tune gives processes five seconds, too few on a busy machine; some save their rounds all the same.
    """
    from raypfl.engine.events import RunStarted
    from raypfl.engine.job import checkpoints_of
    from raypfl.runs import driver as runs
    from raypfl.runs.result import SUMMARY, description
    from raypfl.storage import lease

    def stop_at_once(event: Event) -> None:
        hear(event)
        if isinstance(event, RunStarted):
            raise Stopped("The trial was stopped.")

    lease.wait_until_free(checkpoints_of(description(folder), str(folder)), STOP_SECONDS)
    if not (folder / SUMMARY).exists():
        runs.resume(folder, listeners=[stop_at_once], lockstep=True)


@dataclass
class _Run:
    """One run of a trial.

    Attributes
    ----------
    drawn : the configuration that `experiment` is of.
    values : name -> what was optimised, after the last evaluation.
    schedule : the content of `SCHEDULE`.
    """

    order: Order
    trial: str
    seed: int
    drawn: dict[str, Any]
    experiment: Experiment
    values: dict[str, float] = field(default_factory=dict)
    evaluated: int = -1
    reported: int = -1
    is_stopped: bool = False
    schedule: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reports(self) -> bool:
        """Whether each evaluation is reported; of several seeds, only the mean at their ends is."""
        return self.order.sweep.seeds == 1

    @property
    def folder(self) -> Path:
        return run_folder(self.order.sweep, self.order.folder, self.trial, self.seed)

    def carry_out(self, start: Any) -> None:
        from raypfl.runs import driver as runs
        from raypfl.runs.result import RECIPE, RunResult, is_finished, write_description

        is_copy = start is not None and self._go_on_from(start)
        experiment = self._as_a_trial()
        if self.order.sweep.scheduler.copies and not is_copy:
            self._go_on_with_schedule()
        _keep_actors(experiment)
        if not is_copy and is_finished(self.folder):  # and Tune was killed before it took note
            result = RunResult.load(self.folder)
            self.experiment = result.experiment
        elif (self.folder / RECIPE).exists():
            write_description(self.folder, experiment)
            result = runs.resume(self.folder, listeners=[self._hear], lockstep=True)
        else:
            result = runs.run(experiment, listeners=[self._hear], run_dir=self.folder, lockstep=True)
        if self.is_stopped:
            raise SystemExit
        if result.status == "stopped":
            raise Stopped("The trial was asked to stop.")
        self.values = self._optimised(result.summary())
        if self.reports and self.reported < result.round:
            self._report(result.round, done=True)

    def _as_a_trial(self) -> Experiment:
        """In this process alone, unless the trial has actors; with all checkpoints, if others may continue from one."""
        changes = [] if self.experiment.ray.actors else ["engine.backend=inline"]
        changes += ["checkpoint.keep=1000000"] if self.order.sweep.scheduler.copies else []
        return self.experiment.override(changes)

    def _go_on_from(self, start: Any) -> bool:
        """Begin with the state that a reported checkpoint is of; returns whether that is another trial's."""
        from raypfl.runs.resuming import branch

        with start.as_directory() as folder:
            where = json.loads(Path(folder, WHERE).read_text())
        source = Path(where["folder"])
        is_copy = source != self.folder
        if is_copy:
            branch(source, where["round"], self.folder, self.experiment)
            self._train_from(where["round"], where["schedule"])
        self.reported = where["round"]
        return is_copy

    def _go_on_with_schedule(self) -> None:
        """Continue from the checkpoints in the run's folder, which may be of another configuration."""
        from raypfl.storage import checkpoint

        before = schedule_of(self.folder)
        if before and before[-1]["drawn"] == self.drawn:
            self.schedule = before
        else:
            self._train_from(checkpoint.reached(str(self.folder / "checkpoints")), before)

    def _train_from(self, round: int, before: list[dict[str, Any]]) -> None:
        """Note that the rounds after `round` are trained under this configuration."""
        parts = [part for part in before if part["after"] < round]
        self.schedule = [*parts, {"after": round, "drawn": self.drawn}]
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / SCHEDULE, json.dumps(self.schedule))

    def _hear(self, event: Event) -> None:
        from raypfl.engine.events import Checkpointed, Evaluated, Progress, RunStarted

        if not isinstance(event, Progress):
            self._forward(event)
        if isinstance(event, RunStarted):
            self.experiment = event.experiment
        elif isinstance(event, Evaluated):
            self.evaluated, self.values = event.round, self._optimised(event.summary)
        elif isinstance(event, Checkpointed) and self._is_to_be_reported(event.round):
            self._report(event.round, done=False)

    def _is_to_be_reported(self, round: int) -> bool:
        """Whether a checkpoint's round was evaluated and is news; the last one is reported when the run is over."""
        return self.reports and self.reported < round == self.evaluated < self.experiment.rounds

    def _forward(self, event: Event) -> None:
        import ray

        self.order.events.put((self.trial, self.seed, ray.cloudpickle.dumps(event)))

    def _optimised(self, summary: list[dict[str, Any]]) -> dict[str, float]:
        values = {}
        measures = self.experiment.measures
        for name, target in zip(self.order.metrics, self.order.sweep.metric, strict=True):
            rows = {row["model"]: row for row in summary if row["protocol"] == target.protocol}
            model = target.model or ("personal" if "personal" in rows else "global")
            if model not in rows:
                raise ConfigError(
                    f"The metric {name!r} is of {model} models, but the method {type(self.experiment.method).__name__} "
                    f"has none that is evaluated on {target.protocol!r}."
                )
            values[name] = float(rows[model][target.value or measures.primary.name])
        return values

    def _report(self, round: int, done: bool) -> None:
        """Report an evaluated round; after the last one, `done` keeps a scheduler from changing the trial."""
        from ray import tune

        with tempfile.TemporaryDirectory() as folder:
            where = {"folder": str(self.folder), "round": round, "schedule": self.schedule}
            Path(folder, WHERE).write_text(json.dumps(where))
            self.reported = round
            try:
                tune.report(
                    {**self.values, "round": round, "done": done}, checkpoint=tune.Checkpoint.from_directory(folder)
                )
            except SystemExit:  # Tune ends a trial's thread in this way; its run ends as one that was interrupted
                self.is_stopped = True
                raise Stopped("Tune stopped the trial.") from None


_kept: list[contextlib.ExitStack] = []


def _keep_actors(experiment: Experiment) -> None:
    """Keep this process's server and client actors for its next trials; Ray ends them with it."""
    from raypfl.runs import driver as runs

    if experiment.engine.backend == "ray" and not _kept:
        _kept.append(contextlib.ExitStack())
        _kept[0].enter_context(runs.session(experiment))


def metric_names(sweep: Sweep, measures: Measures) -> list[str]:
    """What each metric is called, as in MLflow: ``accuracy/val`` or, if a model is given, ``std/val/personal``."""
    return [
        "/".join(filter(None, (one.value or measures.primary.name, one.protocol, one.model))) for one in sweep.metric
    ]
