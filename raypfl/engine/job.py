"""What the process of a run's server gets from the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypfl.devices import ClientTurns
from raypfl.storage.filesystems import join

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


@dataclass(frozen=True)
class Job:
    """A run, as the driver sends it to its server.

    Attributes
    ----------
    experiment : the description of the run, with all that its settings left open.
    why : the reason for the choice of executor.
    fingerprint : hash of the data and the partition.
    weights : hash of the file of initial weights; empty without one.
    attempt : a unique name of this attempt at the run, which the lease on its checkpoints records.
    lockstep : whether the server waits after a checkpoint until all listeners have returned.
    turns : the clients' turns; None: no setting of the devices is used.
    device_files : hash of the files that describe the devices; empty without any.
    together : whether clients of an asynchronous run that were sent different models may train in one group.
    parent : the run that this one continues, and its round; None: it begins with the first round.
    code : hashes of the user's own modules that the experiment names.
    """

    name: str
    run_dir: str
    experiment: Experiment
    why: str
    fingerprint: str
    weights: str
    attempt: str
    lockstep: bool = False
    turns: ClientTurns | None = None
    device_files: str = ""
    together: bool = False
    parent: Mapping[str, Any] | None = None
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> str:
        """The folder or address of the run's checkpoints."""
        return checkpoints_of(self.experiment, self.run_dir)


def checkpoints_of(experiment: Experiment, run_dir: str) -> str:
    """Return the folder of a run's checkpoints: in the run's folder, or in the location that the settings name."""
    location = experiment.checkpoint.location
    if location is None:
        return f"{run_dir}/checkpoints"
    return join(location, Path(run_dir).name)
