"""What goes on in the processes of a study's cells, and how the study hears of it.

Their processes begin with importing this module, so it imports nothing that takes long.
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
    from raypfl.config import Experiment
    from raypfl.server.events import Event, Listener

Status = Literal["finished", "stopped", "failed"]
FINISHED: Status = "finished"
STOPPED: Status = "stopped"
FAILED: Status = "failed"


@dataclass(frozen=True)
class Outcome:
    """How work on a cell ended; `error` is a sentence, if it failed."""

    status: Status
    error: str = ""


def carry_out(experiment: Experiment, folder: Path, listeners: Sequence[Listener]) -> Outcome:
    """Bring a cell's run to its end: from its beginning, or from its newest checkpoint.

    Of several processes that are to do so, one does.
    """
    from raypfl import runs
    from raypfl.common.errors import RaypflError
    from raypfl.common.files import alone
    from raypfl.runs.result import RECIPE, is_finished

    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with alone(folder):
            if is_finished(folder):
                return Outcome(FINISHED)
            if (folder / RECIPE).exists():
                values = experiment.to_dict()  # it may go on elsewhere, or with other checkpoints, to the same bits
                where = [f"{key}={json.dumps(values[key])}" for key in ("ray", "checkpoint")]
                where.append(f"engine.backend={experiment.engine.backend}")
                result = runs.resume(folder, listeners=listeners, overrides=where)
            else:
                result = runs.run(experiment, listeners=listeners, run_dir=folder)
        return Outcome(STOPPED if result.status == STOPPED else FINISHED)
    except RaypflError as error:
        return Outcome(FAILED, str(error))
    except Exception:  # one cell must not take the others with it
        return Outcome(FAILED, traceback.format_exc())


class Desk:
    """Where cells leave their news, as pickled events, and the study collects them."""

    def __init__(self) -> None:
        self._told: list[tuple[int, bytes]] = []

    def tell(self, cell: int, event: bytes) -> None:
        self._told.append((cell, event))

    def collect(self) -> list[tuple[int, bytes]]:
        """What was told since the last time."""
        told, self._told = self._told, []
        return told


def work(cell: int, experiment: Experiment, folder: Path, home: str, desk: Any) -> Outcome:
    """A cell in a process of its own, with all that it needs.

    Parameters
    ----------
    home : the study's working directory, from which paths and modules are named.
    """
    with contextlib.suppress(OSError):
        os.chdir(home)
    told: list[Any] = []

    def tell(event: Event) -> None:
        if type(event).__name__ != "Progress":  # steps of the start-up, which all cells take at the same time
            told[:] = [desk.tell.remote(cell, ray.cloudpickle.dumps(event))]

    outcome = carry_out(experiment, folder, [tell])
    ray.get(told)  # all of it has been told once the last has
    return outcome
