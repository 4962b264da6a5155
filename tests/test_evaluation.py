"""How models are judged: metrics against other people's code, protocols against counting by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import raypfl
from raypfl.data import load_federated
from raypfl.errors import ConfigError
from raypfl.evaluation.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from raypfl.evaluation.scoring import score, weights
from raypfl.evaluation.tables import summarise, tabulate
from raypfl.evaluation.tally import METRICS, class_weighted, macro_auc, metrics, tally
from raypfl.federation.testing import Answers
from raypfl.messages import per_client
from raypfl.methods import Ditto, FedAvg, Local
from raypfl.settings import TrainingSettings
from tests.runs import experiment
from tests.support import CLASSES, Federation, as_module

EXECUTORS = ["vectorised", "sequential"]


def answers(logits, y, **fields):
    """One batch of some models' answers."""
    logits, y = torch.as_tensor(logits), torch.as_tensor(y)
    return [Answers(slice(0, len(logits)), logits, y, fields.pop("weight", None), **fields)]


def of(sums, name, row=0):
    return float(metrics(sums)[row, METRICS.index(name)])


def random_answers(models=3, samples=40, classes=5, seed=0):
    draws = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(models, samples, classes, generator=draws)
    return logits, torch.randint(0, classes, (models, samples), generator=draws)


# ------------------------------------------------------------------------------------------------------------- metrics


def test_accuracy_and_loss_are_torchs():
    logits, y = random_answers()
    sums = tally(answers(logits, y), 3)
    for k in range(3):
        assert of(sums, "samples", k) == 40
        assert of(sums, "accuracy", k) == pytest.approx(float((logits[k].argmax(1) == y[k]).float().mean()))
        assert of(sums, "loss", k) == pytest.approx(float(F.cross_entropy(logits[k], y[k])), rel=1e-6)


def test_calibration_error_is_the_gap_of_fifteen_bins_weighed_by_their_samples():
    logits, y = random_answers(models=1, samples=200)
    confidence, guess = (part.numpy() for part in logits[0].double().softmax(1).max(1))
    right = guess == y[0].numpy()
    expected, edges = 0.0, np.linspace(0, 1, 16)
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert of(tally(answers(logits, y), 1), "ece") == pytest.approx(expected, rel=1e-5)


def test_a_model_that_is_sure_and_right_has_no_calibration_error_and_one_that_is_wrong_has_all_of_it():
    sure = torch.tensor([[[60.0, 0.0], [60.0, 0.0]]])
    assert of(tally(answers(sure, [[0, 0]]), 1), "ece") == 0
    assert of(tally(answers(sure, [[1, 1]]), 1), "ece") == pytest.approx(1)
    assert of(tally(answers(torch.zeros(1, 2, 2), [[0, 1]]), 1), "ece") == pytest.approx(0)


def test_a_diverged_model_is_judged_with_a_loss_that_is_no_number():
    sums = tally(answers(torch.full((1, 4, 3), torch.nan), [[0, 1, 2, 0]]), 1)
    assert np.isnan(of(sums, "loss")) and of(sums, "samples") == 4


def test_tallies_of_the_parts_of_a_test_set_add_up_to_the_wholes():
    logits, y = random_answers()
    whole = tally(answers(logits, y), 3, classes=5)
    parts = sum(tally(answers(logits[:, a:b], y[:, a:b]), 3, classes=5) for a, b in ((0, 7), (7, 8), (8, 40)))
    torch.testing.assert_close(parts, whole, equal_nan=True)
    torch.testing.assert_close(metrics(parts), metrics(whole), equal_nan=True)


def test_padding_counts_for_nothing():
    logits, y = random_answers()
    weight = torch.ones(3, 40)
    weight[1, 25:] = 0
    padded, short = tally(answers(logits, y, weight=weight), 3, 5), tally(answers(logits[1:2, :25], y[1:2, :25]), 1, 5)
    torch.testing.assert_close(padded[1], short[0], equal_nan=True)


def test_one_models_answers_are_divided_among_the_owners_of_the_samples():
    logits, y = random_answers(models=1)
    owners = torch.arange(40) % 4
    mixed = tally([answers(logits, y, owners=owners)[0]._replace(models=slice(None))], 4, 5)
    for k in range(4):
        alone = tally(answers(logits[:, owners == k], y[:, owners == k]), 1, 5)
        torch.testing.assert_close(mixed[k], alone[0], equal_nan=True)


