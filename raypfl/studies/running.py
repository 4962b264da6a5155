"""Running a study's cells: as many at a time as the cluster has room for; some may advance together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.engine.events import Event
from raypfl.experiment import Experiment
from raypfl.experiment.identity import differences
from raypfl.runs import driver
from raypfl.runs.records import DESCRIPTION, description, divergence, is_finished
from raypfl.runs.several.processes import refuse_unless_folders_are_shared, run_in_this_process, run_on_cluster
from raypfl.runs.several.worker import FAILED, FINISHED, STOPPED, PlannedRun, RunOutcome
from raypfl.studies.cells import StudyCell

CellListener = Callable[[int, Event], None]


def run(cells: Sequence[StudyCell], listen: CellListener) -> list[RunOutcome]:
    """Run all cells; finished and diverged ones are skipped, others continue from their checkpoints.

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

    Raises
    ------
    ConfigError : if the run in a cell's folder has been given another number of rounds, or another patience.
    """
    _refuse_other_lengths(cells)
    numbers_of: dict[Path, list[int]] = {}
    for i, cell in enumerate(cells):
        numbers_of.setdefault(cell.folder, []).append(i)
    equal_cells = {numbers[0]: numbers for numbers in numbers_of.values()}

    def listen_for_equal(first: int, event: Event) -> None:
        for i in equal_cells[first]:
            listen(i, event)

    outcomes = {i: outcome for i in equal_cells if (outcome := ended(cells[i]))}
    unfinished = [i for i in equal_cells if i not in outcomes]
    if unfinished and any(_needs_this_process(cell.experiment) for cell in cells):
        outcomes |= _run_in_this_process(cells, unfinished, listen_for_equal)
    elif unfinished:
        outcomes |= _run_as_tasks(cells, unfinished, listen_for_equal)

    for first, numbers in equal_cells.items():
        outcomes |= dict.fromkeys(numbers, outcomes.get(first, RunOutcome(STOPPED)))
    return [outcomes[i] for i in range(len(cells))]


def ended(cell: StudyCell) -> RunOutcome | None:
    """Return the outcome of a cell that is not trained again, finished or diverged; None: it has rounds left."""
    if is_finished(cell.folder):
        return RunOutcome(FINISHED)
    error = divergence(cell.folder)
    return RunOutcome(FAILED, error) if error else None


def other_rounds(cell: StudyCell) -> list[int]:
    """Return the numbers of rounds of a study's runs that differ from a cell in nothing else.

    Runs that can no longer be read, such as those of a method whose options have changed, are passed over.
    """
    if cell.folder.exists():
        return []
    same_method_and_seed = f"{cell.folder.name.rpartition('-')[0]}-*/{DESCRIPTION}"
    numbers = set()
    for file in cell.folder.parent.glob(same_method_and_seed):
        with suppress(RaypflError):
            run = description(file.parent)
            if differences(cell.experiment, run) == ["rounds"]:
                numbers.add(run.rounds)
    return sorted(numbers)


def _refuse_other_lengths(cells: Sequence[StudyCell]) -> None:
    """Raise a ConfigError if a cell's run is longer by now, by `raypfl resume`: its name stands for the length here."""
    for cell in cells:
        if not Path(cell.folder, DESCRIPTION).exists():
            continue
        run = description(cell.folder)
        planned = cell.experiment
        lengths = {
            "rounds": (run.rounds, planned.rounds),
            "evaluation.patience": (run.evaluation.patience, planned.evaluation.patience),
        }
        for key, (length_of_run, described) in lengths.items():
            if length_of_run != described:
                raise ConfigError(
                    f"{cell.folder} is no longer the run of {cell.label}: it was resumed with {key}={length_of_run}, "
                    f"where the study has {described}. Move it out of {cell.folder.parent}, and run the study again."
                )


def _needs_this_process(experiment: Experiment) -> bool:
    return experiment.engine.backend == "inline" or experiment.ray.actors is not None or bool(experiment.ray.pools)


def _planned(cell: StudyCell, experiment: Experiment) -> PlannedRun:
    values = experiment.to_dict()
    # These settings do not change the bits, so the run may continue with others.
    changes = [f"{key}={json.dumps(values[key])}" for key in ("ray", "checkpoint")]
    changes.append(f"engine.backend={experiment.engine.backend}")
    return PlannedRun(cell.folder, experiment, changes, is_shared=True)


def _run_in_this_process(
    cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener
) -> dict[int, RunOutcome]:
    runs = {i: _planned(cells[i], cells[i].experiment) for i in unfinished}
    with driver.session(cells[unfinished[0]].experiment):
        return run_in_this_process(runs, listen)


def _run_as_tasks(cells: Sequence[StudyCell], unfinished: Sequence[int], listen: CellListener) -> dict[int, RunOutcome]:
    runs = {}
    for i in unfinished:
        experiment = cells[i].experiment
        planned = _planned(cells[i], experiment.override(["engine.backend=inline"]))
        runs[i] = replace(planned, ray=experiment.ray)

    def prepare(ray: Any) -> None:
        refuse_unless_folders_are_shared(ray, runs.values(), "This study")

    return run_on_cluster(runs, listen, prepare)
