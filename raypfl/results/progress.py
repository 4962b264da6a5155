"""The state of a run in progress, and how it is put into words."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from raypfl.config import Experiment
from raypfl.evaluation.measures import Measures
from raypfl.results.compared import colour, labels
from raypfl.results.units import Unit
from raypfl.server.events import Evaluated, Event, RoundFinished, RunFinished, RunStarted, ServerAtWork

_PACE_ROUNDS = 10  # the pace is that of the last ones: the first ones also warm up


class RunLine:
    """One run's progress; a listener to its events.

    Parameters
    ----------
    label : the name of the run.
    rounds : how many it has; updated when the run starts.
    colour : of its label, as ``#RRGGBB``.
    """

    def __init__(self, label: str, rounds: int = 0, colour: str = "default"):
        self.label, self.rounds, self.colour = label, rounds, colour
        self.status = "waiting"
        self.round = self.first_round = 0
        self.loss: float | None = None
        self.bytes_up = self.bytes_down = 0
        self.unit = Unit(Measures().primary)
        self._scores: dict[str, float] = {}
        self._evaluated = 0
        self._metadata: dict[str, Any] = {}
        self._began: float | None = None
        self._ended: float | None = None
        self._ends: deque[float] = deque(maxlen=_PACE_ROUNDS)

    def __call__(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.status, self.rounds, self._metadata = "running", event.experiment.rounds, event.metadata
                self.first_round = self.round = event.first_round
                self.unit = Unit(event.experiment.measures.primary)
                self._began = time.monotonic()
            case RoundFinished():
                self.round, self.loss = event.round, event.loss
                self.bytes_up, self.bytes_down = event.bytes_up_total, event.bytes_down_total
                self._ends.append(time.monotonic())
            case Evaluated():
                self._scores, self._evaluated = self._means(event.summary), event.round
            case RunFinished():
                self.status, self._ended = event.status, time.monotonic()

    @property
    def seconds(self) -> float:
        """From the run's start to its end, or until now."""
        if self._began is None:
            return 0.0
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    @property
    def clock(self) -> str:
        """``"0:12 left"`` at the pace of the last rounds; ``"0:34"`` once the run has ended."""
        if self._ended is not None:
            return minutes(self.seconds)
        if len(self._ends) < 2:
            return ""
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{minutes(pace * (self.rounds - self.round))} left"

    @property
    def scores(self) -> str:
        """The primary metric of personal and of global models on the clients' own test data: ``"94.1 / 90.2"``."""
        if not self._scores:
            return ""
        known = [self._scores.get(model) for model in ("personal", "global")]
        return " / ".join("–" if one is None else self.unit.text(one) for one in known)

    @property
    def age(self) -> str:
        """``" (round 2)"`` if `scores` are of that round and others have finished since."""
        return f" (round {self._evaluated})" if self._scores and self._evaluated < self.round else ""

    @property
    def sentence(self) -> str:
        """The scores with the metric's name and unit: ``"personal / global 94.1 / 90.2 %"``."""
        name = "" if self.unit.sign else f"{self.unit.heading} "
        return f"{name}personal / global {self.scores}{self.unit.sign}{self.age}" if self._scores else ""

    @property
    def traffic(self) -> str:
        """MB sent up and down so far: ``"3.1 / 3.1"``."""
        return f"{self.bytes_up / 1e6:.1f} / {self.bytes_down / 1e6:.1f}" if self.round > self.first_round else ""

    @property
    def overview(self) -> str:
        """Clients, parameters, executor and actors, in one line."""
        known = self._metadata
        why = f" ({known['why']})" if known.get("why") else ""
        layout = ", channels last" if known.get("channels_last") else ""
        parts = [
            f"{known['num_clients']:,} clients" if "num_clients" in known else "",
            f"{known['parameters']:,} parameters" if "parameters" in known else "",
            known.get("weights", ""),
            f"{known['executor']}{layout} in groups of {known['group_size']}{why}" if "group_size" in known else "",
            f"{known['actors']} actors" if known.get("actors", 1) > 1 else "",
        ]
        return " · ".join(part for part in parts if part)

    def _means(self, summary: list[dict[str, Any]]) -> dict[str, float]:
        """By model, in the metric's unit; none where there was no model to evaluate."""
        protocols = [row["protocol"] for row in summary]
        shown = "local" if "local" in protocols else next(iter(protocols), "")
        name = self.unit.metric.name
        rows = [row for row in summary if row["protocol"] == shown and name in row]
        return {row["model"]: self.unit.factor * row[name] for row in rows}


def lines_for(experiments: Sequence[Experiment]) -> list[RunLine]:
    """A line for each run of a comparison, in order, with its seed where a method has several."""
    names = labels(experiments)
    methods = list(dict.fromkeys(names))
    seeded = len(methods) < len(names)
    return [
        RunLine(f"{name} · seed {one.seed}" if seeded else name, one.rounds, colour(methods.index(name)))
        for one, name in zip(experiments, names, strict=True)
    ]


def server_work(event: ServerAtWork) -> str:
    """``"round 3: distilling 120/500"``."""
    of = "" if event.total is None else f"/{event.total}"
    return f"round {event.round}: {event.text} {event.done}{of}"


def minutes(seconds: float) -> str:
    """``"0:34"``, ``"1:02:03"``."""
    whole, rest = divmod(round(seconds), 60)
    hours, whole = divmod(whole, 60)
    return f"{hours}:{whole:02}:{rest:02}" if hours else f"{whole}:{rest:02}"
