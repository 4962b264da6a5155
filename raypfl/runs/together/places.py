"""Several runs in this process that advance together, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypfl.clients.context import Context
from raypfl.common.errors import Refused
from raypfl.common.stopping import StopRequest
from raypfl.common.threads import threads
from raypfl.experiment import Experiment
from raypfl.learning.packing import Packed, Packer
from raypfl.learning.vectorised import Vectorised
from raypfl.runs.result import RunResult

MOST_RUNS = 16
"""Most runs that advance together. Each has its own models and tables in memory."""


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

    def prepare(self, context: Context) -> None:
        """Let the run's clients train with those of the other runs, if they train at once."""
        if isinstance(context.executor, Vectorised):
            context.executor = Packed(context.executor, self.packer, self.run)


def parts(experiments: Mapping[Path, Experiment]) -> Iterator[list[Path]]:
    """Yield the folders of runs that can advance together, in order.

    These are runs in this process, on one thread of a CPU, that differ only in their seeds.
    """
    part: list[Path] = []
    for folder, experiment in experiments.items():
        if part and len(part) < MOST_RUNS and _differ_in_seeds(experiments[part[0]], experiment):
            part.append(folder)
            continue
        if part:
            yield part
        part = [folder]
    if part:
        yield part


def _differ_in_seeds(a: Experiment, b: Experiment) -> bool:
    engine = a.engine
    one_thread = engine.threads == 1 and engine.threads_for_server in (None, 1)
    fits = engine.backend == "inline" and one_thread and not a.ray.on_gpu and engine.executor != "sequential"
    return fits and _without_seed(a) == _without_seed(b)


def _without_seed(experiment: Experiment) -> dict[str, object]:
    values = experiment.to_dict()
    del values["seed"]
    # A comparison's runs keep their checkpoints apart.
    values["checkpoint"] = {**values["checkpoint"], "location": None}
    return values


Run = Callable[[Place], RunResult]


def run_together(runs: Sequence[Run], notice: Callable[[], None]) -> list[RunResult | Exception | None]:
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
            # A second signal, of which the main thread tells.
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
                worker.join()
        except KeyboardInterrupt:
            packer.abandon()
            for worker in workers:
                worker.join()
            raise
    return outcomes
