"""One trial: a configuration's run, in the process that Ray Tune gives it.

A report to Tune carries no copy of a checkpoint, only its location. A trial keeps its checkpoints in its own folder,
and all of them if other trials may continue from them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.common.errors import ConfigError, Stopped
from raypfl.common.files import write

if TYPE_CHECKING:
    from raypfl.engine.events import Event, Listener
    from raypfl.evaluation import Measures
    from raypfl.experiment import Experiment
    from raypfl.integrations.tuning.sweep import Sweep
    from raypfl.runs.result import RunResult
    from raypfl.runs.together import Place

CHECKPOINT_SOURCE = "where.json"
"""The file in a reported checkpoint: the folder of a run, the round, and the `SCHEDULE` up to it."""

SCHEDULE = "schedule.json"
"""The file in a run's folder with the configurations under which it was trained, where PBT or PB2 may change them: a
list of ``{"after": round, "drawn": configuration}``, in the order of rounds."""

STOP_SECONDS = 120
"""Seconds that Tune waits for a stopped trial to save its state, before it starts another process."""


@dataclass
class Trial:
    """The state of a trial.

    Attributes
    ----------
    name : the name of its folder.
    drawn : the configuration, as :func:`raypfl.experiment.spaces.values_by_setting` takes it.
    status : ``waiting``, ``running``, ``finished``, ``stopped`` (by the scheduler), ``diverged`` or ``failed``.
    round : the round of the last report.
    values : the value of each metric in the last report, by name; empty if the trial diverged or failed.
    error : a sentence, if the trial diverged or failed.
    """

    name: str
    drawn: dict[str, Any]
    status: str = "waiting"
    round: int = 0
    values: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the trial is left to run."""
        return self.status in ("finished", "stopped", "diverged", "failed")

    @property
    def defined(self) -> dict[str, float]:
        """The values without those of metrics that are undefined for all clients."""
        return {name: value for name, value in self.values.items() if not math.isnan(value)}

    def fail(self, error: str, is_divergence: bool = False) -> None:
        """End with an error, which makes no result of the metrics before it."""
        self.status = "diverged" if is_divergence else "failed"
        self.error = error
        self.values = {}


TrialListener = Callable[[str, int, "Event"], None]
"""A function of a trial's name, a seed's number and an event of that run."""


def last_sentence(error: str) -> str:
    """Return the last line of an error or a traceback, without the error's type."""
    lines = error.strip().splitlines()
    return re.sub(r"^.*Error: |^(\w+\.)+[A-Z]\w+: ", "", lines[-1]) if lines else ""


def final_status(sweep: Sweep, trial: Trial) -> str:
    """Return the status of a trial that has ended and not failed: ``finished`` after all rounds, else ``stopped``."""
    return "finished" if trial.round >= sweep.configured(trial.drawn).rounds else "stopped"


def has_diverged(sweep: Sweep, folder: Path, trial: str) -> bool:
    """Whether a run of a trial diverged."""
    from raypfl.runs.records import divergence

    return any(divergence(run_folder(sweep, folder, trial, seed)) for seed in range(sweep.seeds))


@dataclass(frozen=True)
class SweepContext:
    """What all trials of a sweep share.

    Attributes
    ----------
    sweep : the sweep's description.
    metrics : the names of the metrics (:func:`metric_names`).
    folder : the sweep's folder.
    home : the working directory, to which paths and modules are relative.
    events : a Ray queue for ``(trial, seed, pickled event)``.
    """

    sweep: Sweep
    metrics: list[str]
    folder: Path
    home: str
    events: Any


