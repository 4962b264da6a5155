"""Running a study's cells: as many at a time as there is room for, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypfl import runs
from raypfl.backends.cluster import client_actors, connected, for_client, in_one_process
from raypfl.common.stopping import StopRequest
from raypfl.config import Experiment
from raypfl.runs.driver import make_room
from raypfl.runs.result import is_finished
from raypfl.server.events import Event, Progress
from raypfl.studies.cells import Cell
from raypfl.studies.workers import FAILED, FINISHED, STOPPED, Desk, Outcome, carry_out, work

POLL = 0.3
"""Seconds between looks at what cells have told."""

Hear = Callable[[int, Event], None]


def run(cells: Sequence[Cell], hear: Hear) -> list[Outcome]:
    """Bring all cells to their ends, but for those that are stopped or fail.

    A cell whose run is finished is left as it is; one that was interrupted goes on from its checkpoint. Cells are Ray
    tasks that reserve what one client actor would or, if that is more, the server, so Ray runs as
    many at a time as the cluster has room for. With ``ray.actors`` a cell has so many actors, and with
    ``engine.backend=inline`` there is no Ray: cells then go one after the other.

    Parameters
    ----------
    hear : is called with a cell's number and every event of its run.

    Returns
    -------
    What became of each. After Ctrl-C or SIGTERM, those that are not finished are ``stopped``.
    """
    outcomes = {i: Outcome(FINISHED) for i, cell in enumerate(cells) if is_finished(cell.folder)}
    left = [i for i in range(len(cells)) if i not in outcomes]
    if left:
        one_by_one = any(_is_on_its_own(cell.experiment) for cell in cells)
        outcomes |= (_one_by_one if one_by_one else _together)(cells, left, hear)
    return [outcomes.get(i, Outcome(STOPPED)) for i in range(len(cells))]


def _is_on_its_own(experiment: Experiment) -> bool:
    return experiment.engine.backend == "inline" or experiment.ray.actors is not None


def _one_by_one(cells: Sequence[Cell], left: Sequence[int], hear: Hear) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    with runs.session(cells[left[0]].experiment):
        for i in left:
            listener = _listener(hear, i)
            outcomes[i] = carry_out(cells[i].experiment, cells[i].folder, [listener])
            if outcomes[i].status == STOPPED:
                break
    return outcomes


def _listener(hear: Hear, cell: int) -> Callable[[Event], None]:
    return lambda event: hear(cell, event)


def _together(cells: Sequence[Cell], left: Sequence[int], hear: Hear) -> dict[int, Outcome]:
    settings = cells[left[0]].experiment.ray
    with StopRequest().listening() as stop, connected(settings, lambda event: hear(left[0], event)) as ray:
        make_room(ray)
        desk = ray.remote(Desk).options(num_cpus=0).remote()
        try:
            return _Crowd(ray, desk, cells, list(left)).followed(hear, stop)
        finally:
            ray.kill(desk)


@dataclass
class _Crowd:
    """Cells that run at the same time, and those that wait for room, in order."""

    ray: Any
    desk: Any
    cells: Sequence[Cell]
    waiting: list[int]
    running: dict[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A process that dies costs the rounds since the last checkpoint: its task is run again, and resumes there.
        self._task = self.ray.remote(max_retries=3)(work)

    def followed(self, hear: Hear, stop: StopRequest) -> dict[int, Outcome]:
        """All to their ends or, once that is asked for, to their stops."""
        outcomes: dict[int, Outcome] = {}
        cancelled = False
        self._begin()
        while self.running:
            done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL)
            if stop.made and not cancelled:
                hear(next(iter(self.running.values())), Progress("stopping: what runs is saved"))
                self.waiting.clear()
                for reference in self.running:
                    self.ray.cancel(reference)  # a Ctrl-C to its process, which then saves a checkpoint
                cancelled = True
            for cell, event in self.ray.get(self.desk.collect.remote()):
                hear(cell, self.ray.cloudpickle.loads(event))
            for reference in done:
                number = self.running.pop(reference)
                outcomes[number] = self._outcome(reference, self.cells[number].folder, stop)
            self._begin()
        return outcomes

    def _begin(self) -> None:
        """Hand Ray as many cells as there is room for, and one more, so that no room waits for us."""
        while self.waiting and len(self.running) <= self._at_a_time(self.cells[self.waiting[0]]):
            number = self.waiting.pop(0)
            self.running[self._begun(self.cells[number], number)] = number

    def _at_a_time(self, cell: Cell) -> int:
        """How many like this the cluster has room for; refuses one that it never has room for."""
        return client_actors(self.ray, in_one_process(cell.experiment.ray), len(self.cells))

    def _begun(self, cell: Cell, number: int) -> Any:
        """A reference to the outcome of a cell, which begins once there is room for it."""
        task = self._task.options(**for_client(in_one_process(cell.experiment.ray)))
        inside = cell.experiment.override(["engine.backend=inline"])
        return task.remote(number, inside, cell.folder, os.getcwd(), self.desk)

    def _outcome(self, reference: Any, folder: Path, stop: StopRequest) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(reference)
            if outcome.status == FINISHED and not is_finished(folder):
                return Outcome(
                    FAILED, f"It finished on a node where {folder} is another folder; let output be a shared one."
                )
            return outcome
        except self.ray.exceptions.RayError as error:
            if stop.made:
                return Outcome(STOPPED)
            if isinstance(error, self.ray.exceptions.RayTaskError):
                return Outcome(FAILED, str(error))
            first = str(error).strip().splitlines()[0]
            return Outcome(FAILED, f"Its process died, and again each time that Ray started it: {first}")
