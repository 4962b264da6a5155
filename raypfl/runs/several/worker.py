"""Carrying out planned runs in this process: one, or several that advance together.

A Ray process starts by importing this module, so it imports nothing slow at the top: a Ctrl-C before the first run
starts is then a KeyboardInterrupt here rather than in Ray.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raypfl.common.errors import RayDied, RaypflError, Unwritable

if TYPE_CHECKING:
    from raypfl.engine.events import Event, Listener
    from raypfl.experiment import Experiment
    from raypfl.experiment.settings import RaySettings
    from raypfl.runs.result import RunResult
    from raypfl.runs.together import Place

Status = Literal["finished", "stopped", "ended early", "failed"]
FINISHED: Status = "finished"
STOPPED: Status = "stopped"
ENDED_EARLY: Status = "ended early"
FAILED: Status = "failed"

INTERVAL = 0.2
"""Seconds between messages with the events of a process; one for each event would cost as much as a small round."""


class EarlyEnd(Protocol):
    """A listener in a run's own process that may end the run, by raising :class:`raypfl.common.errors.Stopped`.

    Attributes
    ----------
    has_ended_run : whether it has done so.
    """

    has_ended_run: bool

    def __call__(self, event: Event) -> None:
        """Take note of an event of the run, after all other listeners."""


@dataclass(frozen=True)
class PlannedRun:
    """A run to start or, if it has been started, to continue.

    Attributes
    ----------
    changes : assignments with which it continues.
    is_shared : whether other processes may work on it too, for which this one then waits; its costs are recorded.
    early_end : what may end the run before its last round.
    ray : the cluster, and what the run reserves there if it is a Ray task; None: as its experiment says, which says
        nothing of it if the run is described as one without Ray.
    """

    folder: Path
    experiment: Experiment
    changes: Sequence[str] = ()
    is_shared: bool = False
    early_end: EarlyEnd | None = None
    ray: RaySettings | None = None

    @property
    def ray_settings(self) -> RaySettings:
        """The settings of the cluster, and of what the run reserves there."""
        return self.ray or self.experiment.ray


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended; if it failed, `error` says why. A run that never started counts as stopped.

    It has ended early if its `early_end` has ended it, and is stopped if it was asked to stop.
    """

    status: Status
    error: RaypflError | None = None

    @property
    def ends_others(self) -> bool:
        """Whether further runs would end likewise: it was asked to stop, or nothing can be written or computed."""
        from raypfl.clients.gpu_errors import gpu_failure

        is_everyones = self.status == STOPPED or isinstance(self.error, Unwritable | RayDied)
        return is_everyones or bool(gpu_failure())


def carry_out(
    runs: Sequence[PlannedRun], listeners: Sequence[Sequence[Listener]], in_this_process: bool = False
) -> list[RunOutcome]:
    """Carry out runs to their ends, each from its start or its newest checkpoint; several advance together.

    `in_this_process` : whether a single run on Ray is computed in this process too, as several are.
    """
    from raypfl.common.files import locked
    from raypfl.engine.dispatcher import EventDispatcher
    from raypfl.engine.events import Progress
    from raypfl.runs import driver
    from raypfl.runs.together import run_together

    with contextlib.ExitStack() as locks:
        # In one order, or two processes that have some of the same runs could wait for each other.
        for run in sorted(runs, key=lambda run: run.folder):
            if run.is_shared:
                run.folder.parent.mkdir(parents=True, exist_ok=True)
                locks.enter_context(locked(run.folder))

        is_inline = runs[0].experiment.engine.backend == "inline"
        if len(runs) == 1 and (is_inline or not in_this_process):
            return [_outcome_of(runs[0], partial(_start_or_continue, runs[0], listeners[0]))]
        starts = []
        for run, run_listeners in zip(runs, listeners, strict=True):
            starts.append(partial(_start_or_continue, run, run_listeners))
        emit = EventDispatcher(listeners[0])
        results = run_together(starts, notice=lambda: emit(Progress(driver.STOPPING)))
    return [_outcome_of(run, partial(_reraise, result)) for run, result in zip(runs, results, strict=True)]