def finished_runs(sweep: Sweep, folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield the name of the trial, the number of the seed and the folder of each finished run."""
    from raypfl.runs.records import is_finished

    # With a slash: folders alone. A trial that was killed leaves a lock beside its folder.
    for trial_folder in sorted((folder / "trials").glob("*/")):
        for seed in range(sweep.seeds):
            run = run_folder(sweep, folder, trial_folder.name, seed)
            if is_finished(run):
                yield trial_folder.name, seed, run


def run_folder(sweep: Sweep, folder: Path, trial: str, seed: int) -> Path:
    """Return the folder of one run of a trial."""
    subfolder = "" if sweep.seeds == 1 else f"seed-{seed}"
    return folder / "trials" / trial / subfolder


def schedule_of(run: Path) -> list[dict[str, Any]]:
    """Return the content of a run's `SCHEDULE`; empty where no scheduler has changed the configuration."""
    file = run / SCHEDULE
    return json.loads(file.read_text()) if file.exists() else []


def extend_schedule(
    run: Path, round: int, drawn: Mapping[str, Any], before: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Record that a configuration holds for the rounds after `round`, and the schedule `before` until then."""
    schedule = [*(dict(part) for part in before if part["after"] < round), {"after": round, "drawn": dict(drawn)}]
    run.mkdir(parents=True, exist_ok=True)
    write(run / SCHEDULE, json.dumps(schedule))
    return schedule


def trial_name(trial_id: str) -> str:
    """Return the name of a trial with this id in Ray Tune.

    It is a number such as ``00003`` or, if a searcher other than Tune's own proposed the trial, hexadecimal.
    """
    return trial_id.rpartition("_")[2]


def run_trial(config: Mapping[str, Any], context: SweepContext) -> None:
    """Run a configuration to its end, or until Tune stops it; continue from a checkpoint if Tune gives one."""
    from ray import tune

    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(STOP_SECONDS)
    with contextlib.suppress(OSError):  # on another node there may be no such directory
        os.chdir(context.home)
    _refuse_without_folder(context.folder)

    sweep = context.sweep
    trial = trial_name(tune.get_context().get_trial_id())
    if sweep.seeds == 1:
        _TrialRun(context, trial, 0, dict(config), sweep.configured(config)).execute(tune.get_checkpoint())
    else:
        tune.report({**run_seeds(config, context, trial), "round": sweep.configured(config).rounds})


def run_seeds(config: Mapping[str, Any], context: SweepContext, trial: str) -> dict[str, float]:
    """Run a configuration with each seed, together where that pays; return the mean of each metric."""
    from raypfl.runs.together import run_similar

    experiments = [context.sweep.configured(config, seed) for seed in range(context.sweep.seeds)]
    runs = [_TrialRun(context, trial, seed, dict(config), experiment) for seed, experiment in enumerate(experiments)]
    run_similar(experiments, [partial(run.execute, None) for run in runs])
    return {name: sum(run.values[name] for run in runs) / len(runs) for name in context.metrics}


def _refuse_without_folder(folder: Path) -> None:
    """Raise a ConfigError on a node without the sweep's folder: one that joined after the sweep had begun."""
    from raypfl.runs.records import SWEEP

    if not (folder / SWEEP).exists():
        raise ConfigError(
            f"The node {platform.node()} has no {folder / SWEEP}: a sweep's folder has to be the same on all nodes. "
            "Set output to a folder that all nodes share, and keep nodes without it out of the cluster."
        )


def close(folder: Path, hear: Listener, is_heard: bool) -> None:
    """Write the results of a stopped trial, as of its last checkpoint, and pass its end on to `hear`.

    At a sweep's end Tune gives processes five seconds, which is too little on a busy machine. Some write their results
    in time, and some only pass on the event of their end, or neither.

    Parameters
    ----------
    is_heard : whether its process has passed on that event.
    """
    from raypfl.engine.events import RunStarted
    from raypfl.engine.job import checkpoints_of
    from raypfl.runs import driver
    from raypfl.runs.records import SUMMARY, description
    from raypfl.runs.replay import events_of
    from raypfl.runs.result import RunResult
    from raypfl.storage import lease

    def stop_at_once(event: Event) -> None:
        hear(event)
        if isinstance(event, RunStarted):
            raise Stopped("The trial was stopped.")

    lease.wait_until_free(checkpoints_of(description(folder), str(folder)), STOP_SECONDS)
    if not (folder / SUMMARY).exists():
        driver.resume(folder, listeners=[stop_at_once], lockstep=True)
    elif not is_heard:
        *_, finished = events_of(RunResult.load(folder))
        hear(finished)


@dataclass
class _TrialRun:
    """One run of a trial.

    Attributes
    ----------
    drawn : the configuration that `experiment` has.
    values : the optimised metrics in the last evaluation, by name.
    evaluated, reported : the round that was evaluated and the one that was reported last; -1: none.
    schedule : the content of `SCHEDULE`.
    """

    context: SweepContext
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
        """Whether each evaluation is reported; with several seeds, only the mean at their ends is."""
        return self.context.sweep.seeds == 1

    @property
    def folder(self) -> Path:
        return run_folder(self.context.sweep, self.context.folder, self.trial, self.seed)

    def execute(self, checkpoint: Any, place: Place | None = None) -> RunResult:
        """Run to the end, from a reported checkpoint or, with None, from the newest one in the run's folder."""
        from raypfl.engine.job import checkpoints_of
        from raypfl.runs import driver
        from raypfl.runs.records import DESCRIPTION, divergence, is_finished, write_description
        from raypfl.runs.result import RunResult
        from raypfl.storage import lease

        # A process of a sweep that was killed may still be at work in the folder, and may finish the run.
        lease.wait_until_free(checkpoints_of(self.experiment, str(self.folder)), STOP_SECONDS)
        is_copy = checkpoint is not None and self._continue_from(checkpoint)
        experiment = self._experiment_to_run()
        if self.context.sweep.scheduler.copies and not is_copy:
            self._continue_schedule()
        _keep_actors(experiment)
        arguments: dict[str, Any] = {"listeners": [self._hear], "lockstep": True, "place": place}

        # A finished run is here if Tune was killed before it took note.
        if not is_copy and is_finished(self.folder):
            result = RunResult.load(self.folder)
            self.experiment = result.experiment
        elif not is_copy and (error := divergence(self.folder)):
            raise error  # Tune tries again after an error, but the run would diverge again
        elif (self.folder / DESCRIPTION).exists():
            write_description(self.folder, experiment)
            result = driver.resume(self.folder, **arguments)
        else:
            result = driver.run(experiment, run_dir=self.folder, **arguments)

        if self.is_stopped:
            raise SystemExit
        if result.status == "stopped":
            raise Stopped("The trial was asked to stop.")

        self.values = metric_values(self.context.sweep, self.experiment, result.summary())
        if self.reports and self.reported < result.round:
            self._report(result.round, done=True)
        return result

    def _experiment_to_run(self) -> Experiment:
        changes = []
        if not self.experiment.ray.actors:  # all of the trial is in this process
            changes.append("engine.backend=inline")
        if self.context.sweep.scheduler.copies:  # other trials may continue from any checkpoint
            changes.append("checkpoint.keep=1000000")
        return self.experiment.override(changes)

    def _continue_from(self, checkpoint: Any) -> bool:
        """Start from a reported checkpoint; return whether it is another trial's."""
        from raypfl.runs.resuming import branch

        with checkpoint.as_directory() as folder:
            source = json.loads(Path(folder, CHECKPOINT_SOURCE).read_text())
        source_folder = Path(source["folder"])
        is_copy = source_folder != self.folder
        if is_copy:
            branch(source_folder, source["round"], self.folder, self.experiment)
            self._train_from(source["round"], source["schedule"])
        self.reported = source["round"]
        return is_copy

    def _continue_schedule(self) -> None:
        """Load the run's schedule, and extend it if its last rounds had another configuration."""
        from raypfl.storage import checkpoints

        before = schedule_of(self.folder)
        if before and before[-1]["drawn"] == self.drawn:
            self.schedule = before
        else:
            self._train_from(checkpoints.last_round(str(self.folder / "checkpoints")), before)

    def _train_from(self, round: int, before: list[dict[str, Any]]) -> None:
        """Record that this configuration holds for the rounds after `round`."""
        self.schedule = extend_schedule(self.folder, round, self.drawn, before)

    def _hear(self, event: Event) -> None:
        from raypfl.engine.events import Checkpointed, Evaluated, Progress, RunStarted

        if not isinstance(event, Progress):
            self._forward(event)
        if isinstance(event, RunStarted):
            self.experiment = event.experiment
        elif isinstance(event, Evaluated):
            self.evaluated = event.round
            self.values = metric_values(self.context.sweep, self.experiment, event.summary)
        elif isinstance(event, Checkpointed) and self._must_report(event.round):
            self._report(event.round, done=False)

    def _must_report(self, round: int) -> bool:
        """Whether a checkpoint's round was evaluated but not reported; the last one is reported at the run's end."""
        return self.reports and self.reported < round == self.evaluated < self.experiment.rounds

    def _forward(self, event: Event) -> None:
        import ray

        self.context.events.put((self.trial, self.seed, ray.cloudpickle.dumps(event)))

    def _report(self, round: int, done: bool) -> None:
        """Report an evaluated round; after the last one, `done` keeps a scheduler from changing the trial."""
        from ray import tune

        with tempfile.TemporaryDirectory() as folder:
            source = {"folder": str(self.folder), "round": round, "schedule": self.schedule}
            Path(folder, CHECKPOINT_SOURCE).write_text(json.dumps(source))
            checkpoint = tune.Checkpoint.from_directory(folder)
            self.reported = round
            try:
                tune.report({**self.values, "round": round, "done": done}, checkpoint=checkpoint)
            except SystemExit:  # Tune ends a trial's thread in this way; its run ends as one that was interrupted
                self.is_stopped = True
                raise Stopped("Tune stopped the trial.") from None


_sessions: list[contextlib.ExitStack] = []
"""The session of this process, once there is one."""


def _keep_actors(experiment: Experiment) -> None:
    """Keep this process's server and client actors for its next trials; Ray ends them with it."""
    from raypfl.runs import driver

    if experiment.engine.backend == "ray" and not _sessions:
        session = contextlib.ExitStack()
        _sessions.append(session)
        session.enter_context(driver.session(experiment))


def metric_values(sweep: Sweep, experiment: Experiment, summary: list[dict[str, Any]]) -> dict[str, float]:
    """Return the sweep's metrics by name; NaN for one that is undefined for all clients.

    Parameters
    ----------
    experiment : that of the run.
    summary : the summary of one of its evaluations.

    Raises
    ------
    ConfigError : if the run has no models that a metric is of.
    """
    values = {}
    measures = experiment.measures
    for name, target in zip(metric_names(sweep, measures), sweep.metric, strict=True):
        rows = {row["model"]: row for row in summary if row["protocol"] == target.protocol}
        model = target.model or ("personal" if "personal" in rows else "global")
        if model not in rows:
            raise ConfigError(
                f"The metric {name!r} is of {model} models, but the method {type(experiment.method).__name__} "
                f"has none that is evaluated on {target.protocol!r}."
            )
        values[name] = float(rows[model].get(target.value or measures.primary.name, math.nan))
    return values


def metric_names(sweep: Sweep, measures: Measures) -> list[str]:
    """Return the names of the metrics, as in MLflow: ``accuracy/val`` or, with a model, ``std/val/personal``."""
    names = []
    for target in sweep.metric:
        parts = [target.value or measures.primary.name, target.protocol, target.model]
        names.append("/".join(filter(None, parts)))
    return names