def multi_label(samples=60, labels=4, seed=0):
    draws = np.random.default_rng(seed)
    targets = (draws.random((samples, labels)) < 0.4).astype(np.float32)
    scores = (draws.integers(-3, 4, (samples, labels)) + targets).astype(np.float32)  # whole numbers, so many ties
    return torch.from_numpy(scores), torch.from_numpy(targets)


def test_the_area_under_the_curve_is_scikit_learns_ties_included():
    scores, targets = multi_label()
    area, left_out = macro_auc(scores, targets)
    assert area == pytest.approx(roc_auc_score(targets.numpy(), scores.numpy(), average="macro"))
    assert left_out == 0


def test_labels_without_positives_or_without_negatives_are_left_out_of_the_area_and_counted():
    scores, targets = multi_label()
    targets[:, 0], targets[:, 2] = 0, 1
    area, left_out = macro_auc(scores, targets)
    kept = [1, 3]
    assert area == pytest.approx(roc_auc_score(targets[:, kept].numpy(), scores[:, kept].numpy(), average="macro"))
    assert left_out == 2
    nothing, all_of_them = macro_auc(scores, torch.zeros_like(targets))
    assert np.isnan(nothing) and all_of_them == 4


def test_several_labels_a_sample_are_judged_by_their_mean_and_by_the_area_under_the_curve():
    scores, targets = multi_label()
    halves = [answers(scores[None, a:b], targets[None, a:b])[0] for a, b in ((0, 25), (25, 60))]
    sums = tally(halves, 1)
    assert of(sums, "accuracy") == pytest.approx(float(((scores > 0) == (targets > 0.5)).float().mean()))
    assert of(sums, "loss") == pytest.approx(float(F.binary_cross_entropy_with_logits(scores, targets)), rel=1e-6)
    assert of(sums, "auc") == pytest.approx(roc_auc_score(targets.numpy(), scores.numpy(), average="macro"))
    assert np.isnan(of(sums, "ece")) and of(sums, "left_out") == 0


# --------------------------------------------------------------------------------------------------- PM(V) and PM(L)


def predictor(guesses, labels, classes):
    """Tally by class of one model that answers `guesses`."""
    return tally(answers(F.one_hot(torch.tensor([guesses]), classes).double(), [labels]), 1, classes)


def weighted_accuracy(sums, protocol, counts):
    return float(class_weighted(sums, weights(protocol, torch.tensor([counts], dtype=torch.float64)))[0, 1])


def test_a_constant_predictor_is_worth_the_share_of_its_class():
    labels = [0, 0, 1, 1, 2, 2]  # balanced
    sums = predictor([1] * 6, labels, 3)
    assert weighted_accuracy(sums, "pm_v", [6, 2, 0]) == pytest.approx(1 / 2)
    assert weighted_accuracy(sums, "pm_l", [6, 2, 0]) == pytest.approx(2 / 8)
    assert weighted_accuracy(sums, "pm_v", [6, 0, 1]) == weighted_accuracy(sums, "pm_l", [6, 0, 1]) == 0


def test_a_perfect_predictor_and_a_client_of_one_class_score_as_they_should():
    labels = [0, 0, 1, 1, 2, 2]
    perfect, poor = predictor(labels, labels, 3), predictor([0, 1, 1, 0, 0, 0], labels, 3)
    for counts in ([1, 5, 2], [0, 0, 3]):
        assert weighted_accuracy(perfect, "pm_v", counts) == weighted_accuracy(perfect, "pm_l", counts) == 1
    assert weighted_accuracy(poor, "pm_v", [7, 0, 0]) == weighted_accuracy(poor, "pm_l", [7, 0, 0]) == 1 / 2
    assert weighted_accuracy(poor, "pm_v", [4, 4, 4]) == weighted_accuracy(poor, "pm_l", [4, 4, 4])
    assert weighted_accuracy(poor, "pm_l", [4, 4, 4]) == pytest.approx(of(poor, "accuracy"))


