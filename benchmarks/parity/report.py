"""A verdict for each method, and tables, from the results of runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.parity.jobs import JOBS, Job

BEGIN, END = "<!-- parity -->", "<!-- /parity -->"
YES = {True: "yes", False: "no"}
RAYPFL, READING, FLUKE = "raypfl", "reading", "fluke"


@dataclass(frozen=True)
class Comparison:
    """Accuracies of two systems, a value for each seed, in the same order of seeds.

    The first weights, the cohorts and the samples of a seed are the same in both; the mini-batches are not.
    """

    ours: Sequence[float]
    theirs: Sequence[float]

    @property
    def difference(self) -> float:
        """The difference of the means, ours less theirs."""
        return statistics.mean(self.ours) - statistics.mean(self.theirs)

    @property
    def bound(self) -> float:
        """Twice the standard error of `difference`, ``2 sqrt(s1^2 / n + s2^2 / n)``, the systems taken as unrelated."""
        return 2 * math.sqrt(sum(statistics.variance(of) / len(of) for of in (self.ours, self.theirs)))

    @property
    def is_within(self) -> bool:
        """Whether the systems agree: ``|difference| <= bound``."""
        return abs(self.difference) <= self.bound

    @property
    def paired(self) -> float:
        """Standard error of `difference`, seed by seed: what the seeds have in common cancels out."""
        differences = [a - b for a, b in zip(self.ours, self.theirs, strict=True)]
        return statistics.stdev(differences) / math.sqrt(len(differences))


def compared(runs: Sequence[Mapping[str, Any]], job: Job, model: str, ours: str, theirs: str) -> Comparison:
    """The mean accuracies over clients of the seeds that both systems have run."""
    our_runs = _by_seed(runs, job, model, ours)
    their_runs = _by_seed(runs, job, model, theirs)
    seeds = sorted(our_runs.keys() & their_runs.keys())
    return Comparison([_accuracy(our_runs[seed]) for seed in seeds], [_accuracy(their_runs[seed]) for seed in seeds])


def farthest(runs: Sequence[Mapping[str, Any]], job: Job, model: str, ours: str) -> tuple[float, float]:
    """The largest difference of a client's accuracy and of its test loss to fluke's from the same mini-batches."""
    our_runs = _by_seed(runs, job, model, ours, same=True)
    flukes_runs = _by_seed(runs, job, model, FLUKE, same=True)
    seeds = our_runs.keys() & flukes_runs.keys()

    def largest_difference(name: str) -> float:
        differences = []
        for seed in seeds:
            pairs = zip(our_runs[seed][name], flukes_runs[seed][name], strict=True)
            differences += [abs(our_value - their_value) for our_value, their_value in pairs]
        return max(differences)

    return largest_difference("accuracies"), largest_difference("losses")


def page(results: Mapping[str, Any]) -> str:
    """The Markdown between the marks in the documentation."""
    runs = results["runs"]
    return "\n\n".join([_about(results), _verdicts(runs), _same(runs)]) + "\n"


def _about(results: Mapping[str, Any]) -> str:
    seeds = len({run["seed"] for run in results["runs"] if run["same"] is False})
    same = len({run["seed"] for run in results["runs"] if run["same"] is True})
    versions = results["versions"]
    return (
        f"raypfl {versions['raypfl']['raypfl']} and fluke {versions['fluke']['fluke-fl']}, "
        f"torch {versions['raypfl']['torch']} and {versions['fluke']['torch']}; "
        f"{seeds} seeds in the first table, {same} in the second."
    )


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Job, str]]:
    measured = {(run["method"], run["model"]) for run in runs}
    for job in JOBS.values():
        for model in job.models:
            if (job.method, model) in measured:
                yield job, model


def _verdicts(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| method | model | raypfl | fluke | difference | bound | within | seed by seed | the reading, within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for job, model in _rows(runs):
        comparison = compared(runs, job, model, RAYPFL, FLUKE)
        reading = compared(runs, job, model, READING, FLUKE) if job.reading else None
        cells = [
            job.title,
            model,
            _spread(comparison.ours),
            _spread(comparison.theirs),
            _signed(comparison.difference),
            f"{100 * comparison.bound:.2f}",
            YES[comparison.is_within],
            f"{_signed(comparison.difference)} ± {100 * comparison.paired:.2f}",
            f"{_spread(reading.ours)}, {YES[reading.is_within]}" if reading else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _same(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| method | model | raypfl: accuracy, loss | the reading: accuracy, loss |",
        "|---|---|---|---|",
    ]
    for job, model in _rows(runs):
        systems = (RAYPFL, READING) if job.reading else (RAYPFL,)
        cells = []
        for system in systems:
            accuracy, loss = farthest(runs, job, model, system)
            cells.append(f"{100 * accuracy:.1f}, {_small(loss)}")
        cells += [""] * (2 - len(systems))
        lines.append("| " + " | ".join([job.title, model, *cells]) + " |")
    return "\n".join(lines)


def _by_seed(
    runs: Sequence[Mapping[str, Any]], job: Job, model: str, system: str, same: bool = False
) -> dict[int, Mapping[str, Any]]:
    key = {"method": job.method, "model": model, "system": system, "same": same}
    return {run["seed"]: run for run in runs if run | key == run}


def _accuracy(run: Mapping[str, Any]) -> float:
    return statistics.mean(run["accuracies"])


def _spread(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def _signed(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def _small(value: float) -> str:
    return "below 1e-9" if value < 1e-9 else f"{value:.1g}"
