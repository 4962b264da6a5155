"""Run what is left of a sweep: on Ray Tune, with the resources that its trials need, or without it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.common.counting import series
from raypfl.common.errors import ConfigError, listed
from raypfl.common.stopping import handlers_restored
from raypfl.engine.backends.cluster import (
    bundle,
    client_actors,
    client_resources,
    connected,
    in_one_process,
    on_this_node,
    server_resources,
)
from raypfl.engine.backends.session import spare_server
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Event, RunFinished
from raypfl.engine.prepared import Prepared
from raypfl.evaluation import Measures
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.experiment.settings import RaySettings
from raypfl.experiment.yaml_text import read
from raypfl.integrations.tuning.checks.fit import refuse_unfit
from raypfl.integrations.tuning.sweep import Sweep, Target, load
from raypfl.integrations.tuning.together import trials as without_tune
from raypfl.integrations.tuning.together.asha import REPORTS, Asha
from raypfl.integrations.tuning.together.pbt import run_population
from raypfl.integrations.tuning.trial import (
    SweepContext,
    Trial,
    TrialListener,
    close,
    final_status,
    has_diverged,
    metric_names,
    run_folder,
    run_trial,
    trial_name,
)
from raypfl.runs.records import SWEEP

TUNE = "tune"
"""The folder in a sweep's folder that is Ray Tune's. It holds pickles, so only a folder that is trusted is resumed."""

CHANGEABLE = {"trials", "concurrent", "stop", "tensorboard"}
"""Settings of a sweep that may change when it continues."""

POLL = 0.2
"""Seconds between looks at the events of running trials."""

RESTARTS = 3
"""How often Tune is started again for trials that it gave up because their processes died.

