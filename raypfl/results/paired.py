"""Differences between methods, taken seed by seed and client by client: their intervals, and who is ahead how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.data.datasets.population import is_described
from raypfl.data.partitions.natural import ByColumn, FromFile
from raypfl.results import bootstrap
from raypfl.results.compared import RunGroup
from raypfl.results.numbers import client_scores
from raypfl.results.table import tests_of
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

_ENOUGH_SEEDS = 6
"""From which a two-sided Wilcoxon test can give a p below .05: it is at least 2 / 2^n over n seeds."""


@dataclass(frozen=True)
class Difference:
    """The primary metric of a method minus that of a baseline, of the models that clients use, in the metric's unit.

    Attributes
    ----------
    method, baseline : labels. best : whether in the round that validation data chose, instead of the last one.
    unit : of the metric.
    by_seed : the mean over clients, by the seeds that both have on the same data; empty: nothing is paired.
    low, high : the middle 95% of the bootstrap's draws. draws_ahead : the share of draws in which the method is
        better than the baseline. All are None where there is nothing to resample.
    over_clients : whether clients are resampled; not if each method has one model on one test set.
    """

    method: str
    baseline: str
    protocol: str
    best: bool
    unit: Unit
    by_seed: dict[int, float]
    low: float | None = None
    high: float | None = None
    draws_ahead: float | None = None
    over_clients: bool = False

    @property
    def mean(self) -> float | None:
        """Over the seeds; None: nothing is paired."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def seeds_ahead(self) -> int:
        """In how many seeds the method is better than the baseline."""
        return int(_is_ahead(self.unit, np.array([*self.by_seed.values()])).sum())

    def text(self, value: float) -> str:
        """A difference as it is printed, with its sign: ``"+2.4"``."""
        digits = self.unit.digits([self.mean or 0.0, self.low or 0.0, self.high or 0.0])
        return f"{round(value, digits) + 0.0:+,.{digits}f}"  # never -0.0

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Difference, interval, seeds ahead and draws ahead as they are printed, ``"–"`` for what there is not."""
        if self.mean is None:
            return ("–",) * 4
        ahead = f"{self.seeds_ahead} of {len(self.by_seed)}"
        if self.low is None or self.high is None or self.draws_ahead is None:
            return self.text(self.mean), "–", ahead, "–"
        return (
            self.text(self.mean),
            f"{self.text(self.low)} to {self.text(self.high)}",
            ahead,
            f"{self.draws_ahead:.0%}",
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for programs; None for what there is not."""
        return {
            "method": self.method,
            "against": self.baseline,
            "protocol": self.protocol,
            "round": "best" if self.best else "last",
            "metric": self.unit.label,
            "difference": self.mean,
            "low": self.low,
            "high": self.high,
            "seeds_paired": len(self.by_seed),
            "seeds_ahead": self.seeds_ahead,
            "draws_ahead": self.draws_ahead,
            "by_seed": self.by_seed,
        }


HEADINGS = ("difference", "95%\ninterval", "seeds\nahead", "draws\nahead")
"""Of the `cells` of a difference, with line breaks for narrow tables."""


def named(labels: Sequence[str], baseline: str) -> str:
    """The label that a person means by a label, or by a method's name if only one label begins with it.

    Raises
    ------
    ConfigError : if there is none or several, or nothing to compare with.
    """
    known = list(dict.fromkeys(labels))
    if len(known) < 2:
        raise ConfigError(f"The baseline {baseline!r} needs another method to compare with; there is only {known[0]}.")
    meant = [label for label in known if baseline in (label, label.split()[0])]
    if not meant:
        raise ConfigError(f"The baseline {baseline!r} is none of the methods; {did_you_mean(baseline, known)}")
    if len(meant) > 1 and baseline not in meant:
        raise ConfigError(f"The baseline {baseline!r} could be any of: {'; '.join(meant)}. Give one of these in full.")
    return baseline if baseline in meant else meant[0]


def differences(compared: Sequence[RunGroup], baseline: str | None = None) -> list[Difference]:
    """Every method against the baseline or, without one, against the best, protocol by protocol.

    Raises
    ------
    ConfigError : if the baseline is none of the methods.
    """
    label = named([group.label for group in compared], baseline) if baseline else ""
    rows = []
    for protocol, best in tests_of(compared):
        tested = [group for group in compared if (group.has_best or not best) and group.scores(protocol, best=best)]
        references = [group for group in tested if group.label == label] if label else _best(tested, protocol, best)
        rows += [
            difference(group, reference, protocol, best)
            for reference in references
            for group in tested
            if group is not reference
        ]
    return rows


