"""The interface of analyses, and what they see of a round on the server."""

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
from raypfl.common.rounds import is_due
from raypfl.federation.logged import EarlierKinds, Log
from raypfl.federation.method import Method
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.sample_pools import Pool, Pools
from raypfl.learning.settings import TrainingSettings

ANALYSES = Registry("analysis", plural="analyses")


class AnalysedRound(Log):
    """A round as an analysis sees it on the server, and the log of its results.

    Attributes
    ----------
    round : the round's number; 0: before the first round.
    clients : numbers of the clients that took part.
    before, after : the global model ``[P+B]`` before and after the round; None if the method has none. Before the first
        round, both are the initial one.
    task, method, training : the run's task, method and training settings.
    cohort_size : the number of clients drawn for a round.
    departures : settings in force by which clients do, or the server gets, something else than the method says, such as
        ``attack``.
    folder : the analysis's folder in the run's folder. Write files that later rounds need here, named by round.
    """

    def __init__(
        self,
        round: int,
        clients: tuple[int, ...],
        models: tuple[Tensor | None, Tensor | None],
        run: AnalysedRun,
        folder: Path,
        earlier_kinds: EarlierKinds,
    ):
        super().__init__(earlier_kinds)
        self.round = round
        self.clients = clients
        self.before, self.after = models
        self.task = run.task
        self.method = run.method
        self.training = run.training
        self.cohort_size = run.cohort_size
        self.departures = run.departures
        self.folder = folder
        self._run = run

    def samples(self, client: int) -> Batch:
        """Return all training samples of a client, as the network sees them."""
        return self._run.samples(client)

    def pool(self, name: str) -> Pool:
        """Return samples that belong to no client (``data.pools``)."""
        return self._run.pools.pool(name, self.round)

    def steps(self, client: int) -> Iterator[Observation]:
        """Iterate over what `before_step` and `after_training` returned for a client in this round, in order."""
        return load_observations(self.folder, self.round, client)


@dataclass(frozen=True)
class AnalysedRun:
    """What all analysed rounds of a run share.

    Attributes
    ----------
    task, method, training, cohort_size, departures : as in :class:`AnalysedRound`.
    samples : a function that returns all training samples of a client.
    pools : the server's view of the pools.
    """

    task: Task
    method: Method
    training: TrainingSettings
    cohort_size: int
    departures: tuple[str, ...]
    samples: Callable[[int], Batch]
    pools: Pools


class Analysis(Component):
    """A study of a run that sees models and changes nothing: a run has the same bits with it and without.

    Subclasses become frozen dataclasses; their fields are options. What they log and keep is not a message, so the
    ledger does not count it.

    Attributes
    ----------
    every : number of rounds from one analysis to the next; the last round is always analysed. 0: only the last.
    """

    every: int = 1

    def _assignment_error(self, name: str) -> Exception:
        return MethodError(
            f"{type(self).__name__}.{name} cannot be set: an analysis keeps nothing between calls, so that runs can be "
            "resumed. Return arrays from before_step, or write a file in the folder of the round."
        )

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"every is {self.every}; it must be 0, for the last round only, or more.")

    def needed_pools(self) -> tuple[str, ...]:
        """Return the names in ``data.pools`` that this analysis needs; a run without one of them is refused."""
        return ()

    def observes(self, round: int, rounds: int) -> bool:
        """Return whether `before_step` is called in this round; by default, if the round is analysed."""
        return self.is_due(round, rounds)

    def is_due(self, round: int, rounds: int) -> bool:
        """Return whether :meth:`after_round` is called after this round."""
        return is_due(round, self.every, rounds)

    def start(self, view: AnalysedRound) -> None:
        """Prepare on the server, before the first round; refuse here what cannot be analysed."""

    def before_step(self, step: LocalStep) -> Mapping[str, Any] | None:
        """Observe a client before each of its local steps. Return arrays to keep, by name, or None."""
        return None

    def after_training(self, step: LocalStep) -> Mapping[str, Any] | None:
        """Observe a client after the last step of each training, with the trained model. Return as `before_step`."""
        return None

    def after_round(self, view: AnalysedRound) -> None:
        """Analyse a round on the server: read what was kept; log numbers, tables and images."""

    def summary(self, folder: Path, round: int) -> list[str]:
        """Return lines to print after the run, from this analysis's `folder`; `round` is the last finished round."""
        return []


def analysis_folder(run_dir: str | Path, analysis: Analysis) -> Path:
    """Return the folder of an analysis's files."""
    return Path(run_dir) / "analyses" / analysis_name(analysis)


def analysis_name(analysis: Analysis) -> str:
    """Return the registered name of an analysis, or the name of its class."""
    return ANALYSES.name_of(type(analysis)).rpartition(":")[2]


def load_observations(folder: Path, round: int, client: int) -> Iterator[Observation]:
    """Iterate over an analysis's observations of a client's local steps in a round, in order."""
    file = _observation_file(folder, round, client)
    if not file.exists():
        return

    arrays_by_step: dict[tuple[int, int], dict[str, Any]] = {}
    for key, array in load_file(file).items():
        training, step, name = key.split("/", 2)
        arrays_by_step.setdefault((int(training), int(step)), {})[name] = array
    for (training_number, step_number), arrays in sorted(arrays_by_step.items()):
        yield Observation(client, training_number, step_number, arrays)


def save_observations(folder: Path, round: int, observations: list[Observation]) -> None:
    """Write an analysis's observations of one client's local steps. A round that is repeated writes the same file."""
    file = _observation_file(folder, round, observations[0].client)
    file.parent.mkdir(parents=True, exist_ok=True)

    arrays = {}
    for observation in observations:
        for name, array in observation.arrays.items():
            arrays[f"{observation.training}/{observation.step}/{name}"] = array
    save_file(arrays, file)


def _observation_file(folder: Path, round: int, client: int) -> Path:
    return folder / f"round-{round:06d}" / f"client-{client:06d}.safetensors"


def picture(figure: Any) -> Tensor:
    """Return a matplotlib figure as an image ``uint8[1, 3, H, W]``, for :meth:`AnalysedRound.log_image`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    width, height = canvas.get_width_height()
    return pixels.view(height, width, 4)[..., :3].permute(2, 0, 1)[None]
