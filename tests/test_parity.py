"""raypfl's methods beside fluke's: what decides whether they agree."""

from __future__ import annotations

import json
import math
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
from benchmarks.parity.order import judged
from benchmarks.parity.report import FLUKE, RAYPFL, READING, Comparison, compared, farthest, page
from benchmarks.parity.systems.raypfl import experiment, first_weights
from raypfl.data import load_federated


def a_run(seed: int, system: str, accuracy: float, loss: float = 1.0, **about: Any) -> dict[str, Any]:
    of = {"method": "apfl", "model": "personal", "same": False, "seed": seed, "system": system} | about
    return of | {"accuracies": [accuracy, accuracy], "losses": [loss, 1.0]}


def runs(ours: list[float], theirs: list[float], **more: Any) -> list[dict[str, Any]]:
    """Of seeds 0, 1, ..., on mini-batches of their own and on the same. The reading is fluke's equal."""
    sides = [(RAYPFL, ours), (READING, theirs), (FLUKE, theirs)]
    return [
        a_run(seed, system, value, same=same, **more)
        for same in (False, True)
        for system, values in sides
        for seed, value in enumerate(values)
    ]


def test_systems_agree_if_their_means_are_within_two_standard_errors_of_the_difference():
    apart = Comparison([0.8, 0.9], [0.6, 0.7])
    assert apart.difference == pytest.approx(0.2) and apart.bound == pytest.approx(2 * math.sqrt(0.005 / 2 * 2))
    assert not apart.is_within
    assert Comparison([0.8, 0.9], [0.72, 0.82]).is_within
    assert Comparison([0.72, 0.82], [0.8, 0.9]).is_within


def test_a_difference_that_all_seeds_share_has_no_error_seed_by_seed():
    assert Comparison([0.5, 0.7, 0.9], [0.4, 0.6, 0.8]).paired == pytest.approx(0)
    assert Comparison([0.5, 0.7], [0.4, 0.8]).paired == pytest.approx(0.1)


def test_only_seeds_that_both_systems_have_run_are_compared_and_in_one_order():
    some = [
        a_run(2, RAYPFL, 0.2),
        a_run(1, RAYPFL, 0.1),
        a_run(1, FLUKE, 0.5),
        a_run(2, FLUKE, 0.6),
        a_run(3, FLUKE, 1),
    ]
    found = compared(some, JOBS["apfl"], "personal", RAYPFL, FLUKE)
    assert (found.ours, found.theirs) == ([0.1, 0.2], [0.5, 0.6])


def test_the_farthest_client_of_all_seeds_is_told_where_mini_batches_are_the_same():
    ours = [a_run(0, RAYPFL, 0.5, same=True), a_run(1, RAYPFL, 0.5, loss=2.0, same=True)]
    theirs = [a_run(0, FLUKE, 0.75, same=True), a_run(1, FLUKE, 0.5, loss=1.5, same=True), a_run(1, FLUKE, 0.0)]
    assert farthest(ours + theirs, JOBS["apfl"], "personal", RAYPFL) == (0.25, 0.5)


def test_a_row_says_whether_a_method_agrees_and_whether_its_reading_does():
    versions = {system: {"raypfl": "1", "fluke-fl": "2", "torch": "3"} for system in ("raypfl", "fluke")}
    measured = runs([0.8, 0.9], [0.4, 0.5]) + runs([0.8, 0.9], [0.8, 0.91], method="fedavg", model="global")
    text = page({"versions": versions, "runs": measured})
    apfl = "| APFL | personal | 85.00 ± 7.07 | 45.00 ± 7.07 | +40.00 | 14.14 | no | +40.00 ± 0.00 | 45.00 ± 7.07, yes |"
    assert apfl in text
    assert "| APFL | personal | 40.0, below 1e-9 | 0.0, below 1e-9 |" in text
    assert "| FedAvg | global | 85.00 ± 7.07 | 85.50 ± 7.78 | -0.50 | 14.87 | yes |" in text
    assert "2 seeds in the first table, 2 in the second" in text and "FedProx" not in text


def test_every_run_has_the_same_samples_at_the_same_clients(tmp_path: Path):
    one, other = (
        load_federated(given.data, given.partition, seed=given.seed, cache=tmp_path)
        for given in (raypfl.Experiment(**SOURCE, seed=seed) for seed in (0, 7))
    )
    assert one.num_clients == CLIENTS and len(one.labels) == 1797
    for client in range(CLIENTS):
        for split in ("train", "test"):
            assert len(one.indices(client, split)) and np.array_equal(
                one.indices(client, split), other.indices(client, split)
            )


@pytest.mark.parametrize("job", JOBS.values(), ids=lambda job: job.method)
def test_every_method_and_its_reading_are_experiments_of_raypfl(job):
    for method in (job.method, job.reading or job.method):
        made = experiment(job, 0, method, same=True).method
        assert {name: getattr(made, name) for name in job.options} == job.options


def test_the_first_weights_that_are_handed_over_are_those_of_the_network(tmp_path: Path):
    first_weights(JOBS["fedbn"], 0, True, tmp_path / "weights")
    weights = torch.load(tmp_path / "weights", weights_only=True)
    assert weights["1.running_var"].tolist() == [1.0] * 8 and weights["0.weight"].dtype == torch.float64


def test_models_are_judged_on_their_own_clients_samples():
    def always(label: int):
        return lambda x: torch.nn.functional.one_hot(torch.full((len(x),), label), 2).float()

    tests = [(torch.zeros(4, 1), torch.tensor([0, 0, 0, 1])), (torch.zeros(2, 1), torch.tensor([1, 1]))]
    scores = judged([always(0), always(1)], tests)
    assert scores["accuracy"] == [0.75, 1.0]
    assert scores["loss"][1] == pytest.approx(math.log(1 + math.exp(-1)))


def test_the_page_is_that_of_the_results():
    text = PAGE.read_text()
    shown = text.partition(report.BEGIN)[2].partition(report.END)[0]
    assert shown.strip() == page(json.loads(RESULTS.read_text())).strip()
