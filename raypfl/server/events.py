"""What a run tells those who listen: the console, MLflow, a user's own function. The engine knows no more of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raypfl.federation.logged import Logged
from raypfl.federation.server_training import ServerAtWork

if TYPE_CHECKING:
    from raypfl.config import Experiment


@dataclass(frozen=True)
class Progress:
    """A step of the start-up, in a few words (``"starting Ray"``)."""

    text: str


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or goes on at `first_round`.

    Attributes
    ----------
    run : its name. run_dir : its folder.
    metadata : what was found out: num_clients, parameters, weights (where the first ones are from), executor,
        channels_last, why (these two were chosen; empty if the settings say so), group_size, actors, data, device (of
        the clients), server_device, system, versions.
    """

    run: str
    run_dir: str
    experiment: Experiment
    metadata: dict[str, Any]
    first_round: int


@dataclass(frozen=True)
class RoundFinished:
    """A round is done; `round` counts finished rounds, from 1.

    Attributes
    ----------
    loss : mean training loss over the cohort; NaN if nobody trained.
    bytes_up, bytes_down : of this round, all clients together.
    bytes_up_total, bytes_down_total : of this round and all before it, in a resumed run too.
    clients, dropped, failed : how many took part to the end, vanished by simulation, failed and were skipped.
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
    logged: Logged = field(default_factory=Logged, repr=False)


@dataclass(frozen=True)
class Evaluated:
    """All clients were evaluated after `round`, which is 0 before the first one.

    `summary` has a dict for each protocol and model, see ``evaluation.summarise``.
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
    """Something that a person should know; each text comes once a run."""

    text: str


@dataclass(frozen=True)
class RunFinished:
    """The run is over. `weights_hash` is the SHA-256 of the server's and all clients' final state.

    `best_round` is the best one by validation data; None: nothing was validated. `tables` : by name, those that are
    kept in the run's folder; `images` : what a method logged, a row each of round, name and PNG file.
    """

    status: Literal["finished", "stopped", "failed"]
    round: int
    weights_hash: str
    error: str | None = None
    tables: dict[str, Any] = field(default_factory=dict, repr=False)
    best_round: int | None = None
    images: Any = field(default=None, repr=False)


Event = Progress | RunStarted | ServerAtWork | RoundFinished | Evaluated | Checkpointed | Warned | RunFinished
Listener = Callable[[Event], None]