def test_an_unbalanced_test_set_is_weighed_by_the_general_formula_not_by_recalls():
    labels, guesses = [0, 0, 0, 0, 1], [0, 0, 0, 1, 0]  # recalls 3/4 and 0
    sums = predictor(guesses, labels, 2)
    # sum of alpha(y) right / sum of alpha(y), by hand: PM(L) with alpha = (1/4, 3/4), PM(V) with (1, 1)
    assert weighted_accuracy(sums, "pm_l", [1, 3]) == pytest.approx((3 / 4) / (4 / 4 + 3 / 4))
    assert weighted_accuracy(sums, "pm_v", [1, 3]) == pytest.approx(3 / 5)
    row = class_weighted(sums, weights("pm_v", torch.tensor([[0.0, 2.0]])))[0]
    assert row[0] == 1 and row[1] == 0


# ------------------------------------------------------------------------------------------------- a group of clients


def judged_federation(executor, factory=None, **options):
    """A federation whose clients have tests of unequal sizes, one of them none."""
    fed = Federation(executor=executor, **({"factory": factory} if factory else {}), **options)
    tests = [np.array([3, 1, 8]), np.array([2]), np.zeros(0, dtype=np.int64), np.arange(9, 20)]
    fed.bench.split = lambda client, name: fed.split[client] if name == "train" else tests[client]
    fed.bench.evaluation_batch = 4
    fed.tests = tests
    return fed


def models_of(fed):
    draws = torch.Generator().manual_seed(5)
    return 0.4 * torch.randn(4, fed.model.size, generator=draws, dtype=torch.float64)


def by_hand(fed, theta, where):
    """Right answers, summed loss, guesses."""
    x = (fed.inputs[where].astype(np.float64) - np.array([3.0, 5.0]).reshape(-1, 1, 1)) / np.array([2.0, 4.0]).reshape(
        -1, 1, 1
    )
    y = torch.from_numpy(fed.labels[where])
    with torch.no_grad():
        logits = as_module(fed.factory, theta).eval()(torch.from_numpy(x))
    return int((logits.argmax(1) == y).sum()), float(F.cross_entropy(logits, y, reduction="sum")), logits, y


def scored(fed, personal=None, shared=None, protocols=("local", "global"), groups=((0, 1, 2, 3),)):
    """A table, put together as the server does."""
    total: dict[str, torch.Tensor] = {}
    for ids in groups:
        clients = fed.clients(ids)
        mine = (lambda group: per_client(personal[list(group.ids)])) if personal is not None else lambda group: None
        for name, value in score(clients, mine, shared, protocols, [(i, 4) for i in ids]).items():
            rows = value.rows
            if isinstance(value, raypfl.Each):
                total.setdefault(name, torch.zeros(4, rows.shape[1], dtype=torch.float64))[list(ids)] = rows
            else:
                total[name] = total.get(name, 0) + rows.sum(0)
    table = tabulate(7, total, range(4), protocols)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    return {(row["protocol"], row["model"], row["client"]): row for row in rows}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_client_is_judged_on_its_own_and_on_everybodys_tests_with_both_models(executor):
    fed = judged_federation(executor)
    personal, shared = models_of(fed), models_of(fed)[0] + 0.3
    table = scored(fed, personal, shared, groups=((0, 2), (1, 3)))
    union = np.concatenate(fed.tests)
    assert len(table) == 3 + 3 + 4 + 1  # client 2 has no tests; one row for the global model on everybody's
    for k in (0, 1, 3):
        for model, theta in (("personal", personal[k]), ("global", shared)):
            right, loss, *_ = by_hand(fed, theta, fed.tests[k])
            row = table["local", model, k]
            assert row["samples"] == len(fed.tests[k]) and row["round"] == 7
            assert row["accuracy"] == pytest.approx(right / len(fed.tests[k]))
            assert row["loss"] == pytest.approx(loss / len(fed.tests[k]), rel=1e-6)
    for k, theta in [*enumerate(personal), (-1, shared)]:
        right, loss, *_ = by_hand(fed, theta, union)
        row = table["global", "global" if k < 0 else "personal", k]
        assert row["accuracy"] == pytest.approx(right / 15) and row["loss"] == pytest.approx(loss / 15, rel=1e-6)
        assert row["auc"] is None and row["left_out"] is None and 0 <= row["ece"] <= 1


