"""From runs to a verdict for each method, and to tables."""

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
        """Of the means, ours less theirs."""
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
    mine, yours = (_by_seed(runs, job, model, system) for system in (ours, theirs))
    seeds = sorted(mine.keys() & yours.keys())
    return Comparison([_accuracy(mine[s]) for s in seeds], [_accuracy(yours[s]) for s in seeds])


def farthest(runs: Sequence[Mapping[str, Any]], job: Job, model: str, ours: str) -> tuple[float, float]:
    """The largest difference of a client's accuracy and of its test loss to fluke's from the same mini-batches."""
    mine, yours = (_by_seed(runs, job, model, system, same=True) for system in (ours, FLUKE))
    pairs = [(mine[seed], yours[seed]) for seed in mine.keys() & yours.keys()]
    accuracy, loss = (
        max(abs(x - y) for a, b in pairs for x, y in zip(a[name], b[name], strict=True))
        for name in ("accuracies", "losses")
    )
    return accuracy, loss


def page(results: Mapping[str, Any]) -> str:
    """What stands between the marks in the documentation, in Markdown."""
    runs = results["runs"]
    return "\n\n".join([_about(results), _verdicts(runs), _same(runs)]) + "\n"


def _about(results: Mapping[str, Any]) -> str:
    seeds, same = (len({run["seed"] for run in results["runs"] if run["same"] is same}) for same in (False, True))
    versions = results["versions"]
    return (
        f"raypfl {versions['raypfl']['raypfl']} and fluke {versions['fluke']['fluke-fl']}, "
        f"torch {versions['raypfl']['torch']} and {versions['fluke']['torch']}; "
        f"{seeds} seeds in the first table, {same} in the second."
    )


def _rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Job, str]]:
    there = {(run["method"], run["model"]) for run in runs}
    return ((job, model) for job in JOBS.values() for model in job.models if (job.method, model) in there)


def _verdicts(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| method | model | raypfl | fluke | difference | bound | within | seed by seed | the reading, within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for job, model in _rows(runs):
        found = compared(runs, job, model, RAYPFL, FLUKE)
        read = compared(runs, job, model, READING, FLUKE) if job.reading else None
        cells = [
            job.title,
            model,
            _spread(found.ours),
            _spread(found.theirs),
            _signed(found.difference),
            f"{100 * found.bound:.2f}",
            YES[found.is_within],
            f"{_signed(found.difference)} ± {100 * found.paired:.2f}",
            f"{_spread(read.ours)}, {YES[read.is_within]}" if read else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _same(runs: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| method | model | raypfl: accuracy, loss | the reading: accuracy, loss |",
        "|---|---|---|---|",
    ]
    for job, model in _rows(runs):
        sides = [farthest(runs, job, model, ours) for ours in (RAYPFL, READING)[: 2 if job.reading else 1]]
        cells = [f"{100 * accuracy:.1f}, {_small(loss)}" for accuracy, loss in sides] + [""] * (2 - len(sides))
        lines.append("| " + " | ".join([job.title, model, *cells]) + " |")
    return "\n".join(lines)


def _by_seed(
    runs: Sequence[Mapping[str, Any]], job: Job, model: str, system: str, same: bool = False
) -> dict[int, Mapping[str, Any]]:
    wanted = {"method": job.method, "model": model, "system": system, "same": same}
    return {run["seed"]: run for run in runs if run | wanted == run}


def _accuracy(run: Mapping[str, Any]) -> float:
    return statistics.mean(run["accuracies"])


def _spread(values: Sequence[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}"


def _signed(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}"  # + 0.0: no "-0.00"


def _small(value: float) -> str:
    return "below 1e-9" if value < 1e-9 else f"{value:.1g}"
