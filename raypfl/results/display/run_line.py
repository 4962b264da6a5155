"""How far a run is, as texts for the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from raypfl.common.counting import counted
from raypfl.engine.events import (
    Evaluated,
    Event,
    RoundFinished,
    RunFinished,
    RunStarted,
    ServerProgress,
    SimulatedRound,
)
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.tables import MODELS
from raypfl.experiment import Experiment
from raypfl.results.colours import colour
from raypfl.results.display.pace import Pace
from raypfl.results.display.plan import duration, energy
from raypfl.results.labels import labels
from raypfl.results.units import Unit


class RunLine:
    """One run's progress; a listener to its events.

    Parameters
    ----------
    label : the name of the run.
    rounds : the number of rounds; updated when the run starts.
    colour : the label's, as ``#RRGGBB``.
    """

    def __init__(self, label: str, rounds: int = 0, colour: str = "default"):
        self.label = label
        self.rounds = rounds
        self.colour = colour
        self.status = "waiting"
        self.round = 0
        self.first_round = 0
        self.loss: float | None = None
        self.bytes_up = 0
        self.bytes_down = 0
        self.simulated: SimulatedRound | None = None
        self.unit = Unit(Measures().primary)

        self._scores: dict[str, float] = {}
        self._scored_round = 0
        self._metadata: dict[str, Any] = {}
        self._start_time: float | None = None
        self._end_time: float | None = None
        self._evaluate_every = 0
        self._pace = Pace(0.0)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.status = "running"
                self.rounds = event.experiment.rounds
                self.unit = Unit(event.experiment.measures.primary)
                self.first_round = event.first_round
                self.round = event.first_round
                self._metadata = event.metadata
                self._start_time = time.monotonic()
                self._evaluate_every = event.experiment.evaluation.every
                self._pace = Pace(self._start_time)
            case RoundFinished():
                self.round = event.round
                self.loss = None if math.isnan(event.loss) else event.loss
                self.bytes_up = event.bytes_up_total
                self.bytes_down = event.bytes_down_total
                self.simulated = event.simulated
                self._pace.round_ended(time.monotonic())
            case Evaluated():
                self._scores = self._mean_scores(event.summary)
                self._scored_round = event.round
                self._pace.evaluation_ended(time.monotonic())
            case RunFinished():
                self.status = event.status
                self._end_time = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds from the run's start to its end, or until now."""
        if self._start_time is None:
            return 0.0
        if self._end_time is None:
            return time.monotonic() - self._start_time
        return self._end_time - self._start_time

    @property
    def clock(self) -> str:
        """``"0:12 left"`` at the pace of the last rounds; ``"0:34"`` once the run has ended."""
        if self._end_time is not None:
            return minutes(self.seconds)
        seconds_left = self._pace.seconds_left(self.rounds - self.round, self._evaluations_left())
        return "" if seconds_left is None else f"{minutes(seconds_left)} left"

    @property
    def company(self) -> str:
        """``"with 2 other runs in one process"``; empty for a run that does not advance together with others."""
        num_others = self._metadata.get("together", 1) - 1
        return f"with {counted(num_others, 'other run')} in one process" if num_others else ""

    @property
    def scores(self) -> str:
        """The primary metric of personal and of global models on the clients' own test data: ``"94.1 / 90.2"``."""
        if not self._scores:
            return ""
        texts = []
        for model in MODELS:
            if model in self._scores:
                texts.append(self.unit.text(self._scores[model]))
            else:
                texts.append("–")
        return " / ".join(texts)

    @property
    def score_round(self) -> str:
        """``" (round 2)"`` if `scores` are of that round and others have finished since."""
        if not self._scores or self._scored_round >= self.round:
            return ""
        return f" (round {self._scored_round})"

    @property
    def sentence(self) -> str:
        """The scores with the metric's name and unit: ``"personal 94.1 %, global 90.2 %"``."""
        if not self._scores:
            return ""
        name = ""
        if not self.unit.sign:
            name = f"{self.unit.heading} "

        texts = []
        for model in MODELS:
            if model in self._scores:
                texts.append(f"{model} {self.unit.text(self._scores[model])}{self.unit.sign}")
        return f"{name}{', '.join(texts)}{self.score_round}"

    @property
    def traffic(self) -> str:
        """MB sent up and down so far: ``"3.1 / 3.1"``."""
        if self.round <= self.first_round:
            return ""
        return f"{self.bytes_up / 1e6:.1f} / {self.bytes_down / 1e6:.1f}"

    @property
    def overview(self) -> str:
        """Clients, parameters, executor, actors and simulated time so far, in one line."""
        metadata = self._metadata
        parts = []
        if "num_clients" in metadata:
            parts.append(counted(metadata["num_clients"], "client"))
        if "parameters" in metadata:
            parts.append(f"{metadata['parameters']:,} parameters")
        if "architectures" in metadata:
            sizes = [architecture["parameters"] for architecture in metadata["architectures"]]
            parts.append(f"{len(sizes)} architectures of {min(sizes):,} to {max(sizes):,} parameters")
        if metadata.get("weights"):
            parts.append(metadata["weights"])

        if "group_size" in metadata:
            execution = str(metadata["executor"])
            if metadata.get("channels_last"):
                execution += ", channels last"
            execution += f" in groups of {metadata['group_size']}"
            if metadata.get("why"):
                execution += f" ({metadata['why']})"
            parts.append(execution)

        if metadata.get("actors", 1) > 1:
            parts.append(f"{metadata['actors']} actors")
        if self.company:
            parts.append(self.company)

        if self.simulated is not None:
            parts.append(f"simulated {duration(self.simulated.time)}, {energy(self.simulated.joules_total)}")
        return " · ".join(parts)

    def _evaluations_left(self) -> int:
        """Return how many of the rounds to come end in an evaluation; the last one does."""
        if self.round >= self.rounds:
            return 0
        if not self._evaluate_every:
            return 1
        return math.ceil(self.rounds / self._evaluate_every) - self.round // self._evaluate_every

    def _mean_scores(self, summary: list[dict[str, Any]]) -> dict[str, float]:
        """Scores by model, in the metric's unit; none where there was no model to evaluate."""
        protocols = [row["protocol"] for row in summary]
        if not protocols:
            return {}
        protocol = protocols[0]
        if "local" in protocols:
            protocol = "local"

        name = self.unit.metric.name
        scores = {}
        for row in summary:
            if row["protocol"] == protocol and name in row:
                scores[row["model"]] = self.unit.factor * row[name]
        return scores


def lines_for(experiments: Sequence[Experiment]) -> list[RunLine]:
    """Return a line for each run of a comparison, in order, with its seed where a method has several."""
    names = labels(experiments)
    methods = list(dict.fromkeys(names))
    has_several_seeds = len(methods) < len(names)

    lines = []
    for experiment, name in zip(experiments, names, strict=True):
        label = name
        if has_several_seeds:
            label = f"{name} · seed {experiment.seed}"
        lines.append(RunLine(label, experiment.rounds, colour(methods.index(name))))
    return lines


def server_step(event: ServerProgress) -> str:
    """Return ``"round 3: distilling 120/500"``."""
    progress = str(event.done)
    if event.total is not None:
        progress = f"{event.done}/{event.total}"
    return f"round {event.round}: {event.text} {progress}"


def minutes(seconds: float) -> str:
    """Return ``"0:34"``, ``"1:02:03"``."""
    whole_minutes, rest = divmod(round(seconds), 60)
    hours, whole_minutes = divmod(whole_minutes, 60)
    if hours:
        return f"{hours}:{whole_minutes:02}:{rest:02}"
    return f"{whole_minutes}:{rest:02}"
