"""Events of a run, for its listeners: the console, MLflow, a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raypfl.federation.logged import Logged
from raypfl.federation.server_training import ServerProgress

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


@dataclass(frozen=True)
class Progress:
    """A step of the start-up, such as ``"starting Ray"``; one that the user may need later `stays` on the screen."""

    text: str
    stays: bool = False


@dataclass(frozen=True)
class RunStarted:
    """A run starts, or continues after `first_round` rounds.

    Attributes
    ----------
    run : the name of the run.
    run_dir : the run's folder.
    experiment : the description of the run, with all that its settings left open.
    metadata : num_clients, parameters, weights (where the initial ones are from), executor, channels_last, why (the
        reason for these two; empty if the settings name them), group_size, actors, together (the number of runs that
        advance together, if they do), data, device (of the clients), server_device, system, versions, startup_seconds
        (from the command to this event: data, processes, choices), and parent (``run`` and ``round``) if the run
        continues another one.
    first_round : the number of rounds finished before.
    """

    run: str
    run_dir: str
    experiment: Experiment
    metadata: dict[str, Any]
    first_round: int


@dataclass(frozen=True)
class SimulatedRound:
    """A round on the clients' devices.

    Attributes
    ----------
    seconds : duration of the round.
    time : seconds from the start of the run to the end of this round, in a resumed run too.
    joules : energy that the clients' devices use in this round.
    joules_total : energy of this round and all before it.
    late : number of clients that would have finished after the round.
    """

    seconds: float
    time: float
    joules: float
    joules_total: float
    late: int


@dataclass(frozen=True)
class RoundFinished:
    """A round is finished; `round` counts from 1.

    Attributes
    ----------
    loss : mean training loss over the cohort; NaN if no client trained.
    seconds : duration of the round; of runs that advance together in a process, without the others' turns.
    bytes_up, bytes_down : traffic of this round, all clients together.
    bytes_up_total, bytes_down_total : traffic of this round and all before it, in a resumed run too.
    clients : number of clients that finished.
    dropped : number of clients that dropped out by simulation.
    failed : number of clients that failed and were skipped.
    simulated : the round in simulated time; None: time is not simulated.
    logged : what the method logged: numbers, tables, images.
    """

    round: int
    loss: float
    seconds: float
    bytes_up: int
    bytes_down: int
    clients: int
    dropped: int
    failed: int
    bytes_up_total: int
    bytes_down_total: int
    simulated: SimulatedRound | None = None
    logged: Logged = field(default_factory=Logged, repr=False)


@dataclass(frozen=True)
class Evaluated:
    """All clients were evaluated after `round`; 0 is before the first one.

    `summary` : a dict for each protocol and model, see ``evaluation.summarise``.
    """

    round: int
    summary: list[dict[str, Any]]


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint is complete."""

    round: int
    location: str


@dataclass(frozen=True)
class Warned:
    """A warning for the user; each text comes once per run."""

    text: str


@dataclass(frozen=True)
class RunFinished:
    """The run is over.

    Attributes
    ----------
    status : ``diverged`` if a training's loss or model was not finite, or its loss above ``failures.loss_limit``.
    round : the last finished round.
    weights_hash : SHA-256 of the server's and all clients' final state; empty if it was on a GPU that failed.
    error : why the run diverged or failed, as a sentence.
    tables : the tables of the run's folder, by name.
    best_round : the best round by validation data; None: no round was validated.
    images : images that the method logged, a table with the columns round, name and png.
    """

    status: Literal["finished", "stopped", "diverged", "failed"]
    round: int
    weights_hash: str
    error: str | None = None
    tables: dict[str, Any] = field(default_factory=dict, repr=False)
    best_round: int | None = None
    images: Any = field(default=None, repr=False)


Event = Progress | RunStarted | ServerProgress | RoundFinished | Evaluated | Checkpointed | Warned | RunFinished
Listener = Callable[[Event], None]
