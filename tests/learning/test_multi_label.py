"""Clients whose samples have several labels each are trained and evaluated label by label."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data.datasets import RawData
from raypfl.methods import FedAvg
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    as_module,
    as_vector,
    both_executors,
    both_networks,
    small_mlp,
    torch_sgd,
)
from tests.support.runs import experiment


def federation(executor: str, factory=small_mlp) -> Federation:
    fed = Federation(factory, executor=executor, method=FedAvg())
    fed.labels = np.random.default_rng(2).integers(0, 2, (len(fed.labels), CLASSES), dtype=np.int8)
    return fed


@both_executors
@both_networks
def test_several_labels_are_learnt_by_their_mean_binary_cross_entropy(executor, factory):
    fed = federation(executor, factory)
    clients = fed.clients()
    trained = clients.sgd(clients.loss, clients.initial)

    def loss(outputs, y):
        return F.binary_cross_entropy_with_logits(outputs, y.double())

    for k in range(len(clients)):
        net = as_module(factory, fed.context.initial)
        torch_sgd(net, fed.visits(k), lr=FP64.lr, loss=loss)
        torch.testing.assert_close(torch.Tensor(trained[k]), as_vector(net))


def test_a_sample_counts_for_each_label_that_it_has():
    fed = federation("vectorised")
    clients = fed.clients()
    labels = [fed.labels[fed.split[k]] for k in range(len(clients))]
    assert clients.label_counts().tolist() == [y.sum(0).tolist() for y in labels]

    means, counts = clients.class_means(lambda theta, x: x.flatten(1), fed.context.initial)
    assert counts.tolist() == clients.label_counts().tolist()
    x, y = fed.samples(2)
    chosen = x[y[:, 1] == 1].flatten(1)

    torch.testing.assert_close(torch.Tensor(means[2, 1]), chosen.mean(0))


def marked(config) -> RawData:
    """400 images, whose label l is whether the l-th row of pixels is bright."""
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 2, (400, 3), dtype=np.int8)
    inputs = draws.integers(0, 60, (400, 1, 6, 6), dtype=np.uint8)
    inputs[:, 0, :3] += 150 * labels.astype(np.uint8)[:, :, None]
    return RawData(inputs, labels, ["one", "two", "three"])


def labelled(tmp_path, method: str) -> raypfl.Experiment:
    options = {"data__name": f"{__name__}:marked", "data__rare": 1, "evaluation__protocols": "[local,global]"}
    return experiment(tmp_path, **options, method=method, partition__clients=4, cohort__size=4, training__lr=0.3)


@pytest.mark.parametrize("method", ["ditto", "fedper", "apfl", "pfedme"])
def test_a_run_on_samples_of_several_labels_learns_them(tmp_path, method):
    result = raypfl.run(labelled(tmp_path, method))
    rows = {(row["protocol"], row["model"]): row for row in result.summary()}
    assert rows["global", "global"]["auc"] > 0.9
    assert rows["local", "personal"]["auc"] > 0.7


@pytest.mark.parametrize("method", ["creff", "fednh", "fedproto", "fedrod"])
def test_a_method_for_classification_only_says_so(tmp_path, method):
    sentence = (
        f"method is '{method}', which learns the objective 'classification', but that of .*:marked' is 'multi-label'"
    )
    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(labelled(tmp_path, method))
