"""Client descriptors compared with label mixes, and new clients whose label mixes differ from those of training."""

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
    # Rotating and scaling the label mixes keeps the order of all distances.
    rotation, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(6, 6)))
    assert Descriptors(MIXES @ rotation * 7, MIXES, UNSEEN).rank_correlations == pytest.approx(np.ones(3))

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

    results = {}
    for name, method in methods.items():
        assignments = [f"{key}={value}" for key, value in (changes | {"method": method}).items()]
        results[name] = raypfl.run(experiment(folder).override(assignments))
    return results


@pytest.fixture(scope="module")
def models(results: dict[str, raypfl.Result]) -> dict[str, TrainedModels]:
    return {name: raypfl.trained_models(result.run_dir) for name, result in results.items()}


@pytest.mark.thorough
def test_training_orders_descriptors_of_unseen_clients_by_their_label_mixes(models):
    pefll = models["pefll"]
    before = descriptors_of(pefll, pefll.at_start())
    after = descriptors_of(pefll)
    assert after.values.shape == (60, 8) and len(after.unseen) == 12
    assert before.rank_correlations.mean() < after.rank_correlations.mean()
    assert after.rank_correlations.mean() > 0.5


def test_new_clients_with_more_classes_are_harder_for_training_alone_than_for_pefll(models):
    losses = {}
    for name, trained in models.items():
        accuracies = extrapolated(trained, [0.1, 1.0], clients=10, samples=16)
        assert all(len(of_clients) == 10 for of_clients in accuracies.values())
        losses[name] = accuracies[0.1].mean() - accuracies[1.0].mean()
    assert losses["local"] > max(losses["pefll"], 0.05)


def test_a_client_needs_the_model_of_its_own_descriptor(models):
    pefll = models["pefll"]
    (clients,) = pefll.groups(60)
    descriptors = torch.from_numpy(descriptors_of(pefll).values).float()

    def generated(descriptors: torch.Tensor) -> torch.Tensor:
        return clients.networks["hyper"](pefll.server["hyper"], descriptors).detach()

    def accuracy(descriptors: torch.Tensor) -> float:
        models = raypfl.per_client(generated(descriptors))
        return float(clients.evaluate(models, "test")["accuracy"].nanmean())

    of_other_clients = [accuracy(descriptors.roll(i, 0)) for i in range(1, 10)]
    assert accuracy(descriptors) > np.mean(of_other_clients)

    shared = generated(descriptors.mean(0).expand_as(descriptors))
    torch.testing.assert_close(shared, shared[:1].expand_as(shared))
    assert generated(descriptors).std(0).mean() > 100 * shared.std(0).mean()


def test_runs_that_cannot_be_analysed_are_refused_in_a_sentence(models):
    with pytest.raises(ConfigError, match="Local has no descriptors; pefll has"):
        descriptors_of(models["local"])
    with pytest.raises(DataError, match="fewer than the 1000 of a new client"):
        extrapolated(models["pefll"], [0.1], samples=1000)


def test_descriptors_are_drawn_for_the_runs_that_have_them(results, tmp_path: Path):
    assert [run.label for run in descriptor_picture.groups_to_draw(list(results.values()))] == ["pefll"]
    path = descriptor_picture.draw(list(results.values()), tmp_path / "descriptors.png")
    assert path.stat().st_size > 20_000
    assert descriptor_picture.groups_to_draw([results["local"]]) == []


def test_descriptors_are_of_all_samples_whatever_the_batch_in_training(models):
    pefll = models["pefll"]
    one_by_one = TrainedModels(pefll.experiment.override(["method.batch=1"]), pefll.outline, pefll._snapshot)
    assert np.array_equal(descriptors_of(one_by_one).values, descriptors_of(pefll).values)
    assert torch.is_tensor(pefll.server["embed"])
