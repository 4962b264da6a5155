"""Features and targets in a pair of ``.npy`` files."""

from __future__ import annotations

import numpy as np
import pytest

import raypfl
from raypfl.common.errors import DataError
from tests.support.runs import experiment

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] > 0) + (X[:, 1] > 0).astype(np.int64)


def test_integer_targets_are_classes_that_a_run_learns(tmp_path):
    np.save(tmp_path / "x_train.npy", X)
    np.save(tmp_path / "y_train.npy", Y.astype(np.uint8))
    data = {"data__name": "arrays", "data__root": tmp_path, "data__cache": tmp_path / "cache"}
    named = {"data__input": "x_train.npy", "data__target": "y_train.npy"}
    few = {"partition": "iid", "partition__clients": 2, "cohort__size": 2, "method": "fedavg", "training__lr": 0.1}
    result = raypfl.run(experiment(tmp_path, **data, **named, **few, rounds=20, evaluation__every=0))
    (accuracy,) = [row["accuracy"] for row in result.summary() if row["protocol"] == "local"]

    assert accuracy > 0.6


@pytest.mark.parametrize(
    ("inputs", "targets", "sentence"),
    [
        (X, Y - 1, r"targets\.npy has label -1, but labels must be numbers of classes, from 0"),
        (X, Y[:, None], r"labels in targets\.npy are int64\[60, 1\]; they must be integers \[n\]"),
        (X, Y.astype(str), r"targets\.npy holds <U21\[60\], not classes, integers from 0, or numbers"),
        (X, Y[0], r"labels in targets\.npy are int64\[\]; they must be integers \[n\]"),
        (X[:9], Y, r"inputs\.npy has 9 samples, but targets\.npy has 60"),
        ((255 * X).astype(np.uint8), Y, r"inputs\.npy holds uint8\[60, 4\], not inputs in floating point: .*name=npy"),
        (X[:, 0], Y, r"inputs\.npy has the shape \[60\]; one number a sample is \[n, 1\]"),
        (1e300 * X.astype(np.float64), Y, r"Sample 0 has an input that is not finite in single precision"),
    ],
)
def test_arrays_that_are_no_features_and_targets_are_refused(tmp_path, opened, inputs, targets, sentence):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/inputs.npy", inputs)
    np.save(tmp_path / "data/targets.npy", targets)
    with pytest.raises(DataError, match=sentence):
        opened("arrays")


def test_labels_that_count_from_1_come_with_a_warning(tmp_path, opened):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/inputs.npy", X)
    np.save(tmp_path / "data/targets.npy", Y + 1)
    with pytest.warns(
        UserWarning, match=r"gets 4 outputs, one for a class .* of targets\.npy count from 1, subtract 1"
    ):
        assert opened("arrays").num_classes == 4


def test_labels_that_skip_classes_or_have_decimal_points_come_with_a_warning(tmp_path, opened):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/inputs.npy", X)
    np.save(tmp_path / "data/targets.npy", 10 * Y)
    with pytest.warns(UserWarning, match=r"from 0 to 20, but those of targets\.npy have only 3 different values"):
        assert opened("arrays").num_classes == 21
    np.save(tmp_path / "data/targets.npy", Y.astype(float))
    with pytest.warns(
        UserWarning, match=r"targets\.npy has only the numbers 0\.0, 1\.0, 2\.0\. .* y\.astype\('int64'\)"
    ):
        assert opened("arrays").kind == "numbers"


@pytest.mark.parametrize("value", [0.1, 1 / 3, -123.456, 1e8 + 0.1])
def test_a_constant_feature_is_0_for_the_network_though_its_mean_is_rounded(tmp_path, opened, value):
    constant = np.full((len(X), 1), value)
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data/inputs.npy", np.concatenate([X.astype(np.float64), constant], axis=1))
    np.save(tmp_path / "data/targets.npy", Y)
    data = opened("arrays")
    trained = data.inputs[np.concatenate([data.indices(client) for client in range(2)])]

    np.testing.assert_allclose(data.std, [*trained[:, :4].std(0), 1.0], rtol=1e-6)
    assert data.mean[4] == np.float32(value)
