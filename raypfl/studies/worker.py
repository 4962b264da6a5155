"""One cell of a study, in the process that runs it.

On Ray such a process begins by importing this module, so it imports nothing that takes long: a Ctrl-C before a cell's
run begins is then a KeyboardInterrupt in that cell, rather than in Ray.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Sequence
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


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended; `error` is a sentence, if it failed."""

    status: Status
    error: str = ""


def run_cell(experiment: Experiment, folder: Path, listeners: Sequence[Listener]) -> CellOutcome:
    """Run a cell to its end, from its beginning or from its newest checkpoint, unless another process does so."""
    from raypfl.common.errors import RaypflError
    from raypfl.common.files import locked
    from raypfl.runs import driver as runs
    from raypfl.runs.result import RECIPE, is_finished

    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with locked(folder):
            if is_finished(folder):
                return CellOutcome(FINISHED)
            if (folder / RECIPE).exists():
                values = experiment.to_dict()  # it may continue elsewhere, or with other checkpoints, to the same bits
                changes = [f"{key}={json.dumps(values[key])}" for key in ("ray", "checkpoint")]
                changes.append(f"engine.backend={experiment.engine.backend}")
                result = runs.resume(folder, listeners=listeners, overrides=changes)
            else:
                result = runs.run(experiment, listeners=listeners, run_dir=folder)
        return CellOutcome(STOPPED if result.status == STOPPED else FINISHED)
    except RaypflError as error:
        return CellOutcome(FAILED, str(error))
    except Exception:  # a cell that fails must not end the others
        return CellOutcome(FAILED, traceback.format_exc())


def run_cell_task(cell: int, experiment: Experiment, folder: Path, home: str, events: Any) -> CellOutcome:
    """`run_cell` as a Ray task.

    Parameters
    ----------
    home : the study's working directory, to which paths and modules are relative.
    events : a Ray queue, into which the cell's number and its pickled events are put.
    """
    with contextlib.suppress(OSError):
        os.chdir(home)

    def report(event: Event) -> None:
        if type(event).__name__ != "Progress":  # the steps of the start-up, which cells take at the same time
            events.put((cell, ray.cloudpickle.dumps(event)))  # the queue's own process need not import its class

    return run_cell(experiment, folder, [report])