Tune gives up a trial when two calls fail with the same process, so a node's death can end a trial at once.
"""


def check(sweep: Sweep) -> tuple[Experiment, list[str]]:
    """Check that a sweep fits together; return the experiment of a first configuration, and each metric's direction.

    Raises
    ------
    ConfigError : if a space has a value that its setting refuses, or the data lack what the sweep needs.
    """
    from raypfl.runs import driver

    refuse_unfit(sweep)
    first = sweep.first()
    driver.check([first])

    first = first.replace(objective=Prepared(first, first.load_data()).objective)
    return first, [_direction(target, first.measures) for target in sweep.metric]


def _direction(target: Target, measures: Measures) -> str:
    """Return ``max`` or ``min``."""
    value = target.value or measures.primary.name
    if value not in measures.aggregates:
        available = ", ".join(measures.aggregates)
        raise ConfigError(f"metric.value is {value!r}, which this experiment does not have; it has {available}.")
    if target.mode != "auto":
        return target.mode
    return "min" if measures.lower_is_better(value) else "max"


def search(
    sweep: Sweep,
    first: Experiment,
    modes: list[str],
    folder: Path,
    hear: TrialListener,
    show: Callable[[list[Trial]], None],
) -> list[Trial]:
    """Run what is left of a sweep, until every trial has finished, was stopped or has failed.

    Parameters
    ----------
    first, modes : the experiment and the directions that :func:`check` returns.
    folder : the sweep's folder. A sweep that is already in it continues.
    hear : a function that is called with a trial's name, a seed's number and every event of that run.
    show : a function that is called with all trials so far, whenever one has changed.
    """
    _refuse_other_sweep(sweep, folder)
    # What Ray Tune has begun, it continues.
    if without_tune.suits(sweep, first) and not (folder / TUNE).exists():
        from raypfl.integrations.tuning.ray_tune import asha, configurations

        with _quiet_tune():
            draws = configurations(sweep)
        if sweep.scheduler.name == "none":
            return without_tune.run_trials(sweep, draws, folder, hear, show)
        if without_tune.advance_together(sweep, draws):
            metric = metric_names(sweep, first.measures)[0]
            if sweep.scheduler.name == "pbt":
                from raypfl.integrations.tuning.together.pbt_decisions import PbtDecisions

                decide = PbtDecisions(sweep, first, metric, modes[0])
                with _quiet_tune():
                    return run_population(sweep, draws, folder, hear, show, decide)
            decisions = Asha(folder / REPORTS, asha(sweep, first, metric, modes[0]), metric, draws)
            return without_tune.run_trials(sweep, draws, folder, hear, show, decisions)

    heard_ends: set[str] = set()

    def hear_and_note_ends(trial: str, seed: int, event: Event) -> None:
        hear(trial, seed, event)
        if isinstance(event, RunFinished):
            heard_ends.add(trial)

    # Tune leaves its own handler for SIGINT behind.
    with connected(first.ray) as ray, _events(ray, hear_and_note_ends) as events, handlers_restored():
        from ray import tune

        from raypfl.integrations.tuning.ray_tune import run_arguments
        from raypfl.integrations.tuning.trial_log import TrialLog, has_died

        spare_server.release(ray)
        refuse_unless_shared(ray, folder, bundles(first.ray), "This sweep")
        at_once = _at_once(ray, first.ray, sweep.trials)

        names = metric_names(sweep, first.measures)
        context = SweepContext(sweep, names, folder, os.getcwd(), events)
        log = TrialLog(sweep, folder, names, show)
        trainable = tune.with_resources(
            tune.with_parameters(run_trial, context=context), tune.PlacementGroupFactory(bundles(first.ray))
        )
        tune_folder = folder / TUNE

        with _quiet_tune():
            for _ in range(1 + RESTARTS):
                arguments = run_arguments(sweep, first, names, modes, at_once, tune_folder, log)
                sweep.write(folder)

                tune_trials = tune.run(trainable, **arguments).trials
                saved_trials = tune.ExperimentAnalysis(str(tune_folder)).trials
                trials = _trials(tune_trials, saved_trials, sweep, folder, names)

                has_deaths = any(map(has_died, tune_trials))
                if not has_deaths or not all(trial.has_ended for trial in trials):
                    break

    for trial in trials:
        if trial.status == "stopped" and trial.round:
            is_heard = trial.name in heard_ends
            close(run_folder(sweep, folder, trial.name, 0), partial(hear, trial.name, 0), is_heard)
    return trials


def bundles(settings: RaySettings) -> list[dict[str, float]]:
    """Return what a trial reserves: one process for all of it or, with ``ray.actors``, a bundle for each actor."""
    if settings.actors is None:
        return [bundle(client_resources(in_one_process(settings)))]

    trial_process = {"CPU": 0.0}  # its actors do the work
    server = bundle(server_resources(settings))
    clients = [bundle(client_resources(settings))] * settings.actors
    return [trial_process, *([server] if server else []), *clients]


def _refuse_other_sweep(sweep: Sweep, folder: Path) -> None:
    """Raise a ConfigError if the folder has a sweep that this one does not continue."""
    file = folder / SWEEP
    if not file.exists():
        return

    before = load(read(file))
    settings_before = flatten(before.model_dump(exclude=CHANGEABLE))
    settings_now = flatten(sweep.model_dump(exclude=CHANGEABLE))
    different = [
        key for key in {**settings_before, **settings_now} if settings_before.get(key) != settings_now.get(key)
    ]
    if different:
        raise ConfigError(
            f"{folder} holds another sweep called {sweep.name!r}: its {SWEEP} has other values of "
            f"{listed(different, 5)}. Choose another name, or delete that folder. Only these may change: "
            f"{series(sorted(CHANGEABLE))}."
        )

    if sweep.trials < before.trials:
        raise ConfigError(
            f"trials is {sweep.trials}, but the sweep in {folder} has {before.trials} already; it can only have more."
        )
    if sweep.trials > before.trials and sweep.scheduler.copies:
        raise ConfigError(
            f"trials is {sweep.trials}, but the population of {sweep.scheduler.name} in {folder} has {before.trials} "
            "members, which evolve together. Start a sweep with another name."
        )


def _at_once(ray: Any, settings: RaySettings, trials: int) -> int:
    """Return the number of trials that the cluster has room for, at least one.

    Raises
    ------
    ConfigError : if the cluster will never have room for one. Tune would wait for it.
    """
    client_actors(ray, settings if settings.actors else in_one_process(settings), trials)

    available = ray.cluster_resources()
    room = math.inf
    for resource in ("CPU", "GPU"):
        reserved = sum(bundle.get(resource, 0.0) for bundle in bundles(settings))
        if reserved:
            room = min(room, available.get(resource, 0.0) / reserved)
    return max(1, min(trials, int(room + 1e-9)))  # a quotient may come out just below a whole number


@contextlib.contextmanager
def _events(ray: Any, hear: TrialListener) -> Iterator[Any]:
    """Yield a queue for the events of all trials; while active, a thread passes them on to `hear`."""
    from ray.util.queue import Queue

    events = Queue(actor_options=on_this_node(ray))
    is_over = threading.Event()

    def pass_on() -> None:
        while not is_over.wait(POLL) or events.size():
            for trial, seed, event in events.get_nowait_batch(events.size()):
                hear(trial, seed, ray.cloudpickle.loads(event))

    thread = threading.Thread(target=pass_on, name="raypfl-sweep", daemon=True)
    thread.start()
    try:
        yield events
    finally:
        is_over.set()
        thread.join(timeout=60)
        events.shutdown(force=True)


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """While active, Tune writes no logs of its own and does not change the working directory."""
    variables = {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_WARN_THRESHOLD_S": "3600",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)

    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a trial whose node dies is started again, and needs no traceback
    try:
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def _trials(
    tune_trials: list[Any], saved_trials: list[Any], sweep: Sweep, folder: Path, names: list[str]
) -> list[Trial]:
    """Return all trials in order; one that has not come to its end was interrupted.

    Parameters
    ----------
    tune_trials : Tune's trials, after it has shut down. It says of interrupted ones, too, that they are terminated.
    saved_trials : Tune's trials in the state that it saved before, which tells these apart. That state can lack the
        failure of a trial whose process had died already.
    folder : the sweep's folder.
    names : the names of the metrics.
    """
    from raypfl.integrations.tuning.trial_log import last_error

    saved_statuses = {trial.trial_id: trial.status for trial in saved_trials}
    trials = []
    for tune_trial in tune_trials:
        report = tune_trial.last_result or {}
        values = {name: report[name] for name in names if name in report}
        trial = Trial(
            trial_name(tune_trial.trial_id),
            dict(tune_trial.config),
            round=int(report.get("round", 0)),
            values=values,
        )
        if tune_trial.status == "ERROR":
            trial.fail(last_error(tune_trial), has_diverged(sweep, folder, trial.name))
        elif saved_statuses[tune_trial.trial_id] == "TERMINATED":
            trial.status = final_status(sweep, trial)
        trials.append(trial)
    return sorted(trials, key=lambda trial: trial.name)
