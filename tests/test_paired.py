"""Paired differences between methods: their intervals, what is said of them, and where they are shown."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow as pa
import pytest
import scipy.stats

from raypfl.common.errors import ConfigError
from raypfl.config import Experiment
from raypfl.display import outcome
from raypfl.report import page
from raypfl.results import bootstrap
from raypfl.results.compared import group_runs
from raypfl.results.paired import Difference, differences, named, remarks
from raypfl.tracking.entries import comparison_of
from tests.test_picture import MadeUp, comparison, made_up, printed, show, with_columns

ISSUE = {"fedavg": (91.0, 94.9, 94.3), "ditto": (93.3, 96.8, 97.4)}
"""Accuracies of three seeds, in %: 93.4±2.1 and 95.8±2.2, but +2.3, +1.9 and +3.1 seed by seed."""


def levelled(levels: dict[str, tuple[float, ...]], clients: int = 20, noise: float = 1.0) -> list[MadeUp]:
    """Runs whose mean accuracies are these, in %; a client is as much easier than another for every method."""
    runs = []
    for method, means in levels.items():
        for seed, mean in enumerate(means):
            draws = np.random.default_rng(seed)
            harder, own = 10 * draws.normal(size=clients), noise * draws.normal(size=clients)
            own = own if method != "fedavg" else 0 * own
            accuracy = mean + harder - harder.mean() + own - own.mean()
            run = made_up(method, ("global",), seed=seed, clients=clients, rounds=(10,))
            values = np.tile(accuracy / 100, run.evaluations.num_rows // clients)
            table = run.evaluations.set_column(5, "accuracy", pa.array(values))
            runs.append(replace(run, evaluations=table, metadata={"data": f"partition of seed {seed}"}))
    return runs


def local(rows: list[Difference]) -> Difference:
    (row,) = [row for row in rows if row.protocol == "local"]
    return row


def drawn_by_loops(values: list[np.ndarray], same: bool, count: int) -> np.ndarray:
    """The bootstrap as textbooks describe it, draw by draw."""
    draws, means = np.random.default_rng(5), []
    for _ in range(count):
        clients = draws.integers(len(values[0]), size=len(values[0]))
        seeds = [values[draws.integers(len(values))] for _ in values]
        own = [clients if same else draws.integers(len(seed), size=len(seed)) for seed in seeds]
        means.append(fmean(float(seed[some].mean()) for seed, some in zip(seeds, own, strict=True)))
    return np.array(means)


@pytest.mark.parametrize("same", [False, True], ids=["other clients in every seed", "the same clients"])
@pytest.mark.parametrize("clients", [8, 300], ids=["few", "many"])
def test_the_bootstrap_over_seeds_and_clients_is_that_of_plain_loops(same: bool, clients: int):
    draws = np.random.default_rng(1)
    everywhere = draws.exponential(size=clients)  # a client's own part, skewed
    values = [seed + everywhere + draws.exponential(size=clients) for seed in (0.0, 0.4, 0.5)]
    found, expected = bootstrap.draws(values, same), drawn_by_loops(values, same, 10_000)
    shares = (0.025, 0.25, 0.5, 0.75, 0.975)
    np.testing.assert_allclose(np.quantile(found, shares), np.quantile(expected, shares), atol=0.08 * expected.std())
    np.testing.assert_array_equal(found, bootstrap.draws(values, same))


def test_with_one_seed_the_interval_is_scipys_paired_one_over_clients_and_that_is_said():
    runs = [run for run in levelled(ISSUE) if run.experiment.seed == 0]
    row = local(differences(group_runs(runs), "fedavg"))
    theirs, ours = (run.evaluations.slice(0, 20)["accuracy"].to_numpy() for run in runs)
    statistic = lambda a, b, axis: (a - b).mean(axis)  # noqa: E731
    expected = scipy.stats.bootstrap(
        (ours, theirs), statistic, paired=True, method="percentile", random_state=0
    ).confidence_interval
    np.testing.assert_allclose((row.low, row.high), (100 * expected.low, 100 * expected.high), atol=0.05)
    text = " ".join(remarks([row], group_runs(runs)))
    assert "draws of the clients. There is only one seed" in text


def test_a_method_that_is_ahead_in_every_seed_is_shown_ahead_although_deviations_overlap():
    compared = group_runs(levelled(ISSUE))
    row = local(differences(compared, "fedavg"))
    assert {seed: round(value, 6) for seed, value in row.by_seed.items()} == {0: 2.3, 1: 1.9, 2: 3.1}
    assert row.seeds_ahead == 3 and row.draws_ahead > 0.999 and 1.5 < row.low < row.mean < row.high < 3.5
    best = local(differences(compared))
    assert (best.method, best.baseline, best.seeds_ahead, best.draws_ahead) == ("fedavg", "ditto", 0, 0.0)
    np.testing.assert_allclose((best.mean, best.low, best.high), (-row.mean, -row.high, -row.low))
    (text,) = [line for line in remarks([row], compared) if "Wilcoxon" in line]
    assert "p = 0.25" in text and "3 seeds" in text and "6 seeds" in text


def test_lower_is_ahead_where_lower_is_better():
    runs = levelled(ISSUE)
    errors = [replace(run, experiment=run.experiment.override(["objective=regression"])) for run in runs]
    row = local(differences(group_runs(with_columns(errors, mse=0.0)), "fedavg"))
    assert (row.mean, row.seeds_ahead, row.draws_ahead) == (0, 0, 0)
    worse = [*with_columns(errors[:3], mse=2.0), *with_columns(errors[3:], mse=1.0)]
    row = local(differences(group_runs(worse), "fedavg"))
    assert (row.mean, row.seeds_ahead, row.draws_ahead) == (-1, 3, 1)


def test_only_seeds_on_the_same_data_are_paired_and_the_others_are_named():
    runs = levelled(ISSUE)
    fedavg, ditto = runs[:3], runs[3:]
    row = local(differences(group_runs([*fedavg[:2], *ditto]), "fedavg"))
    assert list(row.by_seed) == [0, 1]
    assert "ditto against fedavg: only over what both have, seeds 0, 1." in remarks(
        [row], group_runs([*fedavg[:2], *ditto])
    )
    elsewhere = [replace(run, metadata={"data": "another partition"}) for run in ditto]
    for others in (elsewhere, [replace(run, experiment=run.experiment.replace(seed=7)) for run in ditto[:1]]):
        compared = group_runs([*fedavg, *others])
        row = local(differences(compared, "fedavg"))
        assert not row.by_seed and (row.low, row.high, row.draws_ahead) == (None, None, None)
        assert "ditto and fedavg have no seed with the same data in common, so they are not paired." in remarks(
            [row], compared
        )
