"""Running a study's cells: as many at a time as the cluster has room for, each in its own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from raypfl.experiment import Experiment
from raypfl.runs import driver
from raypfl.runs.result import is_finished
from raypfl.studies.cells import StudyCell
from raypfl.studies.worker import FAILED, FINISHED, STOPPED, CellOutcome, run_cell, run_cell_task

POLL = 0.3
"""Seconds between polls of the running cells' events."""

CellListener = Callable[[int, Event], None]


def run(cells: Sequence[StudyCell], listen: CellListener) -> list[CellOutcome]:
    """Run all cells; finished ones are skipped, and interrupted ones continue from their checkpoints.

    Cells are Ray tasks. Each reserves as much as a client actor, or as the server if that is more; Ray runs as many at
    a time as the cluster has room for. With ``ray.actors``, ``ray.pools`` or ``engine.backend=inline``, cells run one
    after another in this process, with these actors or without Ray.

    Parameters
    ----------
    listen : called with a cell's number and each event of its run.

    Returns
    -------
    The outcome of each cell. After Ctrl-C or SIGTERM, cells that are not finished are ``stopped``.
    """
    outcomes = {i: CellOutcome(FINISHED) for i, cell in enumerate(cells) if is_finished(cell.folder)}
    unfinished = [i for i in range(len(cells)) if i not in outcomes]

    if unfinished and any(_needs_this_process(cell.experiment) for cell in cells):
        outcomes |= _run_one_by_one(cells, unfinished, listen)
    elif unfinished:
        outcomes |= _run_as_tasks(cells, unfinished, listen)
    return [outcomes.get(i, CellOutcome(STOPPED)) for i in range(len(cells))]


def _needs_this_process(experiment: Experiment) -> bool:
    return experiment.engine.backend == "inline" or experiment.ray.actors is not None or bool(experiment.ray.pools)


def _run_one_by_one(
    cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener
) -> dict[int, CellOutcome]:
    outcomes: dict[int, CellOutcome] = {}
    with driver.session(cells[unfinished[0]].experiment):
        for i in unfinished:
            outcomes[i] = run_cell(cells[i].experiment, cells[i].folder, [partial(listen, i)])
            if outcomes[i].status == STOPPED:
                break
    return outcomes


def _run_as_tasks(
    cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener
) -> dict[int, CellOutcome]:
    first = unfinished[0]
    with StopRequest().listening() as stop, connected(cells[first].experiment.ray, partial(listen, first)) as ray:
        from ray.util.queue import Queue

        spare_server.release(ray)
        for i in unfinished:
            # Refuses a cell for which the cluster will never have room.
            client_actors(ray, in_one_process(cells[i].experiment.ray), len(unfinished))
        _refuse_unless_shared(ray, [cells[i] for i in unfinished])

        events = Queue(actor_options=on_this_node(ray))
        try:
            # If a task's process dies, Ray runs the task again, from the cell's last checkpoint.
            task = ray.remote(max_retries=3)(run_cell_task)
            references = {_start(task, cells[i], i, events): i for i in unfinished}
            return _outcomes(ray, cells, references, events, listen, stop)
        finally:
            events.shutdown(force=True)


def _refuse_unless_shared(ray: Any, cells: Sequence[StudyCell]) -> None:
    """Raise a ConfigError unless every node that may run cells has their folders."""
    reserved: dict[Path, list[dict[str, float]]] = {}
    for cell in cells:
        needed = bundle(client_resources(in_one_process(cell.experiment.ray)))
        reserved.setdefault(cell.folder.parent, []).append(needed)
    for folder, bundles in reserved.items():
        refuse_unless_shared(ray, folder, bundles, "This study")


def _start(task: Any, cell: StudyCell, number: int, events: Any) -> Any:
    """Start a cell as soon as the cluster has room for it, and return the reference to its outcome."""
    reserved = client_resources(in_one_process(cell.experiment.ray))
    inline = cell.experiment.override(["engine.backend=inline"])
    return task.options(**reserved).remote(number, inline, cell.folder, os.getcwd(), events)


def _outcomes(
    ray: Any,
    cells: Sequence[StudyCell],
    references: dict[Any, int],
    events: Any,
    listen: CellListener,
    stop: StopRequest,
) -> dict[int, CellOutcome]:
    """Wait for all cells to end, stop them on request, and return their outcomes."""
    outcomes: dict[int, CellOutcome] = {}
    cancelled = False
    while references:
        ended, _ = ray.wait(list(references), timeout=POLL)

        if stop.received and not cancelled:
            listen(next(iter(references.values())), Progress("stopping: saving the running cells"))
            # Waiting cells first, so that none of them starts in the room that a stopped one leaves.
            for reference in reversed(references):
                # A running cell receives it as a Ctrl-C, and saves a checkpoint.
                ray.cancel(reference)
            cancelled = True

        for cell, event in events.get_nowait_batch(events.size()):
            listen(cell, ray.cloudpickle.loads(event))

        for reference in ended:
            number = references.pop(reference)
            outcomes[number] = _outcome(ray, reference, cells[number].folder, stop)
    return outcomes


def _outcome(ray: Any, reference: Any, folder: Path, stop: StopRequest) -> CellOutcome:
    try:
        outcome: CellOutcome = ray.get(reference)
    except ray.exceptions.RayError as error:
        if stop.received:
            return CellOutcome(STOPPED)
        if isinstance(error, ray.exceptions.RayTaskError):
            return CellOutcome(FAILED, str(error))
        reason = str(error).strip().splitlines()[0]
        return CellOutcome(FAILED, f"Its process died every time that Ray started it: {reason}")
    if outcome.status == FINISHED and not is_finished(folder):
        return CellOutcome(
            FAILED, f"It finished on a node with another {folder}; set output to a folder that all nodes share."
        )
    return outcome
