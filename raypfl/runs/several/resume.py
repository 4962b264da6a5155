"""Continue several runs: one after another, or together in this process or in Ray's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError, NoRun
from raypfl.common.stopping import StopRequest
from raypfl.engine.backends.cluster import client_actors, connected
from raypfl.engine.backends.session import exclusive_ray, spare_server
from raypfl.engine.dispatcher import EventDispatcher
from raypfl.engine.events import Event, Listener, Progress
from raypfl.experiment import Experiment
from raypfl.runs import driver
from raypfl.runs.result import RunResult
from raypfl.runs.several.processes import refuse_unless_folders_are_shared, room_for_runs, run_as_tasks, shares
from raypfl.runs.several.worker import PlannedRun
from raypfl.runs.together import MOST_RUNS, Place, expected, parts, run_together

Ended = Iterator[tuple[int, RunResult | Exception]]
"""Numbers of runs with their results or errors."""


def resume_all(
    runs: Mapping[Path, Experiment], listeners: Mapping[Path, Sequence[Listener]], overrides: Sequence[str] = ()
) -> Iterator[RunResult]:
    """Continue runs, and yield their results in order; those that differ in numbers only may advance together.

    Parameters
    ----------
    runs : folder -> experiment of each run.
    listeners : folder -> the listeners of its run.

    Raises
    ------
    Exception : the error of the first run that fails. Those that advance together with it have ended too.
    KeyboardInterrupt : if the runs were stopped before the next one began.
    """
    several = _Several(list(runs), list(runs.values()), [listeners[folder] for folder in runs], overrides)
    results: dict[int, RunResult | Exception] = {}
    position = 0
    for number, ended in several.carry_out():
        results[number] = ended
        while position in results:
            result = results[position]
            if isinstance(result, Exception):
                raise result
            yield result
            position += 1
    if position < len(runs):
        raise KeyboardInterrupt


def resume_together(
    folders: Sequence[Path], listeners: Sequence[Sequence[Listener]], overrides: Sequence[str] = ()
) -> list[RunResult | Exception | None]:
    """Continue runs that advance together; see :func:`raypfl.runs.together.run_together`."""

    def resume(folder: Path, its_listeners: Sequence[Listener], place: Place) -> RunResult:
        return driver.resume(folder, listeners=its_listeners, overrides=overrides, place=place)

    runs = [partial(resume, *run) for run in zip(folders, listeners, strict=True)]
    emit = EventDispatcher(listeners[0])
    return run_together(runs, notice=lambda: emit(Progress(driver.STOPPING)))


@dataclass(frozen=True)
class _Several:
    """Runs to continue, each with a number."""

    folders: Sequence[Path]
    experiments: Sequence[Experiment]
    listeners: Sequence[Sequence[Listener]]
    overrides: Sequence[str]

    def carry_out(self) -> Ended:
        """Carry out all runs; one that never starts is left out."""
        for_processes: list[list[int]] = []
        for part in parts(self.experiments):
            if self._suits_processes(part):
                for_processes.append(part)
                continue
            yield from self._in_processes(for_processes)
            for_processes = []
            yield from self._in_turn(part)
        yield from self._in_processes(for_processes)

    def _in_turn(self, part: Sequence[int]) -> Ended:
        """Carry out runs one after another or, without Ray, together in this process."""
        if len(part) == 1 or not self._is_inline(part):
            for number in part:
                listeners = self.listeners[number]
                yield number, driver.resume(self.folders[number], listeners=listeners, overrides=self.overrides)
            return

        for start in range(0, len(part), MOST_RUNS):
            numbers = part[start : start + MOST_RUNS]
            folders = [self.folders[number] for number in numbers]
            results = resume_together(folders, [self.listeners[number] for number in numbers], self.overrides)
            for number, result in zip(numbers, results, strict=True):
                if result is not None:
                    yield number, result

    def _is_inline(self, part: Sequence[int]) -> bool:
        return self.experiments[part[0]].engine.backend == "inline"

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
        experiment = self.experiments[part[0]]
        expectation = expected(experiment)
        if not expectation.pays:
            return expectation.why

        with connected(experiment.ray, emit) as ray:
            processes = room_for_runs(ray, experiment, len(part))
            (actors,) = client_actors(ray, experiment.ray, expectation.groups)
            if processes < actors:
                return f"each can use {actors} client actors at a time"
            try:
                refuse_unless_folders_are_shared(ray, self._planned(part).values(), "This comparison")
            except ConfigError:
                return f"{self.folders[part[0]].parent} is not a folder that all nodes share"
        return ""

    def _planned(self, numbers: Sequence[int]) -> dict[int, PlannedRun]:
        return {
            number: PlannedRun(self.folders[number], self.experiments[number], self.overrides) for number in numbers
        }

    def _in_processes(self, together: Sequence[Sequence[int]]) -> Ended:
        """Carry out runs on Ray, those of a part together, in as many processes as the cluster has room for."""
        if not together:
            return

        numbers = [number for part in together for number in part]
        emitters = {number: EventDispatcher(self.listeners[number]) for number in numbers}
        settings = self.experiments[numbers[0]]
        first = emitters[numbers[0]]

        def listen(number: int, event: Event) -> None:
            emitters[number](event)

        stop = StopRequest()
        with (
            exclusive_ray(),
            stop.acknowledged(lambda: first(Progress(driver.STOPPING))),
            stop.listening(),
            connected(settings.ray, first) as ray,
        ):
            spare_server.release(ray)
            processes = room_for_runs(ray, settings, len(numbers))
            cut = shares(together, processes)
            first(Progress(f"starting {counted(min(processes, len(cut)), 'process', 'processes')} for the runs"))
            outcomes = run_as_tasks(ray, self._planned(numbers), cut, listen, stop)

        for number in numbers:
            error = outcomes[number].error
            if error is not None:
                yield number, error
                continue
            try:
                yield number, RunResult.load(self.folders[number])
            except NoRun:
                # It was stopped before it began.
                return