class Watched(nn.Module):
    """Notes how it is called."""

    calls: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(16, CLASSES)

    def forward(self, x):
        last = not torch._C._functorch.is_batchedtensor(x) and x.is_contiguous(memory_format=torch.channels_last)
        self.calls.append((torch.is_autocast_enabled("cpu"), last))
        return self.head(self.conv(x).flatten(1))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_precision_and_layout_of_training_hold_when_models_are_judged(executor):
    training = TrainingSettings(precision="bf16", channels_last=True, batch_size=4)
    fed = judged_federation(executor, Watched, training=training)
    personal = models_of(fed).float()
    Watched.calls.clear()
    table = scored(fed, personal, personal[1])
    assert all(autocast for autocast, _ in Watched.calls)
    assert executor == "vectorised" or all(last for _, last in Watched.calls)
    x, y = fed.inputs[fed.tests[3]], torch.from_numpy(fed.labels[fed.tests[3]])
    x = (torch.from_numpy(x).float() - torch.tensor([3.0, 5.0]).reshape(-1, 1, 1)) / torch.tensor([2.0, 4.0]).reshape(
        -1, 1, 1
    )
    with torch.no_grad():
        exact = float(F.cross_entropy(as_module(Watched, personal[3])(x), y))
    assert table["local", "personal", 3]["loss"] == pytest.approx(exact, rel=0.05)
    assert table["local", "personal", 3]["loss"] != pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_class_weighted_accuracy_is_the_sum_over_everybodys_tests_weighed_by_the_clients_classes(executor):
    fed = judged_federation(executor)
    personal, shared = models_of(fed), models_of(fed)[0] + 0.3
    table = scored(fed, personal, shared, ("pm_v", "pm_l"), groups=((0, 1, 2), (3,)))
    union = np.concatenate(fed.tests)
    for k in range(4):
        counts = np.bincount(fed.labels[fed.split[k]], minlength=CLASSES)
        for model, theta in (("personal", personal[k]), ("global", shared)):
            *_, logits, y = by_hand(fed, theta, union)
            right = (logits.argmax(1) == y).numpy()
            for protocol, alpha in (("pm_l", counts / counts.sum()), ("pm_v", (counts > 0).astype(float))):
                expected = (alpha[y.numpy()] * right).sum() / alpha[y.numpy()].sum()
                assert table[protocol, model, k]["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_common_test_set_is_passed_once_through_the_global_model(executor, monkeypatch):
    fed = judged_federation(executor)
    fed.bench.pools = {"ood/strange": np.arange(20, 31)}
    seen = []
    predict = type(fed.bench.executor).predict
    monkeypatch.setattr(
        type(fed.bench.executor),
        "predict",
        lambda self, at, x, own: seen.append(x.shape[0]) or predict(self, at, x, own),
    )
    shared = models_of(fed)[1]
    table = scored(fed, None, shared, ("ood/strange",), groups=((0, 2), (1,), (3,)))
    right, loss, *_ = by_hand(fed, shared, np.arange(20, 31))
    (row,) = table.values()
    assert (row["client"], row["samples"], row["accuracy"]) == (-1, 11, pytest.approx(right / 11))
    assert row["loss"] == pytest.approx(loss / 11, rel=1e-6)
    assert sum(seen) == 11


@pytest.mark.parametrize("executor", EXECUTORS)
def test_several_labels_a_sample_give_every_client_and_the_union_an_area_under_the_curve(executor):
    fed = judged_federation(executor)
    fed.labels = (np.random.default_rng(2).random((len(fed.labels), CLASSES)) < 0.5).astype(np.float32)
    fed.bench.samples = replace(fed.bench.samples, labels=fed.labels)
    personal, shared = models_of(fed), models_of(fed)[0] + 0.3
    table = scored(fed, personal, shared, ("local", "global"), groups=((0, 2), (1, 3)))
    union = np.concatenate(fed.tests)

    def area(theta, where):
        x = torch.from_numpy(fed.inputs[where] - np.array([3.0, 5.0]).reshape(-1, 1, 1))
        with torch.no_grad():
            scores = as_module(fed.factory, theta)(x / torch.tensor([2.0, 4.0]).reshape(-1, 1, 1).double())
        return roc_auc_score(fed.labels[where], scores.numpy(), average="macro")

    assert table["global", "global", -1]["auc"] == pytest.approx(area(shared, union))
    for k in range(4):
        assert table["global", "personal", k]["auc"] == pytest.approx(area(personal[k], union))
    assert table["local", "personal", 3]["auc"] == pytest.approx(area(personal[3], fed.tests[3]))
    one = table["local", "personal", 1]  # a single sample has positives or negatives of a label, never both
    assert one["auc"] is None and one["left_out"] == CLASSES and one["ece"] is None


def test_labels_may_be_whole_numbers_as_a_data_set_has_them():
    scores, targets = multi_label()
    whole = tally(answers(scores[None], targets.to(torch.int8)[None]), 1)
    torch.testing.assert_close(whole, tally(answers(scores[None], targets[None]), 1), equal_nan=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_common_set_whose_labels_are_several_is_scored_as_a_whole(executor):
    fed = judged_federation(executor)
    fed.labels = (np.random.default_rng(2).random((len(fed.labels), CLASSES)) < 0.5).astype(np.float32)
    fed.bench.samples = replace(fed.bench.samples, labels=fed.labels)
    fed.bench.pools = {"strange": np.arange(20, 34)}
    cut = scored(fed, None, models_of(fed)[1], ("ood/strange",), groups=((0, 2), (1,), (3,)))
    assert cut == scored(fed, None, models_of(fed)[1], ("ood/strange",))
    assert cut["ood/strange", "global", -1]["samples"] == 14


# -------------------------------------------------------------------------------------------------- states in place


class Meddling(Ditto):
    """Changes in place what it reads from a client's state."""

    def personal_model(self, clients, server):
        theta = clients.state.get("personal", default=clients.initial)
        theta += 1.0
        theta[:, :3] = 0.0
        return theta


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_method_may_change_what_it_reads_when_it_is_judged_and_the_state_stays(executor):
    fed = judged_federation(executor)
    kept = models_of(fed).numpy().copy()
    kept.flags.writeable = False
    clients = fed.clients(personal=torch.from_numpy(kept.copy()))
    clients.state._rows = [{"personal": row} for row in kept]
    values = score(clients, lambda group: Meddling().personal_model(group, {}), None, ("local",), [])
    changed = torch.from_numpy(kept) + 1.0
    changed[:, :3] = 0.0
    for k in (0, 1, 3):
        right, *_ = by_hand(fed, changed[k], fed.tests[k])
        assert values["personal/local"].rows[k, 1] == pytest.approx(right / len(fed.tests[k]))


def test_a_model_that_is_judged_alone_is_read_where_its_state_lies():
    fed = judged_federation("sequential")
    kept = models_of(fed).numpy()
    clients = fed.clients(range(4))
    clients.state._rows = [{"personal": row} for row in kept]
    places = []
    score(
        clients,
        lambda group: places.append(group.state["personal"].data_ptr()) or group.state["personal"],
        None,
        ("local",),
        [],
    )
    assert places == [row.ctypes.data for row in kept]


# ------------------------------------------------------------------------------------------------------- corruptions


@pytest.mark.parametrize("room", [0, 10**9])
def test_every_model_sees_the_same_corrupted_images_whether_they_are_kept_or_made_again(monkeypatch, room):
    monkeypatch.setattr("raypfl.evaluation.scoring.ROOM", room)
    fed = judged_federation("sequential")
    fed.bench.scale = 16.0
    personal = models_of(fed)
    personal[2] = personal[0]
    table = scored(fed, personal, personal[0], ("ood/corrupt/impulse_noise/5",), groups=((0, 2), (1, 3)))
    rows = [table["ood/corrupt/impulse_noise/5", "personal", k] for k in range(4)]
    shared = table["ood/corrupt/impulse_noise/5", "global", -1]
    assert rows[0] | {"client": 2} == rows[2] and bool(fed.bench.corrupted) == bool(room)
    assert shared["loss"] == pytest.approx(rows[0]["loss"]) and shared["samples"] == 15
    assert rows[0]["loss"] != pytest.approx(by_hand(fed, personal[0], np.concatenate(fed.tests))[1] / 15)


def pictures(channels=3, side=32):
    return torch.from_numpy(np.random.default_rng(0).integers(60, 190, (5, channels, side, side), dtype=np.uint8))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_the_same_in_any_batch_and_grows_with_its_severity(name):
    x, where = pictures(), np.array([4, 90, 2, 17, 3])
    whole = Corruption(name, 3)(x, where, 255.0)
    assert whole.dtype == torch.uint8 and whole.shape == x.shape and not torch.equal(whole, x)
    assert torch.equal(Corruption(name, 3)(x[1:3], where[1:3], 255.0), whole[1:3])
    assert len({Corruption(name, s)(x, where, 255.0).numpy().tobytes() for s in SEVERITIES}) == len(SEVERITIES)
    if name != "saturation":  # of which the first two severities take away, and the others add
        damage = [(Corruption(name, s)(x, where, 255.0).float() - x.float()).square().mean() for s in SEVERITIES]
        assert damage == sorted(damage)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_small_grey_images_of_another_scale_can_be_corrupted(name):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 17, (4, 1, 8, 8), dtype=np.uint8))
    worse = Corruption(name, 5)(x, np.arange(4), 16.0)
    assert worse.shape == x.shape and int(worse.max()) <= 16


