"""A sweep on Ray Tune: its searcher, scheduler, resources, and trials."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.common.files import write
from raypfl.common.stopping import handlers_kept
from raypfl.data import load_federated
from raypfl.engine.backends.cluster import (
    bundle,
    client_actors,
    connected,
    for_client,
    for_server,
    in_one_process,
    on_this_node,
)
from raypfl.engine.backends.of_this_process import spare
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Event
from raypfl.engine.prepared import Prepared
from raypfl.evaluation import Measures
from raypfl.experiment import Experiment
from raypfl.experiment.settings import RaySettings
from raypfl.experiment.yaml_text import read
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.integrations.tuning.sweep import SWEEP, Sweep, Target
from raypfl.integrations.tuning.trial import Order, Trial, close, end_of, metric_names, name_of, run_folder, run_trial

TUNE = "tune"
"""The folder in a sweep's folder that is Ray Tune's. It holds pickles, so only a folder that is trusted is resumed."""

CHANGEABLE = {"trials", "concurrent", "stop", "tensorboard"}
"""Settings of a sweep that may be others when it continues."""

POLL = 0.2
"""Seconds between looks at the events of running trials."""

RESTARTS = 3
"""How often Tune starts again for trials that it gave up when their processes died.

It does so at the second of two calls that fail with one process, so that a node's death can end a trial at once.
"""


Hear = Callable[[str, int, Event], None]
Show = Callable[[list[Trial]], None]


def check(sweep: Sweep) -> tuple[Experiment, list[str]]:
    """The experiment of a first configuration, and the direction of each metric, if all of it fits together.

    Raises
    ------
    ConfigError : if a space has a value that its setting refuses, or the data lack what the sweep needs.
    """
    from raypfl.runs import driver as runs

    first = sweep.first()
    runs.check([first])
    data = load_federated(first.data, first.partition, seed=first.seed)
    first = first.replace(objective=Prepared(first, data).objective)
    return first, [_direction(target, first.measures) for target in sweep.metric]


def _direction(target: Target, measures: Measures) -> str:
    """``max`` or ``min``."""
    value = target.value or measures.primary.name
    if value not in measures.aggregates:
        known = ", ".join(measures.aggregates)
        raise ConfigError(f"metric.value is {value!r}, which this experiment does not have; it has {known}.")
    if target.mode != "auto":
        return target.mode
    return "min" if measures.lower_is_better(value) else "max"


def search(sweep: Sweep, first: Experiment, modes: list[str], folder: Path, hear: Hear, show: Show) -> list[Trial]:
    """Run what is left of a sweep: all trials to their ends, except for those that are stopped or fail.

    Parameters
    ----------
    first, modes : as :func:`check` gives them.
    folder : of the sweep. A sweep that is already in it continues.
    hear : is called with a trial's name, a seed's number and every event of that run.
    show : is called with all trials that there are, whenever one has changed.
    """
    _refuse_another(sweep, folder)
    with connected(first.ray) as ray, _events(ray, hear) as events, handlers_kept():  # Tune leaves its own for SIGINT
        from ray import tune

        from raypfl.integrations.tuning.log import TrialLog, has_died
        from raypfl.integrations.tuning.tune_parts import tuner

        spare.release(ray)
        refuse_unless_shared(ray, folder, bundles(first.ray), "This sweep")
        at_once = _at_once(ray, first.ray, sweep.trials)
        names = metric_names(sweep, first.measures)
        order = Order(sweep, names, folder, os.getcwd(), events)
        log = TrialLog(sweep, names, show)
        trainable = tune.with_resources(
            tune.with_parameters(run_trial, order=order), tune.PlacementGroupFactory(bundles(first.ray))
        )
        path = folder / TUNE

        with _quiet_tune():
            for _ in range(1 + RESTARTS):
                run = tuner(trainable, sweep, first, names, modes, at_once, path, log)
                _keep_description(sweep, folder)
                ends = run.fit()._experiment_analysis.trials
                trials = _trials(ends, tune.ExperimentAnalysis(str(path)).trials, sweep, names)
                if not any(map(has_died, ends)) or not all(trial.has_ended for trial in trials):
                    break
    for trial in trials:
        if trial.status == "stopped" and trial.round:
            close(run_folder(sweep, folder, trial.name, 0), partial(hear, trial.name, 0))
    return trials


def bundles(settings: RaySettings) -> list[dict[str, float]]:
    """What a trial reserves: one process for all of it or, with ``ray.actors``, a bundle for each of its actors."""
    if settings.actors is None:
        return [bundle(for_client(in_one_process(settings)))]
    server = bundle(for_server(settings))
    return [{"CPU": 0.0}, *([server] if server else []), *[bundle(for_client(settings))] * settings.actors]


def _refuse_another(sweep: Sweep, folder: Path) -> None:
    """Raise a ConfigError if the folder has a sweep that this one does not continue."""
    file = folder / SWEEP
    if not file.exists():
        return
    before = Sweep(**read(file))
    is_other = before.model_dump(exclude=CHANGEABLE) != sweep.model_dump(exclude=CHANGEABLE)
    if is_other:
        raise ConfigError(
            f"{folder} holds another sweep of the name {sweep.name!r}: its {SWEEP} differs from the one given now. "
            f"Choose another name, or delete that folder. What may change is {', '.join(sorted(CHANGEABLE))}."
        )
    if sweep.trials < before.trials:
        raise ConfigError(
            f"trials is {sweep.trials}, but the sweep in {folder} has {before.trials} already; it can only have more."
        )
    if sweep.trials > before.trials and sweep.scheduler.copies:
        raise ConfigError(
            f"trials is {sweep.trials}, but the population of {sweep.scheduler.name} in {folder} has {before.trials} "
            "members, which evolve together. Start a sweep of another name."
        )


def _keep_description(sweep: Sweep, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / SWEEP, as_yaml(sweep.model_dump(mode="json")))


def _at_once(ray: Any, settings: RaySettings, trials: int) -> int:
    """Trials that the cluster has room for, at least one.

    Raises
    ------
    ConfigError : if it will never have room for one: Tune would wait for it.
    """
    client_actors(ray, settings if settings.actors else in_one_process(settings), trials)
    reserved, total = bundles(settings), ray.cluster_resources()
    whole = {name: sum(bundle.get(name, 0.0) for bundle in reserved) for name in ("CPU", "GPU")}
    room = min(total.get(name, 0.0) / count for name, count in whole.items() if count)
    return max(1, min(trials, int(room + 1e-9)))


@contextlib.contextmanager
def _events(ray: Any, hear: Hear) -> Iterator[Any]:
    """A queue from which the events of all trials are passed on, in a thread of its own."""
    from ray.util.queue import Queue

    events, over = Queue(actor_options=on_this_node(ray)), threading.Event()

    def pass_on() -> None:
        while not over.wait(POLL) or events.size():
            for trial, seed, event in events.get_nowait_batch(events.size()):
                hear(trial, seed, ray.cloudpickle.loads(event))

    thread = threading.Thread(target=pass_on, name="raypfl-sweep", daemon=True)
    thread.start()
    try:
        yield events
    finally:
        over.set()
        thread.join(timeout=60)
        events.shutdown(force=True)


@contextlib.contextmanager
def _quiet_tune() -> Iterator[None]:
    """Within: Tune writes no logs of its own, and does not change the working directory."""
    wanted = {
        "RAY_AIR_NEW_OUTPUT": "0",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_WARN_THRESHOLD_S": "3600",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)  # a trial whose node dies is started again, and needs no traceback
    try:
        yield
    finally:
        log.setLevel(level)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _trials(ends: list[Any], saved: list[Any], sweep: Sweep, names: list[str]) -> list[Trial]:
    """All trials, in order, with what Tune says of their `ends`; one without an end was interrupted.

    Tune says of interrupted trials, too, that they are terminated, except in the state that it `saved` before. That
    can lack the failure of a trial whose process had died already.
    """
    found, statuses = [], {trial.trial_id: trial.status for trial in saved}
    for end in ends:
        last = end.last_result or {}
        values = {metric: last[metric] for metric in names if metric in last}
        trial = Trial(name_of(end.trial_id), dict(end.config), round=int(last.get("round", 0)), values=values)
        if end.status == "ERROR":
            trial.status, trial.error = "failed", _sentence(end)
        elif statuses[end.trial_id] == "TERMINATED":
            trial.status = end_of(sweep, trial)
        found.append(trial)
    return sorted(found, key=lambda one: one.name)


def _sentence(end: Any) -> str:
    """Why a trial failed, without the traceback."""
    file = end.error_file
    lines = Path(file).read_text().strip().splitlines() if file and Path(file).exists() else []
    return lines[-1].rpartition("Error: ")[2] if lines else "its process died"
