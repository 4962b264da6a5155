"""Running a study's cells: as many at a time as the cluster has room for, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.cluster import bundle, client_actors, connected, for_client, in_one_process, on_this_node
from raypfl.engine.backends.of_this_process import spare
from raypfl.engine.backends.shared_folder import refuse_unless_shared
from raypfl.engine.events import Event, Progress
from raypfl.experiment import Experiment
from raypfl.runs import driver as runs
from raypfl.runs.result import is_finished
from raypfl.studies.cells import StudyCell
from raypfl.studies.worker import FAILED, FINISHED, STOPPED, CellOutcome, run_cell, run_cell_task

POLL = 0.3
"""Seconds between looks at the events of running cells."""

CellListener = Callable[[int, Event], None]


def run(cells: Sequence[StudyCell], listen: CellListener) -> list[CellOutcome]:
    """Run all cells to their ends, except for those that are stopped or fail.

    Finished cells are skipped, interrupted ones continue from their checkpoints. Cells are Ray tasks that reserve what
    a client actor would, or what the server would if that is more; Ray runs as many at a time as the cluster has room
    for. With ``ray.actors`` or ``engine.backend=inline`` they run one after another in this process, with so many
    actors each or without Ray.

    Parameters
    ----------
    listen : is called with a cell's number and every event of its run.

    Returns
    -------
    The outcome of each. After Ctrl-C or SIGTERM, cells that are not finished are ``stopped``.
    """
    outcomes = {i: CellOutcome(FINISHED) for i, cell in enumerate(cells) if is_finished(cell.folder)}
    left = [i for i in range(len(cells)) if i not in outcomes]
    if left:
        one_by_one = any(_needs_this_process(cell.experiment) for cell in cells)
        outcomes |= (_one_by_one if one_by_one else _as_tasks)(cells, left, listen)
    return [outcomes.get(i, CellOutcome(STOPPED)) for i in range(len(cells))]


def _needs_this_process(experiment: Experiment) -> bool:
    return experiment.engine.backend == "inline" or experiment.ray.actors is not None or bool(experiment.ray.pools)


def _one_by_one(cells: Sequence[StudyCell], left: Sequence[int], listen: CellListener) -> dict[int, CellOutcome]:
    outcomes: dict[int, CellOutcome] = {}
    with runs.session(cells[left[0]].experiment):
        for i in left:
            outcomes[i] = run_cell(cells[i].experiment, cells[i].folder, [partial(listen, i)])
            if outcomes[i].status == STOPPED:
                break
    return outcomes


def _as_tasks(cells: Sequence[StudyCell], left: Sequence[int], listen: CellListener) -> dict[int, CellOutcome]:
    listener = partial(listen, left[0])
    with StopRequest().listening() as stop, connected(cells[left[0]].experiment.ray, listener) as ray:
        from ray.util.queue import Queue

        spare.release(ray)
        for i in left:
            client_actors(ray, in_one_process(cells[i].experiment.ray), len(left))  # refuses what never has room
        _refuse_unless_shared(ray, [cells[i] for i in left])
        events = Queue(actor_options=on_this_node(ray))
        try:
            # If its process dies, Ray runs a task again, which costs the rounds since the last checkpoint.
            task = ray.remote(max_retries=3)(run_cell_task)
            references = {_begun(task, cells[i], i, events): i for i in left}
            return _outcomes(ray, cells, references, events, listen, stop)
        finally:
            events.shutdown(force=True)


def _refuse_unless_shared(ray: Any, cells: Sequence[StudyCell]) -> None:
    """Raise a ConfigError unless every node that may run cells has the folders in which they are."""
    reserved: dict[Path, list[dict[str, float]]] = {}
    for cell in cells:
        needed = bundle(for_client(in_one_process(cell.experiment.ray)))
        reserved.setdefault(cell.folder.parent, []).append(needed)
    for folder, needed_there in reserved.items():
        refuse_unless_shared(ray, folder, needed_there, "This study")


def _begun(task: Any, cell: StudyCell, number: int, events: Any) -> Any:
    """A reference to the outcome of a cell, which Ray begins as soon as there is room for it."""
    reserved = for_client(in_one_process(cell.experiment.ray))
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
    """What became of the cells, all of which ended or, once that was requested, were stopped."""
    outcomes: dict[int, CellOutcome] = {}
    cancelled = False
    while references:
        done, _ = ray.wait(list(references), timeout=POLL)
        if stop.received and not cancelled:
            listen(next(iter(references.values())), Progress("stopping: saving what runs"))
            for reference in reversed(references):  # those that wait first, so that no room is left to begin them
                ray.cancel(reference)  # in a process that runs it, a Ctrl-C, which saves a checkpoint
            cancelled = True
        for cell, event in events.get_nowait_batch(events.size()):
            listen(cell, ray.cloudpickle.loads(event))
        for reference in done:
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
        first = str(error).strip().splitlines()[0]
        return CellOutcome(FAILED, f"Its process died every time that Ray started it: {first}")
    if outcome.status == FINISHED and not is_finished(folder):
        return CellOutcome(FAILED, f"It finished on a node that has another {folder}; let output be a shared folder.")
    return outcome
