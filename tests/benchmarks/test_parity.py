"""raypfl's methods beside fluke's: what decides whether they agree."""

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
from raypfl.data import load_federated


def a_run(seed: int, system: str, accuracy: float, loss: float = 1.0, **about: Any) -> dict[str, Any]:
    of = {"method": "apfl", "model": "personal", "same": False, "seed": seed, "system": system} | about
    return of | {"accuracies": [accuracy, accuracy], "losses": [loss, 1.0]}


def test_systems_agree_if_their_means_are_within_two_standard_errors_of_the_difference():
    apart = Comparison([0.8, 0.9], [0.6, 0.7])
    assert apart.difference == pytest.approx(0.2) and apart.bound == pytest.approx(2 * math.sqrt(0.005 / 2 * 2))
    assert not apart.is_within
    assert Comparison([0.8, 0.9], [0.72, 0.82]).is_within and Comparison([0.72, 0.82], [0.8, 0.9]).is_within
    assert Comparison([0.5, 0.7, 0.9], [0.4, 0.6, 0.8]).paired == pytest.approx(0)  # what all seeds share cancels out
    assert Comparison([0.5, 0.7], [0.4, 0.8]).paired == pytest.approx(0.1)


def test_only_seeds_that_both_systems_have_run_are_compared_and_in_one_order():
    some = [a_run(2, RAYPFL, 0.2), a_run(1, RAYPFL, 0.1)]
    some += [a_run(seed, FLUKE, accuracy) for seed, accuracy in ((1, 0.5), (2, 0.6), (3, 1.0))]
    found = compared(some, JOBS["apfl"], "personal", RAYPFL, FLUKE)
    assert (found.ours, found.theirs) == ([0.1, 0.2], [0.5, 0.6])


def test_a_row_says_whether_a_method_agrees_and_whether_its_reading_does():
    versions = {system: {"raypfl": "1", "fluke-fl": "2", "torch": "3"} for system in ("raypfl", "fluke")}
    accuracies = {RAYPFL: [0.8, 0.9], READING: [0.4, 0.5], FLUKE: [0.4, 0.5]}
    measured = [
        a_run(seed, system, value, same=same)
        for (system, values), same in product(accuracies.items(), (False, True))
        for seed, value in enumerate(values)
    ]
    text = page({"versions": versions, "runs": measured})
    row = "| APFL | personal | 85.00 ± 7.07 | 45.00 ± 7.07 | +40.00 | 14.14 | no | +40.00 ± 0.00 | 45.00 ± 7.07, yes |"
    assert row in text and "| APFL | personal | 40.0, below 1e-9 | 0.0, below 1e-9 |" in text
    assert "2 seeds in the first table, 2 in the second" in text and "FedProx" not in text


def test_every_run_has_the_same_samples_at_the_same_clients(tmp_path: Path):
    one, other = (
        load_federated(given.data, given.partition, seed=given.seed, cache=tmp_path)
        for given in (raypfl.Experiment(**SOURCE, seed=seed) for seed in (0, 7))
    )
    assert one.num_clients == CLIENTS and len(one.labels) == 1797
    for client, split in product(range(CLIENTS), ("train", "test")):
        assert len(one.indices(client, split))
        assert np.array_equal(one.indices(client, split), other.indices(client, split))


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.method)
def test_every_method_and_its_reading_are_experiments_of_raypfl(job):
    for method in (job.method, job.reading or job.method):
        made = experiment(job, 0, method, same=True).method
        assert {name: getattr(made, name) for name in job.options} == job.options


def test_the_first_weights_that_fluke_gets_are_those_of_the_network(tmp_path: Path):
    first_weights(JOBS["fedbn"], 0, True, tmp_path / "weights")
    weights = torch.load(tmp_path / "weights", weights_only=True)
    assert weights["1.running_var"].tolist() == [1.0] * 8 and weights["0.weight"].dtype == torch.float64


def test_the_page_is_that_of_the_results():
    shown = PAGE.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    assert shown.strip() == page(json.loads(RESULTS.read_text())).strip()
