"""Differences between methods, paired by seed and client: their intervals, and how often which method is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.data.datasets.population import is_described
from raypfl.data.partitions.natural import ByColumn, FromFile
from raypfl.results.labels import labels
from raypfl.results.numbers import client_scores
from raypfl.results.pairing import bootstrap
from raypfl.results.run_groups import RunGroup, group_runs, methods_without_result, run_labels
from raypfl.results.table import tests_of
from raypfl.results.units import Unit, number_text
from raypfl.runs.result import RunResult
from raypfl.runs.several.sweeps import searched_settings


@dataclass(frozen=True)
class Difference:
    """The primary metric of a method minus that of a baseline, of the models that clients use, in the metric's unit.

    Attributes
    ----------
    method, baseline : the labels.
    best : whether the models are from the round that validation data chose, instead of the last one.
    unit : the unit of the metric.
    by_seed : the mean over clients for each seed that both have on the same data; empty: nothing is paired.
    low, high : the middle 95% of the bootstrap's draws; None where there is nothing to resample.
    draws_ahead : the share of draws in which the method is better than the baseline; None likewise.
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
        """The mean over the seeds; None: nothing is paired."""
        return fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def seeds_ahead(self) -> int:
        """The number of seeds in which the method is better than the baseline."""
        return int(_is_ahead(self.unit, np.array([*self.by_seed.values()])).sum())

    def text(self, value: float) -> str:
        """Return a difference as it is printed, with its sign: ``"+2.4"``."""
        digits = self.unit.digits([self.mean or 0.0, self.low or 0.0, self.high or 0.0])
        return number_text(value, digits, "+")

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Difference, interval, seeds ahead and draws ahead as they are printed; ``"–"`` where there is none."""
        if self.mean is None:
            return ("–",) * 4

        seeds_ahead = f"{self.seeds_ahead} of {len(self.by_seed)}"
        if self.low is None or self.high is None or self.draws_ahead is None:
            return self.text(self.mean), "–", seeds_ahead, "–"

        interval = f"{self.text(self.low)} to {self.text(self.high)}"
        return self.text(self.mean), interval, seeds_ahead, share_text(self.draws_ahead)

    def as_dict(self) -> dict[str, Any]:
        """Return everything for programs; None where there is none."""
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


def share_text(share: float) -> str:
    """Return a share in %, with so many digits that only none is 0% and only all are 100%: ``"12%"``, ``"0.1%"``."""
    digits = 0
    while digits < 3 and share not in (0, 1) and round(share, digits + 2) in (0, 1):
        digits += 1
    return f"{share:.{digits}%}"


HEADINGS = ("difference", "95%\ninterval", "seeds\nahead", "draws\nahead")
"""Headings of the `cells` of a difference, with line breaks for narrow tables."""


def find_label(labels: Sequence[str], baseline: str, methods: str = "the methods") -> str:
    """Return the label of a baseline: a label itself, or a method's name if only one label begins with it.

    `methods` : what the labels are of, for a message.

    Raises
    ------
    ConfigError : if there is none or several, or nothing to compare with.
    """
    distinct = list(dict.fromkeys(labels))
    matches = [label for label in distinct if _names(baseline, label)]
    if not matches:
        remedy = did_you_mean(baseline, distinct) if len(distinct) > 1 else f"there is only {distinct[0]}."
        raise ConfigError(f"The baseline {baseline!r} is not one of {methods}; {remedy}")
    if len(distinct) < 2:
        raise ConfigError(
            f"The baseline {baseline!r} needs another method to compare with; there is only {distinct[0]}."
        )
    if baseline in matches:
        return baseline
    if len(matches) > 1:
        candidates = "; ".join(matches)
        raise ConfigError(f"The baseline {baseline!r} could be any of: {candidates}. Give one of these in full.")
    return matches[0]


def find_baseline(results: Sequence[RunResult], baseline: str) -> str:
    """Return the label of a baseline among the methods that have a result; raises as `find_label` does."""
    complete = labels([result.experiment for result in results], searched_settings(results))
    baseline = dict(zip(complete, run_labels(results), strict=True)).get(baseline, baseline)
    try:
        return find_label([group.label for group in group_runs(results)], baseline, "the methods with a result")
    except ConfigError:
        for label, end in methods_without_result(results).items():
            if _names(baseline, label):
                raise ConfigError(f"The baseline {baseline!r} has no result: it {end}. Name another one.") from None
        raise


def _names(baseline: str, label: str) -> bool:
    """Return whether a baseline means a method by its label or name, or as ``module:Name``."""
    return bool({baseline, baseline.rpartition(":")[2]} & {label, label.split()[0]})


def differences(groups: Sequence[RunGroup], baseline: str | None = None) -> list[Difference]:
    """Compare every method with the baseline or, without one, with the best, protocol by protocol.

    Raises
    ------
    ConfigError : if the baseline is none of the methods.
    """
    label = ""
    if baseline:
        label = find_label([group.label for group in groups], baseline)

    rows = []
    for protocol, best in tests_of(groups):
        tested = []
        for group in groups:
            if group.was_tested(protocol, best) and group.scores(protocol, best=best):
                tested.append(group)

        if label:
            reference = next((group for group in tested if group.label == label), None)
        else:
            reference = best_group(tested, protocol, best)
        if reference is None:
            continue
        rows += [difference(group, reference, protocol, best) for group in tested if group is not reference]
    return rows


def best_group(tested: Sequence[RunGroup], protocol: str, best: bool) -> RunGroup | None:
    """Return the first of the groups with the best mean; None if there is no other to compare it with."""
    if len(tested) < 2:
        return None

    return min(tested, key=lambda group: group.unit.order(fmean(group.scores(protocol, best=best))))


def difference(group: RunGroup, reference: RunGroup, protocol: str, best: bool = False) -> Difference:
    """Compare a group with another on one protocol.

    Parameters
    ----------
    best : whether to take the round that validation data chose.
    """
    references = {result.experiment.seed: result for result in reference.results}
    models = group.deployed(protocol), reference.deployed(protocol)

    differences_by_seed: dict[int, np.ndarray] = {}
    shared_clients: list[list[int]] = []
    # The draws depend on the order of the seeds, which must not be the order in which runs are named.
    for result in sorted(group.results, key=lambda result: result.experiment.seed):
        seed = result.experiment.seed
        if seed not in references or not _is_comparable(result, references[seed]):
            continue
        clients, values = _client_by_client(result, references[seed], protocol, models, best)
        if clients:
            differences_by_seed[seed] = values
            shared_clients.append(clients)

    means = {seed: float(values.mean()) for seed, values in differences_by_seed.items()}
    row = Difference(group.label, reference.label, protocol, best, group.unit, means)
    same_clients = keeps_clients(group.results[0]) and all(clients == shared_clients[0] for clients in shared_clients)
    return _with_interval(row, list(differences_by_seed.values()), same_clients)


def _with_interval(row: Difference, clients: Sequence[np.ndarray], same_clients: bool) -> Difference:
    over_clients = any(len(values) > 1 for values in clients)
    if len(clients) < 2 and not over_clients:
        return row

    draws = bootstrap.draws(clients, same_clients)
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    draws_ahead = float(_is_ahead(row.unit, draws).mean())
    return replace(row, low=low, high=high, draws_ahead=draws_ahead, over_clients=over_clients)


def _client_by_client(
    result: RunResult, other: RunResult, protocol: str, models: tuple[str, str], best: bool
) -> tuple[list[int], np.ndarray]:
    """Return the clients that both runs have, and their differences.

    One model on one test set counts for every client of the other run.
    """
    scores = client_scores(result, protocol, models[0], best)
    other_scores = client_scores(other, protocol, models[1], best)

    if scores.values.size and other_scores.values.size and (scores.is_of_one_test or other_scores.is_of_one_test):
        longer = max(scores.clients, other_scores.clients, key=len)
        return longer.tolist(), scores.values - other_scores.values

    shared, i, j = np.intersect1d(scores.clients, other_scores.clients, return_indices=True)
    return shared.tolist(), scores.values[i] - other_scores.values[j]


def _is_ahead(unit: Unit, differences: np.ndarray) -> np.ndarray:
    if unit.metric.higher_is_better:
        return differences > 0
    return differences < 0


def _is_comparable(result: RunResult, other: RunResult) -> bool:
    """Return whether two runs have the same data and, if one was stopped before its end, equally many rounds."""
    are_finished = result.status == other.status == "finished"
    return data_hash(result) == data_hash(other) and (are_finished or result.last_rounds == other.last_rounds)


def data_hash(result: RunResult) -> str | None:
    """Return the hash of the samples and of who holds them."""
    return result.metadata.get("data")


def keeps_clients(result: RunResult) -> bool:
    """Return whether clients are the same in every seed: they come with the data and are not drawn."""
    partition = result.experiment.partition
    # With a number of clients of its own, by_column merges or divides groups at random.
    are_given = isinstance(partition, FromFile) or (isinstance(partition, ByColumn) and not partition.clients)
    return is_described(result.experiment.data) or are_given
