"""Several runs in this process that advance together, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypfl.clients.context import Context
from raypfl.common.errors import Refused, Stopped
from raypfl.common.stopping import StopRequest
from raypfl.common.threads import threads
from raypfl.experiment import Experiment
from raypfl.learning.packing import Packed, Packer
from raypfl.learning.vectorised import Vectorised
from raypfl.runs.result import RunResult
from raypfl.runs.together.parts import expected, parts

MOST_RUNS = 16
"""Most runs that advance together. Each has its own models and tables in memory."""

POLL = 0.2
"""Seconds between looks at whether the runs were asked to stop."""


@dataclass(frozen=True)
class Place:
    """A run's place among runs that advance together.

    Attributes
    ----------
    stop : the request to stop the run.
    """

    packer: Packer
    run: int
    stop: StopRequest

    @property
    def count(self) -> int:
        """The number of runs that advance together."""
        return self.packer.runs

    def clock(self) -> float:
        """Return the seconds that the run has computed, without those of the other runs' turns."""
        return self.packer.seconds(self.run)

    def cpu_clock(self) -> float:
        """Return the seconds of CPU time that the run has taken."""
        return self.packer.cpu_seconds(self.run)

    def prepare(self, context: Context) -> None:
        """Let the run's clients train with those of the other runs, if they train at once."""
        for network_context in (context, *context.by_architecture):
            if isinstance(network_context.executor, Vectorised):
                network_context.executor = Packed(network_context.executor, self.packer, self.run)


Run = Callable[[Place], RunResult]


def run_together(runs: Sequence[Run], notice: Callable[[], None] = lambda: None) -> list[RunResult | Exception | None]:
    """Carry out runs that advance together; each has the bits that it has alone.

    A run that ends or fails leaves the others as they are. On a signal, all of them save their rounds and stop.

    Parameters
    ----------
    runs : functions that carry out one run each.
    notice : called, in another thread, when the runs are asked to stop.

    Returns
    -------
    for each run, its result or its error; None if it has not started, since the runs were asked to stop or refused.

    Raises
    ------
    KeyboardInterrupt : if a second signal asks to stop.
    """
    packer = Packer(len(runs))
    places = [Place(packer, number, StopRequest()) for number in range(len(runs))]
    outcomes: list[RunResult | Exception | None] = [None] * len(runs)

    def carry_out(place: Place) -> None:
        try:
            with packer.turn(place.run):
                if place.stop.received or any(isinstance(outcome, Refused) for outcome in outcomes):
                    return
                outcomes[place.run] = runs[place.run](place)
        except Exception as error:
            outcomes[place.run] = error
        except KeyboardInterrupt:
            # A second signal, which the main thread reports.
            pass

    def stop_all() -> None:
        for place in places:
            place.stop.received = True
        notice()

    stop = StopRequest()
    workers = [threading.Thread(target=carry_out, args=(place,), daemon=True) for place in places]
    with threads(1), stop.acknowledged(stop_all), stop.listening():
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                # In a Ray task, a request to stop is noticed between two waits only.
                while worker.is_alive():
                    worker.join(POLL)
        except KeyboardInterrupt:
            packer.abandon()
            for worker in workers:
                worker.join()
            raise
    return outcomes


def run_similar(experiments: Sequence[Experiment], runs: Sequence[Callable[[Place | None], RunResult]]) -> None:
    """Carry out runs in this process: together if they can and it pays, else one after another.

    Parameters
    ----------
    experiments : the runs' experiments.
    runs : functions that carry out one run each; None: it is on its own.

    Raises
    ------
    Exception : the first error of a run.
    Stopped : if the runs were asked to stop before all had begun.
    """
    can_advance_together = len(runs) > 1 and len(parts(experiments)) == 1
    if not (can_advance_together and expected(experiments[0]).pays):
        for run in runs:
            run(None)
        return

    for start in range(0, len(runs), MOST_RUNS):
        for outcome in run_together(runs[start : start + MOST_RUNS]):
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is None:
                raise Stopped("The runs were asked to stop.")