def test_noise_has_the_strength_it_says_and_differs_from_sample_to_sample():
    x = torch.full((8, 1, 40, 40), 128, dtype=torch.uint8)
    worse = Corruption("gaussian_noise", 5)(x, np.arange(8), 255.0).float()
    assert float(worse.std() / 255) == pytest.approx(0.10, rel=0.03)
    assert float(worse.mean() / 255) == pytest.approx(128 / 255, abs=0.005)
    assert len({image.numpy().tobytes() for image in worse}) == 8


# -------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture
def arranged(monkeypatch):
    """Arranges a data set as a run finds it: its pools, its unseen clients, its labels."""

    def arrange(unseen=(), pools=None, labels=None):
        def load(*args, **kwargs):
            data = replace(load_federated(*args, **kwargs), unseen=np.array(unseen, dtype=np.int64))
            if pools is not None:
                data = replace(data, pools=tuple(pools), _pools=pools)
            return data if labels is None else replace(data, labels=labels(data))

        monkeypatch.setattr("raypfl.federation.driver.load_federated", load)

    return arrange


def rows_of(result, **wanted):
    return [row for row in result.evaluations.to_pylist() if all(row[name] == value for name, value in wanted.items())]


class Adapting(FedAvg):
    """Gives a new client the global model trained on that client's data for two epochs."""

    def unseen_model(self, clients, server):
        clients.state["touched"] = clients.initial.repeat(len(clients), 1)
        return clients.sgd(clients.loss, server["theta"], epochs=2)