def remarks(rows: Sequence[Difference], compared: Sequence[RunGroup]) -> list[str]:
    """What stands below a table of differences, in sentences; `compared` are the groups that it is of."""
    if not rows:
        return []
    unit = rows[0].unit
    lines = [
        f"Paired differences{' in points' if unit.sign else ''}, seed by seed and client by client, of the models that "
        f"clients use.{'' if unit.metric.higher_is_better else ' A method is ahead if it is lower.'}",
        *_resampling(rows),
    ]
    seeds = max(len(row.by_seed) for row in rows)
    if 1 < seeds < _ENOUGH_SEEDS:
        lines.append(
            f"{seeds} seeds cannot show much: a two-sided Wilcoxon test over them gives p = {2 / 2**seeds:.2g} at "
            f"best, and p below 0.05 takes {_ENOUGH_SEEDS} seeds or more."
        )
    seeds_of = {group.label: [result.experiment.seed for result in group.results] for group in compared}
    unpaired = {_missing(row, seeds_of[row.method], seeds_of[row.baseline]): None for row in rows}
    return [*lines, *filter(None, unpaired)]


def _resampling(rows: Sequence[Difference]) -> list[str]:
    """How intervals and draws come about."""
    resampled = [row for row in rows if row.draws_ahead is not None]
    if not resampled:
        return []
    several = any(len(row.by_seed) > 1 for row in resampled)
    clients = any(row.over_clients for row in resampled)
    what = " and ".join(name for name, is_drawn in (("the seeds", several), ("the clients", clients)) if is_drawn)
    lines = [f"The 95% interval is that of {bootstrap.DRAWS:,} bootstrap draws of {what}."]
    if not several:
        lines.append("There is only one seed: it does not say what others would give.")
    return lines


def _missing(row: Difference, method_seeds: Sequence[int], baseline_seeds: Sequence[int]) -> str:
    """What is not paired, as a sentence; empty: all seeds are."""
    if not row.by_seed:
        return f"{row.method} and {row.baseline} have no seed with the same data in common, so they are not paired."
    if set(row.by_seed) == {*method_seeds} == {*baseline_seeds}:
        return ""
    seeds = ", ".join(map(str, row.by_seed))
    return f"{row.method} against {row.baseline}: only over what both have, seed{'s' * (len(row.by_seed) > 1)} {seeds}."


def _best(tested: Sequence[RunGroup], protocol: str, best: bool) -> list[RunGroup]:
    """The first of the groups with the best mean; none if there is no other to compare it with."""
    if len(tested) < 2:
        return []
    choose = max if tested[0].unit.metric.higher_is_better else min
    return [choose(tested, key=lambda group: fmean(group.scores(protocol, best=best)))]


def difference(group: RunGroup, reference: RunGroup, protocol: str, best: bool = False) -> Difference:
    """A group against another on one protocol; `best` : in the round that validation data chose."""
    theirs = {result.experiment.seed: result for result in reference.results}
    models = group.deployed(protocol), reference.deployed(protocol)
    clients: dict[int, np.ndarray] = {}
    shared: list[list[int]] = []
    for result in group.results:
        seed = result.experiment.seed
        if seed in theirs and _data(theirs[seed]) == _data(result):
            ids, values = _client_by_client(result, theirs[seed], protocol, models, best)
            if ids:
                clients[seed] = values
                shared.append(ids)
    by_seed = {seed: float(values.mean()) for seed, values in clients.items()}
    paired = Difference(group.label, reference.label, protocol, best, group.unit, by_seed)
    return _with_interval(paired, list(clients.values()), _keeps_clients(group.results[0]) and _all_equal(shared))


def _with_interval(row: Difference, clients: Sequence[np.ndarray], same_clients: bool) -> Difference:
    over_clients = any(len(values) > 1 for values in clients)
    if len(clients) < 2 and not over_clients:
        return row
    drawn = bootstrap.draws(clients, same_clients)
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    ahead = float(_is_ahead(row.unit, drawn).mean())
    return replace(row, low=low, high=high, draws_ahead=ahead, over_clients=over_clients)


def _client_by_client(
    result: RunResult, other: RunResult, protocol: str, models: tuple[str, str], best: bool
) -> tuple[list[int], np.ndarray]:
    """Clients that both have, and their differences; one model on one test set counts for every client of the other."""
    ids, values = client_scores(result, protocol, models[0], best)
    other_ids, other_values = client_scores(other, protocol, models[1], best)
    if ids.size and other_ids.size and _TESTED_ONCE in (ids.tolist(), other_ids.tolist()):
        longer = max(ids, other_ids, key=len)
        return longer.tolist(), values - other_values
    both, at, other_at = np.intersect1d(ids, other_ids, return_indices=True)
    return both.tolist(), values[at] - other_values[other_at]


_TESTED_ONCE = [-1]
"""The clients of one model on one test set."""


def _is_ahead(unit: Unit, differences: np.ndarray) -> np.ndarray:
    return differences > 0 if unit.metric.higher_is_better else differences < 0


def _data(result: RunResult) -> str | None:
    """A hash of the samples and of who holds them."""
    return result.metadata.get("data")


def _keeps_clients(result: RunResult) -> bool:
    """Whether clients are the same in every seed: given with the data, not drawn."""
    return is_described(result.experiment.data) or isinstance(result.experiment.partition, ByColumn | FromFile)


def _all_equal(lists: Sequence[list[int]]) -> bool:
    return all(some == lists[0] for some in lists)
