"""Metrics against torch, scikit-learn and sums by hand; sums over parts of a test set add up to the whole's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.nn import functional as F

from raypfl.evaluation import Measures
from raypfl.evaluation.inference import ModelOutputs
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.protocols import class_weights
from raypfl.learning.objectives import Classification, MultiLabel
from raypfl.learning.objectives.multi_label import LabelsLeftOut, MacroAUC

ONE_CLASS = Classification()
LABELS = MultiLabel()


def outputs(logits, y, **fields):
    """The outputs of some models for one batch."""
    logits = torch.as_tensor(logits)
    y = torch.as_tensor(y)
    return [ModelOutputs(slice(0, len(logits)), logits, y, fields.pop("weight", None), **fields)]


def sums_of(outputs, rows, classes=0, objective=ONE_CLASS):
    return MetricSums(Measures(objective, targets=classes), by_class=classes > 0).accumulate(outputs, rows)


def multi_label_sums(outputs):
    return sums_of(outputs, 1, objective=LABELS)


def metrics(sums, objective=ONE_CLASS):
    return MetricSums(Measures(objective)).values(sums)


def metric(sums, name, row=0, objective=ONE_CLASS):
    return float(metrics(sums, objective)[row, Measures(objective).columns.index(name)])


def random_answers(models=3, samples=40, classes=5, seed=0):
    draws = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(models, samples, classes, generator=draws)
    return logits, torch.randint(0, classes, (models, samples), generator=draws)


# ------------------------------------------------------------------------------------------------------------- metrics
def test_accuracy_and_loss_equal_torchs():
    logits, y = random_answers()
    sums = sums_of(outputs(logits, y), 3)
    for k in range(3):
        assert metric(sums, "samples", k) == 40
        assert metric(sums, "accuracy", k) == pytest.approx(float((logits[k].argmax(1) == y[k]).float().mean()))
        assert metric(sums, "loss", k) == pytest.approx(float(F.cross_entropy(logits[k], y[k])), rel=1e-6)


def test_calibration_error_is_the_gap_of_fifteen_bins_weighed_by_their_samples():
    logits, y = random_answers(models=1, samples=200)
    confidence, guess = (part.numpy() for part in logits[0].double().softmax(1).max(1))
    right = guess == y[0].numpy()
    expected = 0.0
    edges = np.linspace(0, 1, 16)

    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())

    assert metric(sums_of(outputs(logits, y), 1), "ece") == pytest.approx(expected, rel=1e-5)


def test_the_calibration_error_is_0_if_sure_and_right_and_1_if_sure_and_wrong():
    sure = torch.tensor([[[60.0, 0.0], [60.0, 0.0]]])
    assert metric(sums_of(outputs(sure, [[0, 0]]), 1), "ece") == 0
    assert metric(sums_of(outputs(sure, [[1, 1]]), 1), "ece") == pytest.approx(1)
    assert metric(sums_of(outputs(torch.zeros(1, 2, 2), [[0, 1]]), 1), "ece") == pytest.approx(0)


def test_a_diverged_model_has_a_loss_of_nan():
    sums = sums_of(outputs(torch.full((1, 4, 3), torch.nan), [[0, 1, 2, 0]]), 1)
    assert np.isnan(metric(sums, "loss")) and metric(sums, "samples") == 4


def test_sums_over_the_parts_of_a_test_set_add_up_to_the_wholes():
    logits, y = random_answers()
    whole = sums_of(outputs(logits, y), 3, classes=5)
    parts = sum(sums_of(outputs(logits[:, a:b], y[:, a:b]), 3, classes=5) for a, b in ((0, 7), (7, 8), (8, 40)))
    torch.testing.assert_close(parts, whole, equal_nan=True)
    torch.testing.assert_close(metrics(parts), metrics(whole), equal_nan=True)


def test_padding_counts_for_nothing():
    logits, y = random_answers()
    weight = torch.ones(3, 40)
    weight[1, 25:] = 0
    padded = sums_of(outputs(logits, y, weight=weight), 3, 5)
    short = sums_of(outputs(logits[1:2, :25], y[1:2, :25]), 1, 5)

    torch.testing.assert_close(padded[1], short[0], equal_nan=True)


def test_one_models_outputs_are_divided_among_the_owners_of_the_samples():
    logits, y = random_answers(models=1)
    owners = torch.arange(40) % 4
    mixed = sums_of([outputs(logits, y, owners=owners)[0]._replace(models=slice(None))], 4, 5)
    for k in range(4):
        alone = sums_of(outputs(logits[:, owners == k], y[:, owners == k]), 1, 5)
        torch.testing.assert_close(mixed[k], alone[0], equal_nan=True)


def multi_label(samples=60, labels=4, seed=0):
    draws = np.random.default_rng(seed)
    targets = (draws.random((samples, labels)) < 0.4).astype(np.float32)
    scores = (draws.integers(-3, 4, (samples, labels)) + targets).astype(np.float32)  # whole numbers, so many ties
    return torch.from_numpy(scores), torch.from_numpy(targets)


def test_the_area_under_the_curve_equals_scikit_learns_ties_included():
    scores, targets = multi_label()
    area = MacroAUC().of_all(scores, targets)
    left_out = LabelsLeftOut().of_all(scores, targets)

    assert area == pytest.approx(roc_auc_score(targets.numpy(), scores.numpy(), average="macro"))
    assert left_out == 0


def test_labels_without_positives_or_without_negatives_are_left_out_of_the_area_and_counted():
    scores, targets = multi_label()
    targets[:, 0] = 0
    targets[:, 2] = 1
    area = MacroAUC().of_all(scores, targets)
    left_out = LabelsLeftOut().of_all(scores, targets)
    scored_labels = [1, 3]

    assert area == pytest.approx(
        roc_auc_score(targets[:, scored_labels].numpy(), scores[:, scored_labels].numpy(), average="macro")
    )
    assert left_out == 2
    assert np.isnan(MacroAUC().of_all(scores, torch.zeros_like(targets)))
    assert LabelsLeftOut().of_all(scores, torch.zeros_like(targets)) == 4


def test_labels_may_be_whole_numbers_as_a_data_set_has_them():
    scores, targets = multi_label()
    whole = multi_label_sums(outputs(scores[None], targets.to(torch.int8)[None]))
    torch.testing.assert_close(whole, multi_label_sums(outputs(scores[None], targets[None])), equal_nan=True)


def test_several_labels_a_sample_are_judged_by_their_mean_and_by_the_area_under_the_curve():
    scores, targets = multi_label()
    halves = [outputs(scores[None, a:b], targets[None, a:b])[0] for a, b in ((0, 25), (25, 60))]
    sums = multi_label_sums(halves)

    assert metric(sums, "accuracy", objective=LABELS) == pytest.approx(
        float(((scores > 0) == (targets > 0.5)).float().mean())
    )
    assert metric(sums, "loss", objective=LABELS) == pytest.approx(
        float(F.binary_cross_entropy_with_logits(scores, targets)), rel=1e-6
    )
    assert metric(sums, "auc", objective=LABELS) == pytest.approx(
        roc_auc_score(targets.numpy(), scores.numpy(), average="macro")
    )
    assert np.isnan(metric(sums, "ece", objective=LABELS)) and metric(sums, "left_out", objective=LABELS) == 0


# --------------------------------------------------------------------------------------------------- PM(V) and PM(L)
def predictor(guesses, labels, classes):
    """The sums by class of one model that predicts `guesses`."""
    return sums_of(outputs(F.one_hot(torch.tensor([guesses]), classes).double(), [labels]), 1, classes)


def weighted_accuracy(sums, protocol, counts):
    return float(class_weighted(sums, protocol, counts)[0, 1])


def class_weighted(sums, protocol, counts):
    metric_sums = MetricSums(Measures(targets=len(counts)), by_class=True)
    return metric_sums.class_weighted(sums, class_weights(protocol, torch.tensor([counts], dtype=torch.float64)))


def test_a_constant_predictor_is_worth_the_share_of_its_class():
    labels = [0, 0, 1, 1, 2, 2]  # balanced
    sums = predictor([1] * 6, labels, 3)
    assert weighted_accuracy(sums, "pm_v", [6, 2, 0]) == pytest.approx(1 / 2)
    assert weighted_accuracy(sums, "pm_l", [6, 2, 0]) == pytest.approx(2 / 8)
    assert weighted_accuracy(sums, "pm_v", [6, 0, 1]) == weighted_accuracy(sums, "pm_l", [6, 0, 1]) == 0


def test_class_weighted_accuracies_of_a_perfect_predictor_and_of_a_client_of_one_class():
    labels = [0, 0, 1, 1, 2, 2]
    perfect = predictor(labels, labels, 3)
    poor = predictor([0, 1, 1, 0, 0, 0], labels, 3)
    for counts in ([1, 5, 2], [0, 0, 3]):
        assert weighted_accuracy(perfect, "pm_v", counts) == weighted_accuracy(perfect, "pm_l", counts) == 1
    assert weighted_accuracy(poor, "pm_v", [7, 0, 0]) == weighted_accuracy(poor, "pm_l", [7, 0, 0]) == 1 / 2
    assert weighted_accuracy(poor, "pm_v", [4, 4, 4]) == weighted_accuracy(poor, "pm_l", [4, 4, 4])
    assert weighted_accuracy(poor, "pm_l", [4, 4, 4]) == pytest.approx(metric(poor, "accuracy"))


def test_an_unbalanced_test_set_is_weighed_by_the_general_formula_not_by_recalls():
    labels = [0, 0, 0, 0, 1]
    guesses = [0, 0, 0, 1, 0]  # recalls 3/4 and 0
    sums = predictor(guesses, labels, 2)
    # sum of alpha(y) right / sum of alpha(y), by hand: PM(L) with alpha = (1/4, 3/4), PM(V) with (1, 1)
    assert weighted_accuracy(sums, "pm_l", [1, 3]) == pytest.approx((3 / 4) / (4 / 4 + 3 / 4))
    assert weighted_accuracy(sums, "pm_v", [1, 3]) == pytest.approx(3 / 5)
    row = class_weighted(sums, "pm_v", [0.0, 2.0])[0]
    assert row[0] == 1 and row[1] == 0
