"""Running one cell of a study, in its process.

A Ray process starts by importing this module, so it imports nothing slow at the top: a Ctrl-C before the cell's run
starts is then a KeyboardInterrupt in the cell rather than in Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ray

if TYPE_CHECKING:
    from raypfl.engine.events import Event, Listener
    from raypfl.experiment import Experiment

Status = Literal["finished", "stopped", "failed"]
FINISHED: Status = "finished"
STOPPED: Status = "stopped"
FAILED: Status = "failed"

COSTS = "costs.jsonl"
"""File in a cell's folder. Each process that works on the cell adds a line: ``commit`` and ``cpu_seconds``."""


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended; if it failed, `error` is a sentence."""

    status: Status
    error: str = ""


def run_cell(experiment: Experiment, folder: Path, listeners: Sequence[Listener]) -> CellOutcome:
    """Run a cell from its start or its newest checkpoint to its end, unless another process is running it."""
    from raypfl.common.errors import RaypflError
    from raypfl.common.files import locked
    from raypfl.runs import driver
    from raypfl.runs.result import RECIPE, is_finished

    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            if is_finished(folder):
                return CellOutcome(FINISHED)
            with _recorded_costs(folder, experiment):
                if (folder / RECIPE).exists():
                    # It may continue on other machines, or with other checkpoints, to the same bits.
                    values = experiment.to_dict()
                    changes = [f"{key}={json.dumps(values[key])}" for key in ("ray", "checkpoint")]
                    changes.append(f"engine.backend={experiment.engine.backend}")
                    result = driver.resume(folder, listeners=listeners, overrides=changes)
                else:
                    result = driver.run(experiment, listeners=listeners, run_dir=folder)
        return CellOutcome(STOPPED if result.status == STOPPED else FINISHED)
    except RaypflError as error:
        return CellOutcome(FAILED, str(error))
    except Exception:
        # A cell that fails must not end the others.
        return CellOutcome(FAILED, traceback.format_exc())


@contextlib.contextmanager
def _recorded_costs(folder: Path, experiment: Experiment) -> Iterator[None]:
    """Add a line to the cell's costs; its CPU seconds are unknown where actors do the work."""
    from raypfl.common.checkout import commit

    start = time.process_time()
    try:
        yield
    finally:
        cpu_seconds = None
        if experiment.engine.backend == "inline":
            cpu_seconds = round(time.process_time() - start, 1)
        costs = {"commit": commit(Path(__file__).parents[1]), "cpu_seconds": cpu_seconds}
        # A run that was refused has no folder.
        if folder.is_dir():
            with (folder / COSTS).open("a") as file:
                file.write(json.dumps(costs) + "\n")


def run_cell_task(cell: int, experiment: Experiment, folder: Path, home: str, events: Any) -> CellOutcome:
    """Run a cell as a Ray task.

    Parameters
    ----------
    home : the study's working directory, to which paths and modules are relative.
    events : the Ray queue for the cell's number and pickled events.
    """
    with contextlib.suppress(OSError):
        os.chdir(home)

    def report(event: Event) -> None:
        # Progress events are steps of the start-up, which many cells take at the same time.
        if type(event).__name__ != "Progress":
            # Pickled, so that the queue's process need not import the event's class.
            events.put((cell, ray.cloudpickle.dumps(event)))

    return run_cell(experiment, folder, [report])