def test_unseen_clients_are_never_drawn_and_get_the_global_model(tmp_path, arranged):
    arranged(unseen=(3, 7))
    result = raypfl.run(experiment(tmp_path, method="fedavg", evaluation__protocols=["local", "unseen", "global"]))
    drawn = {client for cohort in result.rounds["cohort"].to_pylist() for client in cohort}
    assert drawn == set(range(12)) - {3, 7}
    assert {row["client"] for row in rows_of(result, protocol="unseen", round=6)} == {3, 7}
    assert {row["model"] for row in rows_of(result, protocol="unseen")} == {"global"}
    assert {row["client"] for row in rows_of(result, protocol="local", round=6)} == set(range(12)) - {3, 7}
    tests = sum(row["samples"] for row in rows_of(result, protocol="local", round=6))
    assert rows_of(result, protocol="global", round=6)[0]["samples"] == tests


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_method_that_adapts_to_unseen_clients_is_judged_with_what_it_makes_of_them(tmp_path, arranged, executor):
    arranged(unseen=(3, 7))
    base = experiment(tmp_path, evaluation__protocols=["unseen"], engine__executor=executor)
    result = raypfl.run(base.replace(method=Adapting()))
    rows = {(row["client"], row["model"]): row["loss"] for row in rows_of(result, round=6)}
    assert set(rows) == {(3, "personal"), (7, "personal"), (3, "global"), (7, "global")}
    assert rows[3, "personal"] != rows[3, "global"]
    assert result.client_state(3) == {}
    plain = raypfl.run(base.replace(method=FedAvg()))
    assert result.weights_hash == plain.weights_hash


