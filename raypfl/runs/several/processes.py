"""Runs in this process, or as Ray tasks: as many processes at a time as the cluster has room for."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.common.errors import RaypflError
from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.cluster import (
    bundle,
    client_actors,
    client_resources,
    connected,
    in_one_process,
    on_this_node,
)
from raypfl.engine.backends.session import spare_server
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Event, Progress
from raypfl.experiment.settings import RaySettings
from raypfl.runs import driver
from raypfl.runs.resuming import is_complete_as
from raypfl.runs.several.worker import FAILED, FINISHED, STOPPED, PlannedRun, RunOutcome, carry_out, carry_out_task
from raypfl.runs.together import MOST_RUNS, paying_parts

POLL = 0.3
"""Seconds between polls of the running tasks' events."""

RunListener = Callable[[int, Event], None]
"""Called with a run's number and each event of it."""


def room_for_runs(ray: Any, settings: RaySettings, runs: int) -> int:
    """Return how many of `runs` runs the cluster has room for at a time, each in one process.

    Raises
    ------
    ConfigError : if it will never have room for one.
    """
    (count,) = client_actors(ray, in_one_process(settings), runs)
    return count


def shares(parts: Sequence[Sequence[int]], processes: int) -> list[list[int]]:
    """Cut parts, whose runs can advance together, into shares for so many processes at a time.

    All parts are cut into equally many shares: the fewest with which every process gets equally many of them. The
    shares of a part differ by one run at most.
    """
    by_processes = processes // math.gcd(len(parts), processes)
    cut = []
    for part in parts:
        count = min(len(part), max(by_processes, math.ceil(len(part) / MOST_RUNS)))
        for number in range(count):
            start = len(part) * number // count
            end = len(part) * (number + 1) // count
            cut.append(list(part[start:end]))
    return cut


def refuse_unless_folders_are_shared(ray: Any, runs: Iterable[PlannedRun], what: str) -> None:
    """Raise a ConfigError unless every node that may carry out runs has their folders; `what` names their work."""
    reserved: dict[Path, list[dict[str, float]]] = {}
    for run in runs:
        needed = bundle(client_resources(in_one_process(run.ray_settings)))
        reserved.setdefault(run.folder.parent, []).append(needed)
    for folder, bundles in reserved.items():
        refuse_unless_shared(ray, folder, bundles, what)


def run_in_this_process(runs: Mapping[int, PlannedRun], listen: RunListener) -> dict[int, RunOutcome]:
    """Carry out runs one after another, or together where that pays.

    Returns
    -------
    number -> outcome of its run; without those that had not begun when one ended all (`RunOutcome.ends_others`).
    """
    outcomes: dict[int, RunOutcome] = {}
    for part in paying_parts({number: run.experiment for number, run in runs.items()}):
        for start in range(0, len(part), MOST_RUNS):
            numbers = part[start : start + MOST_RUNS]
            ended = carry_out([runs[number] for number in numbers], [[partial(listen, number)] for number in numbers])
            outcomes |= zip(numbers, ended, strict=True)
            if any(outcome.ends_others for outcome in ended):
                return outcomes
    return outcomes


def run_on_cluster(
    runs: Mapping[int, PlannedRun], listen: RunListener, prepare: Callable[[Any], None]
) -> dict[int, RunOutcome]:
    """Carry out runs as Ray tasks, together where that pays.

    `prepare` : called with Ray before anything starts; it may refuse the runs.
    """
    first = next(iter(runs))
    stop = StopRequest()
    with (
        stop.acknowledged(lambda: listen(first, Progress(driver.STOPPING))),
        stop.listening(),
        connected(runs[first].ray_settings, partial(listen, first)) as ray,
    ):
        spare_server.release(ray)
        # Refuses a run for which the cluster will never have room.
        rooms = [room_for_runs(ray, run.ray_settings, len(runs)) for run in runs.values()]
        prepare(ray)
        together = paying_parts({number: run.experiment for number, run in runs.items()})
        return run_as_tasks(ray, runs, shares(together, min(rooms)), listen, stop)


def run_as_tasks(
    ray: Any,
    runs: Mapping[int, PlannedRun],
    shares: Sequence[Sequence[int]],
    listen: RunListener,
    stop: StopRequest,
) -> dict[int, RunOutcome]:
    """Carry out runs, each share in one process; stop them on request.

    Each task reserves as much as a client actor, or as the server if that is more.

    Parameters
    ----------
    runs : the runs, by number.
    shares : the numbers of the runs that advance together in each process.

    Returns
    -------
    number -> outcome of its run.
    """
    from ray.util.queue import Queue

    queue = Queue(actor_options=on_this_node(ray))
    try:
        # If a task's process dies, Ray runs the task again, from the runs' last checkpoints.
        task = ray.remote(max_retries=3)(carry_out_task)
        references: dict[Any, Sequence[int]] = {}
        for share in shares:
            reserved = client_resources(in_one_process(runs[share[0]].ray_settings))
            its_runs = [runs[number] for number in share]
            # The task starts as soon as the cluster has room for it.
            references[task.options(**reserved).remote(share, its_runs, os.getcwd(), queue)] = share
        return _outcomes(ray, runs, references, queue, listen, stop)
    finally:
        queue.shutdown(force=True)


def _outcomes(
    ray: Any,
    runs: Mapping[int, PlannedRun],
    references: dict[Any, Sequence[int]],
    queue: Any,
    listen: RunListener,
    stop: StopRequest,
) -> dict[int, RunOutcome]:
    """Wait for all tasks to end, stop them on request, and return the outcomes of their runs."""
    outcomes: dict[int, RunOutcome] = {}
    cancelled = False
    while references:
        ended, _ = ray.wait(list(references), timeout=POLL)

        if stop.received and not cancelled:
            # Waiting tasks first, so that none of them starts when a running one ends.
            for reference in reversed(references):
                # A running task receives it as a Ctrl-C, and saves checkpoints.
                ray.cancel(reference)
            cancelled = True

        for message in queue.get_nowait_batch(queue.size()):
            for number, event in ray.cloudpickle.loads(message):
                listen(number, event)

        for reference in ended:
            share = references.pop(reference)
            ended_runs = _outcomes_of_task(ray, reference, [runs[number] for number in share], stop)
            outcomes |= zip(share, ended_runs, strict=True)
    return outcomes


def _outcomes_of_task(ray: Any, reference: Any, runs: Sequence[PlannedRun], stop: StopRequest) -> list[RunOutcome]:
    try:
        outcomes: list[RunOutcome] = ray.get(reference)
    except ray.exceptions.RayError as error:
        if stop.received:
            return [RunOutcome(STOPPED) for _ in runs]
        text = str(error)
        if not isinstance(error, ray.exceptions.RayTaskError):
            text = f"Its process died every time that Ray started it: {text.strip().splitlines()[0]}"
        outcomes = [RunOutcome(FAILED, RaypflError(text)) for _ in runs]
    return [_checked(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]


def _checked(run: PlannedRun, outcome: RunOutcome) -> RunOutcome:
    """Return a run's outcome as its folder shows it to the driver."""
    is_complete = is_complete_as(run.folder, run.experiment)
    if is_complete and outcome.status == FAILED:
        # The run had finished before its process died.
        return RunOutcome(FINISHED)
    if not is_complete and outcome.status == FINISHED:
        text = f"It finished on a node with another {run.folder}; set output to a folder that all nodes share."
        return RunOutcome(FAILED, RaypflError(text))
    return outcome
