"""raypfl's methods beside fluke's: how agreement is decided and reported."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from benchmarks.parity import report
from benchmarks.parity.__main__ import PAGE, RESULTS
from benchmarks.parity.data import CLIENTS, SOURCE
from benchmarks.parity.jobs import JOBS
from benchmarks.parity.report import FLUKE, RAYPFL, READING, Comparison, compared, page
from benchmarks.parity.systems.raypfl import experiment, first_weights
from raypfl.data import FederatedData, load_federated


def record(seed: int, system: str, accuracy: float, loss: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A run in the results, of two clients."""
    run = {"method": "apfl", "model": "personal", "same": False, "seed": seed, "system": system} | changes
    return run | {"accuracies": [accuracy, accuracy], "losses": [loss, 1.0]}


def test_systems_agree_if_their_means_are_within_two_standard_errors_of_the_difference():
    apart = Comparison([0.8, 0.9], [0.6, 0.7])
    assert apart.difference == pytest.approx(0.2) and apart.bound == pytest.approx(2 * math.sqrt(0.005 / 2 * 2))
    assert not apart.is_within
    assert Comparison([0.8, 0.9], [0.72, 0.82]).is_within and Comparison([0.72, 0.82], [0.8, 0.9]).is_within
    assert Comparison([0.5, 0.7, 0.9], [0.4, 0.6, 0.8]).paired == pytest.approx(0)  # what all seeds share cancels out
    assert Comparison([0.5, 0.7], [0.4, 0.8]).paired == pytest.approx(0.1)


def test_only_seeds_that_both_systems_have_run_are_compared_and_in_one_order():
    runs = [record(2, RAYPFL, 0.2), record(1, RAYPFL, 0.1)]
    runs += [record(seed, FLUKE, accuracy) for seed, accuracy in ((1, 0.5), (2, 0.6), (3, 1.0))]
    comparison = compared(runs, JOBS["apfl"], "personal", RAYPFL, FLUKE)
    assert (comparison.ours, comparison.theirs) == ([0.1, 0.2], [0.5, 0.6])


def test_a_row_says_whether_a_method_agrees_and_whether_its_reading_does():
    versions = {system: {"raypfl": "1", "fluke-fl": "2", "torch": "3"} for system in ("raypfl", "fluke")}
    accuracies = {RAYPFL: [0.8, 0.9], READING: [0.4, 0.5], FLUKE: [0.4, 0.5]}
    runs = []
    for (system, values), same in product(accuracies.items(), (False, True)):
        runs += [record(seed, system, value, same=same) for seed, value in enumerate(values)]

    text = page({"versions": versions, "runs": runs})

    row = "| APFL | personal | 85.00 ± 7.07 | 45.00 ± 7.07 | +40.00 | 14.14 | no | +40.00 ± 0.00 | 45.00 ± 7.07, yes |"
    assert row in text and "| APFL | personal | 40.0, below 1e-9 | 0.0, below 1e-9 |" in text
    assert "2 seeds in the first table, 2 in the second" in text and "FedProx" not in text


def test_every_run_has_the_same_samples_at_the_same_clients(tmp_path: Path):
    def data_of_seed(seed: int) -> FederatedData:
        described = raypfl.Experiment(**SOURCE, seed=seed)
        return load_federated(described.data, described.partition, seed=described.seed, cache=tmp_path)

    first = data_of_seed(0)
    second = data_of_seed(7)
    assert first.num_clients == CLIENTS and len(first.labels) == 1797
    for client, split in product(range(CLIENTS), ("train", "test")):
        assert len(first.indices(client, split))
        assert np.array_equal(first.indices(client, split), second.indices(client, split))


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.method)
def test_every_method_and_its_reading_are_experiments_of_raypfl(job):
    for name in (job.method, job.reading or job.method):
        method = experiment(job, 0, name, same=True).method
        assert {option: getattr(method, option) for option in job.options} == job.options


def test_the_first_weights_that_fluke_gets_are_those_of_the_network(tmp_path: Path):
    first_weights(JOBS["fedbn"], 0, True, tmp_path / "weights")
    weights = torch.load(tmp_path / "weights", weights_only=True)
    assert weights["1.running_var"].tolist() == [1.0] * 8 and weights["0.weight"].dtype == torch.float64


def test_the_page_has_the_tables_of_the_results():
    on_page = PAGE.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    assert on_page.strip() == page(json.loads(RESULTS.read_text())).strip()