def test_runs_are_judged_on_pools_and_on_corrupted_tests_with_both_models(tmp_path, arranged):
    arranged(pools={"ood/odd": np.arange(100)})
    protocols = ["ood/odd", "ood/corrupt/gaussian_noise/5", "ood/corrupt/contrast", "global"]
    result = raypfl.run(experiment(tmp_path, evaluation__protocols=protocols))
    summary = {(row["protocol"], row["model"]): row for row in result.summary()}
    assert set(summary) == {(protocol, model) for protocol in protocols for model in ("personal", "global")}
    assert [len(rows_of(result, protocol="ood/odd", model=model, round=6)) for model in ("personal", "global")] == [
        12,
        1,
    ]
    tests = rows_of(result, protocol="global", model="global", round=6)[0]["samples"]
    assert rows_of(result, protocol="ood/corrupt/contrast", model="global", round=6)[0]["samples"] == 5 * tests
    clean, noisy = summary["global", "global"], summary["ood/corrupt/gaussian_noise/5", "global"]
    assert noisy["loss"] != clean["loss"]


def test_fairness_is_the_population_deviation_over_clients_of_the_class_weighted_accuracy(tmp_path):
    result = raypfl.run(experiment(tmp_path, evaluation__protocols=["pm_l"]))
    accuracy = [row["accuracy"] for row in rows_of(result, round=6, model="personal")]
    row = next(row for row in result.summary() if row["model"] == "personal")
    assert len(accuracy) == 12 and row["std"] == pytest.approx(np.std(accuracy))
    assert row["accuracy"] == pytest.approx(np.mean(accuracy)) and "ece" not in row


def test_aggregates_are_means_deviations_and_the_worst_tenth():
    accuracy = [0.1, 0.9, 0.5, 0.3] * 5
    columns = {"protocol": ["local"] * 20, "model": ["personal"] * 20, "samples": [1, 3] * 10, "accuracy": accuracy}
    columns |= {"loss": [1.0, 2.0] * 10, "ece": [0.1, None] * 10, "auc": [None] * 20, "left_out": [None] * 20}
    (row,) = summarise(columns)
    assert row["accuracy"] == pytest.approx(0.45) and row["std"] == pytest.approx(np.std(accuracy))
    assert row["worst_decile"] == pytest.approx(0.1) and row["loss"] == pytest.approx(1.5)
    assert row["weighted"] == pytest.approx((0.1 + 2.7 + 0.5 + 0.9) / 8)
    assert row["ece"] == pytest.approx(0.1) and "auc" not in row


class Laden(FedAvg):
    """Has much on its server that no client needs."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


class LadenDitto(Ditto):
    """The same, with personal models that need nothing of the server's."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


@pytest.mark.parametrize("method", [Laden(), LadenDitto(), Local()])
def test_to_be_judged_only_the_models_travel(tmp_path, monkeypatch, method):
    sent = []
    monkeypatch.setattr(
        "raypfl.federation.backend.Inline.broadcast", lambda self, arrays: sent.append(arrays) or arrays
    )
    raypfl.run(experiment(tmp_path, rounds=1).replace(method=method))
    assert set(sent[-1]) == (set() if isinstance(method, Local) else {"shared"})


# -------------------------------------------------------------------------------------------- choosing and stopping


def validated(tmp_path, **changes):
    return experiment(
        tmp_path,
        rounds=12,
        data__val_fraction=0.3,
        evaluation__every=1,
        evaluation__protocols=["val", "local"],
        evaluation__metric="loss",
        training__lr=0.5,
        **changes,
    )


def chosen(result):
    return result.status, result.round, result.best_round


def validation_losses(result):
    """By round, of the personal models."""
    rows = {round: rows_of(result, protocol="val", model="personal", round=round) for round in range(1, 13)}
    return {round: np.mean([row["loss"] for row in found]) for round, found in rows.items() if found}


def test_the_best_round_is_the_one_with_the_best_validation_metric(tmp_path):
    result = raypfl.run(validated(tmp_path))
    losses = validation_losses(result)
    assert len(losses) == 12 and result.best_round == min(losses, key=losses.get)
    assert raypfl.Result.load(result.run_dir).best_round == result.best_round
    best = next(row for row in result.summary(result.best_round) if row["protocol"] == "val")
    assert best["loss"] == pytest.approx(min(losses.values()))
    worst = raypfl.run(validated(tmp_path, evaluation__mode="max"))
    assert worst.best_round == max(losses, key=losses.get)


def test_without_validation_no_round_is_chosen(tmp_path):
    assert raypfl.run(experiment(tmp_path, rounds=2)).best_round is None


