"""The quantities of PerAda's bounds: inequalities that hold for every sample, and distances with known values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import raypfl
from raypfl.analysis.distillation import ErrorBound
from raypfl.common.errors import ConfigError
from tests.support import datasets
from tests.support.runs import experiment

POOLS = {"data__pools": "{auxiliary: 0.2, validation: 0.2}"}


def logged(tmp_path, **changes) -> list[dict[str, float]]:
    """The values that each round logged, by name."""
    described = experiment(tmp_path, **POOLS | {"rounds": 2, "evaluation__every": 0} | changes)
    result = raypfl.run(described.replace(analyses=[{"name": "distillation", "samples": 100}]))
    rounds: list[dict[str, float]] = [{} for _ in range(result.rounds.num_rows)]
    for row in result.logged.to_pylist():
        rounds[row["round"] - 1][row["name"]] = row["value"]
    return rounds


def test_the_inequalities_hold_for_any_two_points_of_the_simplex_and_are_not_empty():
    draws = torch.Generator().manual_seed(0)
    for sharpness in (0.1, 1.0, 10.0):
        p, q = (torch.randn(5000, 10, generator=draws, dtype=torch.float64).mul(sharpness).softmax(1) for _ in range(2))
        bound = ErrorBound.of(p, q, torch.randint(0, 10, (5000,), generator=draws))
        assert bound.violations == 0 and (bound.error <= bound.bound + 1e-12).all()
        assert bound._replace(distance=0 * bound.distance).violations > 0, "without the distance, it must not hold"


def test_a_lone_client_is_the_ensemble_and_the_bound_is_twice_its_loss(tmp_path):
    for values in logged(tmp_path, method="fedavg", cohort__size=1):
        assert values["distillation_distance"] < 1e-6 and values["inequalities_violated"] == 0
        assert values["global_bound"] == pytest.approx(2 * values["ensemble_loss"], abs=1e-5)
        assert 0 < values["global_error"] <= values["global_bound"] and "personal_error" not in values


def test_distillation_brings_the_global_model_closer_to_the_ensemble(tmp_path):
    settings = {"method": "feddf", "method__lr": 0.003, "rounds": 1, "training__epochs": 3}
    far, near = (logged(tmp_path, **settings, method__steps=steps)[0] for steps in (0, 60))
    name = "distillation_distance_to_mean_logits"
    assert near[name] < 0.7 * far[name] and near["inequalities_violated"] == far["inequalities_violated"] == 0


def test_personal_models_are_closer_to_the_global_one_the_harder_they_are_pulled(tmp_path):
    pulled = [logged(tmp_path, method="ditto", method__lam=lam)[1] for lam in (0.0, 1.0, 8.0)]
    distances = [values["personal_distance"] for values in pulled]
    assert distances[0] > distances[1] > distances[2] > 0
    assert all(values["personal_error"] <= values["personal_bound"] for values in pulled)
    assert not any(values["inequalities_violated"] for values in pulled)


def test_the_table_has_a_row_for_each_client_of_each_round(tmp_path):
    described = experiment(tmp_path, **POOLS, rounds=2, evaluation__every=0, method="perada", method__steps=3)
    described = described.replace(analyses=[{"name": "distillation", "samples": 50}])
    result = raypfl.run(described)
    table = result.analysis["distillation"].to_pydict()
    clients = []
    for cohort in result.rounds["cohort"].to_pylist():
        clients += sorted(cohort)

    assert table["client"] == clients and np.isfinite(table["personal_bound"]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__pools": "{auxiliary: 0.2}"}, "no pool called 'validation'"),
        ({"method": "local"}, "Local has none"),
    ],
)
def test_runs_without_a_pool_or_a_global_model_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        logged(tmp_path, **{"method": "fedavg"} | changes)


def test_a_pool_without_the_clients_labels_is_refused(tmp_path):
    root = str(tmp_path / "cifar")
    datasets.cifar10(Path(root))
    datasets.cifar100(Path(root))
    data = {"name": "cifar10", "root": root, "pools": {"auxiliary": {"name": "cifar100", "root": root}}}
    settings = experiment(tmp_path, method="fedavg", rounds=1, cohort__size=2, partition__clients=2)
    with pytest.raises(ConfigError, match="labels are the clients' classes, and 'auxiliary' has none"):
        raypfl.run(settings.replace(data=data, analyses=[{"name": "distillation", "labelled": "auxiliary"}]))
