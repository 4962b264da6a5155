"""Membership inference tells a model that leaks its training samples from one that does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.trained.membership import _best_accuracy, _log_ratio, membership
from tests.support.runs import experiment


@pytest.mark.parametrize(
    ("scores", "accuracy"),
    [([4, 3, 2, 1], 1.0), ([1, 2, 3, 4], 0.5), ([4, 1, 3, 2], 0.75), ([1, 1, 1, 1], 0.5), ([2, 1, 1, 0], 0.75)],
)
def test_the_best_threshold_treats_equal_scores_alike(scores, accuracy):
    assert _best_accuracy(torch.tensor(scores), torch.tensor([True, True, False, False])) == accuracy


def test_likelihood_ratios_are_those_of_the_two_normal_distributions():
    draws = np.random.default_rng(0)
    inside = torch.from_numpy(draws.random((4000, 2)) < 0.5)
    values = torch.from_numpy(draws.normal(size=(4000, 2))) * torch.where(inside, 2.0, 1.0) + 3.0 * inside
    observed = torch.tensor([3.0, 0.5], dtype=torch.float64)

    normal = torch.distributions.Normal
    expected = normal(3.0, 2.0).log_prob(observed) - normal(0.0, 1.0).log_prob(observed)
    assert torch.allclose(_log_ratio(values, inside, observed), expected.double(), atol=0.15)


def test_a_model_that_memorises_leaks_and_an_untrained_one_does_not(tmp_path):
    changes = {
        "method": "fedavg",
        "model": "{name: mlp, hidden: [64]}",
        "partition__clients": 4,
        "cohort__size": 4,
        "data__test_fraction": 0.9,
        "training": "{epochs: 10, batch_size: 20, lr: 0.3}",
        "evaluation__every": 0,
        "engine__backend": "inline",
    }
    overfitted = raypfl.run(experiment(tmp_path, **changes, rounds=8))
    untrained = raypfl.run(experiment(tmp_path, **changes, rounds=1, training__lr=1e-9))

    leaking = membership(overfitted, shadows=8, epochs=10)
    tight = membership(untrained)
    assert leaking.samples > 100 and tight.likelihood is None
    assert tight.loss < 0.54 < 0.57 < leaking.loss and leaking.likelihood > 0.57, (tight, leaking)

    with pytest.raises(ConfigError, match="at least 4 models"):
        membership(overfitted, shadows=2)
    with pytest.raises(ConfigError, match="has no global model"):
        membership(replace(overfitted, experiment=overfitted.experiment.replace(method="local")))