def ending(losses, patience):
    """The round that a run with this patience ends with if more loss is better, and the best one until then."""
    for last in losses:
        best = max(range(1, last + 1), key=losses.get)
        if last - best >= patience:
            return last, best
    return last, best


def test_a_run_stops_when_its_patience_is_at_its_end_and_stays_stopped(tmp_path):
    losses = validation_losses(raypfl.run(validated(tmp_path, evaluation__mode="max")))
    assert ending(losses, 1)[0] < ending(losses, 3)[0] < 12
    result = raypfl.run(validated(tmp_path, evaluation__patience=1, evaluation__mode="max"))
    assert chosen(result) == ("finished", *ending(losses, 1))
    assert chosen(raypfl.resume(result.run_dir)) == ("finished", *ending(losses, 1))
    longer = raypfl.resume(result.run_dir, overrides=["evaluation.patience=3"])
    assert chosen(longer) == ("finished", *ending(losses, 3))
    patient = raypfl.run(validated(tmp_path, evaluation__patience=3, evaluation__mode="max"))
    assert longer.weights_hash == patient.weights_hash and longer.evaluations.equals(patient.evaluations)


def test_poisoned_test_data_changes_no_choice(tmp_path, arranged):
    honest = raypfl.run(validated(tmp_path, evaluation__patience=2))

    def poisoned(data):
        labels = data.labels.copy()
        for client in range(data.num_clients):
            tests = data.indices(client, "test")
            labels[tests] = (labels[tests] + 1) % data.num_classes
        return labels

    arranged(labels=poisoned)
    misled = raypfl.run(validated(tmp_path, evaluation__patience=2))
    assert rows_of(misled, protocol="local") != rows_of(honest, protocol="local")
    assert rows_of(misled, protocol="val") == rows_of(honest, protocol="val")
    assert chosen(misled) == chosen(honest) and misled.weights_hash == honest.weights_hash


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("protocols", "sentence"),
    [
        (["lokal"], "evaluation.protocols has 'lokal', which is no protocol; did you mean 'local'?"),
        ([], "evaluation.protocols is empty; it must name one or more of local, global, unseen, val, pm_v, pm_l, "),
        (["local", "local"], "evaluation.protocols has 'local' twice."),
        (["ood/corrupt/contrst"], "but there is no corruption 'contrst'; did you mean 'contrast'?"),
        (["ood/corrupt/contrast/6"], "evaluation.protocols has 'ood/corrupt/contrast/6', but severities are 1 to 5."),
        (["ood/"], "evaluation.protocols has 'ood/', which is no protocol"),
    ],
)
def test_a_protocol_that_does_not_exist_is_refused_with_the_nearest(protocols, sentence):
    with pytest.raises(ConfigError) as refused:
        raypfl.Experiment(evaluation={"protocols": protocols})
    assert sentence in str(refused.value)


def test_patience_without_validation_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation\.patience is 2, but evaluation\.protocols has no 'val'"):
        raypfl.Experiment(evaluation={"patience": 2})


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        ("ood/oddd", r"has 'ood/oddd', but data has no pool called 'oddd'; did you mean 'odd'\?"),
        ("val", r"has 'val', but no client has validation samples; set data\.val_fraction"),
        ("unseen", r"has 'unseen', but all clients are trained; set data\.unseen_fraction"),
    ],
)
def test_what_the_data_does_not_have_is_refused_before_anything_runs(tmp_path, arranged, protocol, sentence):
    arranged(pools={"ood/odd": np.arange(9)})
    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(experiment(tmp_path, evaluation__protocols=[protocol]))


def test_a_pool_of_other_classes_is_refused(tmp_path, arranged):
    arranged(
        pools={"odd": np.arange(9)}, labels=lambda data: np.where(np.arange(len(data.labels)) < 5, -1, data.labels)
    )
    with pytest.raises(ConfigError, match="samples of the pool 'odd' are of no known class"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["ood/odd"]))


def test_class_weights_for_samples_of_several_labels_are_refused(tmp_path, arranged):
    arranged(labels=lambda data: np.zeros((len(data.labels), 3), dtype=np.float32))
    with pytest.raises(ConfigError, match="has 'pm_v', which needs samples of one class each"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["pm_v"]))
