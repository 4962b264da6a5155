"""Continue several runs: one after another, or together in this process or in Ray's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.cluster import client_actors, connected
from raypfl.engine.backends.session import exclusive_ray, spare_server
from raypfl.engine.dispatcher import EventDispatcher
from raypfl.engine.events import Event, Listener, Progress
from raypfl.experiment import Experiment
from raypfl.runs import driver
from raypfl.runs.resuming import without_options_of_others
from raypfl.runs.several.processes import refuse_unless_folders_are_shared, room_for_runs, run_as_tasks, shares
from raypfl.runs.several.worker import PlannedRun, RunOutcome, carry_out
from raypfl.runs.together import MOST_RUNS, expected, parts


def resume_all(
    runs: Mapping[Path, Experiment], listeners: Mapping[Path, Sequence[Listener]], overrides: Sequence[str] = ()
) -> Iterator[dict[Path, RunOutcome]]:
    """Continue runs; those that differ in numbers only may advance together. One that fails does not stop the others.

    Yields the outcomes of those that have ended, by folder. Runs that have not begun when one ended all
    (`RunOutcome.ends_others`) have none.

    Parameters
    ----------
    runs : folder -> experiment of each run.
    listeners : folder -> the listeners of its run.

    Raises
    ------
    KeyboardInterrupt : if the runs were asked to stop before one began, or twice.
    """
    planned = []
    for folder, experiment in runs.items():
        planned.append(PlannedRun(folder, experiment, without_options_of_others(experiment, overrides)))
    several = _NumberedRuns(planned, [listeners[folder] for folder in runs])
    for ended in several.carry_out():
        yield {planned[number].folder: outcome for number, outcome in ended.items()}
        if any(outcome.ends_others for outcome in ended.values()):
            return


@dataclass(frozen=True)
class _NumberedRuns:
    """Runs to continue, each with a number."""

    runs: Sequence[PlannedRun]
    listeners: Sequence[Sequence[Listener]]

    def carry_out(self) -> Iterator[dict[int, RunOutcome]]:
        """Carry out all runs, and yield the outcomes of those that have ended."""
        for_processes: list[list[int]] = []
        for part in parts([run.experiment for run in self.runs]):
            if self._suits_processes(part):
                for_processes.append(part)
                continue
            yield self._in_processes(for_processes)
            for_processes = []
            yield from self._in_turn(part)
        yield self._in_processes(for_processes)

    def _in_turn(self, part: Sequence[int]) -> Iterator[dict[int, RunOutcome]]:
        """Carry out runs one after another or, without Ray, together in this process."""
        at_a_time = MOST_RUNS if self._is_inline(part) else 1
        for start in range(0, len(part), at_a_time):
            numbers = part[start : start + at_a_time]
            outcomes = carry_out([self.runs[number] for number in numbers], [self.listeners[n] for n in numbers])
            yield dict(zip(numbers, outcomes, strict=True))

    def _is_inline(self, part: Sequence[int]) -> bool:
        return self.runs[part[0]].experiment.engine.backend == "inline"

    def _suits_processes(self, part: Sequence[int]) -> bool:
        """Return whether runs on Ray share processes, rather than each having its own client actors."""
        if len(part) == 1 or self._is_inline(part):
            return False
        emit = EventDispatcher(self.listeners[part[0]])
        why_not = self._why_in_turn(part, emit)
        if why_not:
            emit(Progress(f"one run after another: {why_not}"))
        return not why_not

    def _why_in_turn(self, part: Sequence[int], emit: Listener) -> str:
        """Return why runs on Ray that could advance together follow one after another; empty if they do not."""
        experiment = self.runs[part[0]].experiment
        expectation = expected(experiment)
        if not expectation.pays:
            return expectation.why

        with connected(experiment.ray, emit) as ray:
            processes = room_for_runs(ray, experiment.ray, len(part))
            (actors,) = client_actors(ray, experiment.ray, expectation.groups)
            if processes < actors:
                return f"each can use {actors} client actors at a time"
            try:
                refuse_unless_folders_are_shared(ray, [self.runs[number] for number in part], "This comparison")
            except ConfigError:
                return f"{self.runs[part[0]].folder.parent} is not a folder that all nodes share"
        return ""

    def _in_processes(self, together: Sequence[Sequence[int]]) -> dict[int, RunOutcome]:
        """Carry out runs on Ray, those of a part together, in as many processes as the cluster has room for."""
        if not together:
            return {}

        numbers = [number for part in together for number in part]
        emitters = {number: EventDispatcher(self.listeners[number]) for number in numbers}
        experiment = self.runs[numbers[0]].experiment
        first = emitters[numbers[0]]

        def listen(number: int, event: Event) -> None:
            emitters[number](event)

        stop = StopRequest()
        with (
            exclusive_ray(),
            stop.acknowledged(lambda: first(Progress(driver.STOPPING))),
            stop.listening(),
            connected(experiment.ray, first) as ray,
        ):
            spare_server.release(ray)
            processes = room_for_runs(ray, experiment.ray, len(numbers))
            cut = shares(together, processes)
            first(Progress(f"starting {counted(min(processes, len(cut)), 'process', 'processes')} for the runs"))
            return run_as_tasks(ray, {number: self.runs[number] for number in numbers}, cut, listen, stop)
