"""What an analysis is, and what its server side sees of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from raypfl.clients.observation import LocalStep, Observation
from raypfl.common.component import Component
from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.registry import Registry
from raypfl.federation.logged import Log
from raypfl.federation.method import Method
from raypfl.federation.schedule import is_due
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.pool import Pool, Pools
from raypfl.learning.settings import TrainingSettings

ANALYSES = Registry("analysis")


class AnalysedRound(Log):
    """A round as an analysis sees it on the server, and where it logs what it finds.

    Attributes
    ----------
    round : its number; 0: before the first one.
    clients : numbers of the clients that took part.
    before, after : the global model ``[P+B]`` before and after the round; None if the method has none. Before the first
        round, both are the initial one.
    task, method, training : what is run. cohort_size : clients that are drawn for a round.
    folder : of this analysis, in the run's folder. Write files that later rounds need here, under names of rounds.
    """

    def __init__(
        self,
        round: int,
        clients: tuple[int, ...],
        models: tuple[Tensor | None, Tensor | None],
        run: AnalysedRun,
        folder: Path,
        known: Mapping[str, Mapping[str, str]],
    ):
        super().__init__(known)
        self.round = round
        self.clients = clients
        self.before, self.after = models
        self.task, self.method, self.training = run.task, run.method, run.training
        self.cohort_size = run.cohort_size
        self.folder = folder
        self._run = run

    def samples(self, client: int) -> Batch:
        """All training samples of a client, as the network sees them."""
        return self._run.samples(client)

    def pool(self, name: str) -> Pool:
        """Samples that belong to no client (``data.pools``)."""
        return self._run.pools.pool(name, self.round)

    def steps(self, client: int) -> Iterator[Observation]:
        """What :meth:`Analysis.before_step` and `after_training` have kept of a client in this round, in its order."""
        return observations(self.folder, self.round, client)


@dataclass(frozen=True)
class AnalysedRun:
    """What all rounds of a run share.

    Attributes
    ----------
    samples : all training samples of a client.
    pools : as the server reads them.
    """

    task: Task
    method: Method
    training: TrainingSettings
    cohort_size: int
    samples: Callable[[int], Batch]
    pools: Pools


def _refused(analysis: Analysis, name: str, value: Any) -> None:
    raise MethodError(
        f"{type(analysis).__name__}.{name} cannot be set: an analysis keeps nothing between calls, so that runs can be "
        "resumed. Return arrays from before_step, or write a file in the folder of the round."
    )


class Analysis(Component):
    """A study of a run: it sees models and changes nothing. A run has the same bits with it and without.

    Subclasses become frozen dataclasses; their fields are options. What they log and keep is no message, so that the
    ledger does not count it.

    Attributes
    ----------
    every : rounds between two that are analysed; the last one always is. 0: only the last.
    """

    every: int = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__setattr__ = _refused  # type: ignore[method-assign,assignment]

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"every is {self.every}; it must be 0, for the last round only, or more.")

    def needed_pools(self) -> tuple[str, ...]:
        """The names in ``data.pools`` that this analysis needs; a run without one of them is refused."""
        return ()

    def observes(self, round: int, rounds: int) -> bool:
        """Whether :meth:`before_step` is called in this round: by default, in those that are analysed."""
        return self.is_due(round, rounds)

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether :meth:`after_round` is called after this round."""
        return is_due(round, self.every, rounds)

    def start(self, view: AnalysedRound) -> None:
        """On the server, before the first round; also the place to refuse what cannot be analysed."""

    def before_step(self, step: LocalStep) -> Mapping[str, Any] | None:
        """On the clients, before each local step of each client. Returns arrays to keep, by name, or None."""
        return None

    def after_training(self, step: LocalStep) -> Mapping[str, Any] | None:
        """On the clients, after the last step of each training of each client, with the model that came out of it."""
        return None

    def after_round(self, view: AnalysedRound) -> None:
        """On the server, after a round: read what was kept, log numbers, tables and images."""

    def summary(self, folder: Path, round: int) -> list[str]:
        """Lines to print when the run is over, from this analysis's `folder`; `round` : rounds finished."""
        return []


def folder_of(run_dir: str | Path, analysis: Analysis) -> Path:
    """Where an analysis keeps its files."""
    return Path(run_dir) / "analyses" / name_of(analysis)


def name_of(analysis: Analysis) -> str:
    """Its registered name, or the name of its class."""
    return ANALYSES.name_of(type(analysis)).rpartition(":")[2]


def observations(folder: Path, round: int, client: int) -> Iterator[Observation]:
    """What an analysis has kept of a client's local steps in a round."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    file = file_of(folder, round, client)
    for name, array in (load_file(file) if file.exists() else {}).items():
        training, step, own = name.split("/", 2)
        found.setdefault((int(training), int(step)), {})[own] = array
    for (of, at), kept in sorted(found.items()):
        yield Observation(client, of, at, kept)


def keep(folder: Path, round: int, seen: list[Observation]) -> None:
    """Write what an analysis keeps of one client's local steps. A round that is run again writes the same file."""
    file = file_of(folder, round, seen[0].client)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"{o.training}/{o.step}/{name}": a for o in seen for name, a in o.arrays.items()}, file)


def file_of(folder: Path, round: int, client: int) -> Path:
    return folder / f"round-{round:06d}" / f"client-{client:06d}.safetensors"


def picture(figure: Any) -> Tensor:
    """A matplotlib figure as an image ``uint8[1, 3, H, W]``, for :meth:`AnalysedRound.log_image`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    width, height = canvas.get_width_height()
    return pixels.view(height, width, 4)[..., :3].permute(2, 0, 1)[None]
