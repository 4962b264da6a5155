"""Descriptors, next to label mixes; new clients with label mixes unlike those of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError, DataError
from raypfl.trained import descriptor_picture
from raypfl.trained.descriptors import Descriptors, descriptors_of, extrapolated
from raypfl.trained.models import TrainedModels
from tests.support.runs import experiment

MIXES = np.random.default_rng(0).dirichlet([0.3] * 6, size=30)
UNSEEN = np.array([3, 8, 20])


def test_the_rank_correlation_is_that_of_distances_from_each_unseen_client():
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))
    assert Descriptors(MIXES @ turn * 7, MIXES, UNSEEN).rank_correlations == pytest.approx(np.ones(3))
    noise = np.random.default_rng(2).normal(size=(30, 4))
    assert np.abs(Descriptors(noise, MIXES, UNSEEN).rank_correlations).max() < 0.5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, raypfl.Result]:
    """Runs on 60 clients of few classes, with an embedding whose untrained descriptors say little of classes."""
    changes = {
        "rounds": 60,
        "partition": "{name: dirichlet, clients: 60, alpha: 0.3, balanced: true}",
        "data.unseen_fraction": 0.2,
        "cohort.size": 12,
        "training": "{steps: 10, batch_size: 32, lr: 0.01, momentum: 0.9}",
        "evaluation.every": 0,
        "checkpoint": "{every: 60, keep: 1}",
        "engine.group_size": "null",
        "tracking.latent": "true",
    }
    folder = tmp_path_factory.mktemp("runs")
    methods = {
        "pefll": "{name: pefll, embedding: mlp1, server_lr: 0.003, length: 8, batch: null}",
        "local": "{name: local, unseen_epochs: 20}",
    }
    done = {}
    for name, method in methods.items():
        given = [f"{key}={value}" for key, value in (changes | {"method": method}).items()]
        done[name] = raypfl.run(experiment(folder).override(given))
    return done


@pytest.fixture(scope="module")
def models(results: dict[str, raypfl.Result]) -> dict[str, TrainedModels]:
    return {name: raypfl.trained_models(one.run_dir) for name, one in results.items()}


def test_training_brings_descriptors_of_unseen_clients_in_the_order_of_their_label_mixes(models):
    pefll = models["pefll"]
    before, after = (descriptors_of(pefll, server) for server in (pefll.at_start(), None))
    assert after.values.shape == (60, 8) and len(after.unseen) == 12
    assert before.rank_correlations.mean() < after.rank_correlations.mean()
    assert after.rank_correlations.mean() > 0.5


def test_new_clients_with_more_classes_are_harder_for_training_alone_than_for_pefll(models):
    lost = {}
    for name, trained in models.items():
        found = extrapolated(trained, [0.1, 1.0], clients=10, samples=16)
        assert all(len(accuracies) == 10 for accuracies in found.values())
        lost[name] = found[0.1].mean() - found[1.0].mean()
    assert lost["local"] > max(lost["pefll"], 0.05)


def test_a_client_needs_the_model_of_its_own_descriptor(models):
    pefll = models["pefll"]
    (clients,), v = pefll.groups(60), torch.from_numpy(descriptors_of(pefll).values).float()

    def made(v: torch.Tensor) -> torch.Tensor:
        return clients.networks["hyper"](pefll.server["hyper"], v).detach()

    def accuracy(v: torch.Tensor) -> float:
        return float(clients.evaluate(raypfl.per_client(made(v)), "test")["accuracy"].nanmean())

    assert accuracy(v) > np.mean([accuracy(v.roll(i, 0)) for i in range(1, 10)])
    shared = made(v.mean(0).expand_as(v))
    torch.testing.assert_close(shared, shared[:1].expand_as(shared))
    assert made(v).std(0).mean() > 100 * shared.std(0).mean()


def test_what_cannot_be_analysed_is_refused_in_a_sentence(models):
    with pytest.raises(ConfigError, match="Local has no descriptors; pefll has"):
        descriptors_of(models["local"])
    with pytest.raises(DataError, match="fewer than the 1000 of a new client"):
        extrapolated(models["pefll"], [0.1], samples=1000)


def test_descriptors_are_drawn_for_the_runs_that_have_them(results, tmp_path: Path):
    assert [one.label for one in descriptor_picture.groups_to_draw(list(results.values()))] == ["pefll"]
    path = descriptor_picture.draw(list(results.values()), tmp_path / "descriptors.png")
    assert path.stat().st_size > 20_000
    assert descriptor_picture.groups_to_draw([results["local"]]) == []


def test_descriptors_are_of_all_samples_whatever_the_batch_in_training(models):
    pefll = models["pefll"]
    few = TrainedModels(pefll.experiment.override(["method.batch=1"]), pefll.outline, pefll._snapshot)
    assert np.array_equal(descriptors_of(few).values, descriptors_of(pefll).values)
    assert torch.is_tensor(pefll.server["embed"])