def _start_or_continue(run: PlannedRun, listeners: Sequence[Listener], place: Place | None = None) -> RunResult:
    from raypfl.runs import driver
    from raypfl.runs.records import DESCRIPTION
    from raypfl.runs.resuming import is_complete_as

    if run.early_end is not None:
        listeners = [*listeners, run.early_end]
    with contextlib.ExitStack() as stack:
        if run.is_shared and not is_complete_as(run.folder, run.experiment):
            listeners = [*listeners, stack.enter_context(_recorded_costs(run, place))]
        if (run.folder / DESCRIPTION).exists():
            return driver.resume(run.folder, listeners=listeners, overrides=run.changes, place=place)
        return driver.run(run.experiment, listeners=listeners, run_dir=run.folder, place=place)


@contextlib.contextmanager
def _recorded_costs(run: PlannedRun, place: Place | None) -> Iterator[Listener]:
    """Record the run's costs; the listener to its events notes that they are unknown until its end.

    The CPU seconds stay unknown where actors do the work.
    """
    from raypfl.common.checkout import commit
    from raypfl.engine.events import RunStarted
    from raypfl.runs.several.costs import add_costs

    add = partial(add_costs, run.folder, uuid.uuid4().hex, commit(Path(__file__).parents[2]))

    def note_start(event: Event) -> None:
        if isinstance(event, RunStarted):
            add(None)

    clock = time.process_time if place is None else place.cpu_clock
    start = clock()
    try:
        yield note_start
    finally:
        is_known = place is not None or run.experiment.engine.backend == "inline"
        add(round(clock() - start, 1) if is_known else None)


def _reraise(result: RunResult | Exception | None) -> RunResult | None:
    if isinstance(result, Exception):
        raise result
    return result


def _outcome_of(run: PlannedRun, carry_out: Callable[[], RunResult | None]) -> RunOutcome:
    try:
        result = carry_out()
    except RaypflError as error:
        return RunOutcome(FAILED, error)
    except Exception:
        # A run that fails must not end the others.
        return RunOutcome(FAILED, RaypflError(traceback.format_exc()))
    if result is not None and result.status != STOPPED:
        return RunOutcome(FINISHED)
    has_ended_early = run.early_end is not None and run.early_end.has_ended_run
    return RunOutcome(ENDED_EARLY if has_ended_early else STOPPED)


def carry_out_task(numbers: Sequence[int], runs: Sequence[PlannedRun], home: str, queue: Any) -> list[RunOutcome]:
    """Carry out runs as a Ray task.

    Parameters
    ----------
    numbers : the number of each run, with which its events are sent.
    home : the driver's working directory, to which paths and modules are relative.
    queue : the Ray queue for lists of numbers and events, pickled.
    """
    with contextlib.suppress(OSError):
        os.chdir(home)
    with _Sender(queue) as sender:
        return carry_out(runs, [[partial(sender.put, number)] for number in numbers], in_this_process=True)


class _Sender:
    """Sends events to the driver, several in one message."""

    def __init__(self, queue: Any):
        self._queue = queue
        self._waiting: list[tuple[int, Event]] = []
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send_regularly, daemon=True)

    def __enter__(self) -> _Sender:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._send()

    def put(self, number: int, event: Event) -> None:
        """Send a run's event with the next message."""
        # Progress events are steps of the start-up, which many runs take at the same time.
        if type(event).__name__ != "Progress":
            with self._lock:
                self._waiting.append((number, event))

    def _send_regularly(self) -> None:
        while not self._is_over.wait(INTERVAL):
            self._send()

    def _send(self) -> None:
        with self._lock:
            waiting = self._waiting
            self._waiting = []
        if waiting:
            # Here, since runs in one process do without Ray, whose import takes half a second.
            import ray

            # Pickled, so that the queue's process need not import the events' classes.
            self._queue.put(ray.cloudpickle.dumps(waiting))
