"""Running a study's cells: as many at a time as the cluster has room for; some may advance together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.cluster import connected
from raypfl.engine.backends.session import spare_server
from raypfl.engine.events import Event
from raypfl.experiment import Experiment
from raypfl.runs import driver
from raypfl.runs.result import is_finished
from raypfl.runs.several.processes import refuse_unless_folders_are_shared, room_for_runs, run_as_tasks, shares
from raypfl.runs.several.worker import FINISHED, STOPPED, PlannedRun, RunOutcome, carry_out
from raypfl.runs.together import MOST_RUNS, expected, parts
from raypfl.studies.cells import StudyCell

CellListener = Callable[[int, Event], None]


def run(cells: Sequence[StudyCell], listen: CellListener) -> list[RunOutcome]:
    """Run all cells; finished ones are skipped, and interrupted ones continue from their checkpoints.

    Equal cells, such as trials for which the same settings were drawn, are one run.

    Cells that differ only in seeds and other numbers advance together where their clients train at once. Each cell,
    or each share of such cells, is a Ray task. It reserves as much as a client actor, or as the server if that is
    more; Ray runs as many at a time as the cluster has room for. With ``ray.actors``, ``ray.pools`` or
    ``engine.backend=inline``, cells run in this process, one part after another, with these actors or without Ray.

    Parameters
    ----------
    listen : called with a cell's number and each event of its run.

    Returns
    -------
    The outcome of each cell. After Ctrl-C or SIGTERM, cells that are not finished are ``stopped``.
    """
    numbers_of: dict[Path, list[int]] = {}
    for i, cell in enumerate(cells):
        numbers_of.setdefault(cell.folder, []).append(i)
    equal_cells = {numbers[0]: numbers for numbers in numbers_of.values()}

    def listen_for_equal(first: int, event: Event) -> None:
        for i in equal_cells[first]:
            listen(i, event)

    outcomes = {i: RunOutcome(FINISHED) for i in equal_cells if is_finished(cells[i].folder)}
    unfinished = [i for i in equal_cells if i not in outcomes]
    if unfinished and any(_needs_this_process(cell.experiment) for cell in cells):
        outcomes |= _run_in_this_process(cells, unfinished, listen_for_equal)
    elif unfinished:
        outcomes |= _run_as_tasks(cells, unfinished, listen_for_equal)

    for first, numbers in equal_cells.items():
        outcomes |= dict.fromkeys(numbers, outcomes.get(first, RunOutcome(STOPPED)))
    return [outcomes[i] for i in range(len(cells))]


def _needs_this_process(experiment: Experiment) -> bool:
    return experiment.engine.backend == "inline" or experiment.ray.actors is not None or bool(experiment.ray.pools)


def _parts(cells: Sequence[StudyCell], unfinished: Sequence[int]) -> list[list[int]]:
    """Return the numbers of cells, those in one list that advance together."""
    together: list[list[int]] = []
    for positions in parts([cells[i].experiment for i in unfinished]):
        numbers = [unfinished[position] for position in positions]
        if len(numbers) > 1 and not expected(cells[numbers[0]].experiment).pays:
            together += [[number] for number in numbers]
        else:
            together.append(numbers)
    # Cells that do not advance together stay in their order, seed by seed.
    return sorted(together)


def _planned(cell: StudyCell, experiment: Experiment) -> PlannedRun:
    values = experiment.to_dict()
    # It may continue on other machines, or with other checkpoints, to the same bits.
    changes = [f"{key}={json.dumps(values[key])}" for key in ("ray", "checkpoint")]
    changes.append(f"engine.backend={experiment.engine.backend}")
    return PlannedRun(cell.folder, experiment, changes, is_cell=True)


def _run_in_this_process(
    cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener
) -> dict[int, RunOutcome]:
    outcomes: dict[int, RunOutcome] = {}
    with driver.session(cells[unfinished[0]].experiment):
        for part in _parts(cells, unfinished):
            for start in range(0, len(part), MOST_RUNS):
                numbers = part[start : start + MOST_RUNS]
                runs = [_planned(cells[i], cells[i].experiment) for i in numbers]
                ended = carry_out(runs, [[partial(listen, i)] for i in numbers])
                outcomes |= zip(numbers, ended, strict=True)
                if any(outcome.status == STOPPED for outcome in ended):
                    return outcomes
    return outcomes


def _run_as_tasks(cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener) -> dict[int, RunOutcome]:
    first = unfinished[0]
    runs = {}
    for i in unfinished:
        runs[i] = _planned(cells[i], cells[i].experiment.override(["engine.backend=inline"]))

    with StopRequest().listening() as stop, connected(cells[first].experiment.ray, partial(listen, first)) as ray:
        spare_server.release(ray)
        # Refuses a cell for which the cluster will never have room.
        rooms = [room_for_runs(ray, run.experiment, len(runs)) for run in runs.values()]
        refuse_unless_folders_are_shared(ray, runs.values(), "This study")
        return run_as_tasks(ray, runs, shares(_parts(cells, unfinished), min(rooms)), listen, stop)
