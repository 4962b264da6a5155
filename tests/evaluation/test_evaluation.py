"""Evaluation of models: metrics against scikit-learn and torch, protocols against counting by hand."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F

import raypfl
from raypfl.common.messages import per_client
from raypfl.engine.scoring import score
from raypfl.evaluation import Measures
from raypfl.evaluation.corruptions import CORRUPTIONS, SEVERITIES, Corruption
from raypfl.evaluation.tables import tabulate
from raypfl.learning.objectives import MultiLabel, OverAll
from raypfl.learning.sample_pools import Pools
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import Ditto
from tests.support.federation import CLASSES, EXECUTORS, Federation, as_module

# ------------------------------------------------------------------------------------------------- a group of clients


def judged_federation(executor, factory=None, **options):
    """A federation whose clients have 3, 1, 0 and 11 test samples."""
    fed = Federation(executor=executor, **({"factory": factory} if factory else {}), **options)
    tests = [np.array([3, 1, 8]), np.array([2]), np.zeros(0, dtype=np.int64), np.arange(9, 20)]
    fed.context.split = lambda client, name: fed.split[client] if name == "train" else tests[client]
    fed.context.evaluation_batch = 4
    fed.tests = tests
    return fed


def models_of(fed):
    draws = torch.Generator().manual_seed(5)
    return 0.4 * torch.randn(4, fed.model.size, generator=draws, dtype=torch.float64)


def by_hand(fed, theta, samples):
    """Number of right answers, summed loss, logits and labels of these samples, by torch alone."""
    y = torch.from_numpy(fed.labels[samples])
    with torch.no_grad():
        logits = as_module(fed.factory, theta).eval()(fed.normalised(samples))

    right = int((logits.argmax(1) == y).sum())
    loss = float(F.cross_entropy(logits, y, reduction="sum"))
    return right, loss, logits, y


def scored(fed, personal=None, shared=None, protocols=("local", "global"), groups=((0, 1, 2, 3),), masks=()):
    """The rows of an evaluation by protocol, model and client, added up over groups as the server does."""
    total: dict[str, torch.Tensor] = {}
    for ids in groups:
        group = fed.group(ids)

        def personal_model(clients):
            return None if personal is None else per_client(personal[list(clients.ids)])

        for name, value in score(group, personal_model, shared, protocols, [(i, 4) for i in ids], masks).items():
            rows = value.rows
            if isinstance(value, raypfl.Each):
                total.setdefault(name, torch.zeros(4, rows.shape[1], dtype=torch.float64))[list(ids)] = rows
            else:
                total[name] = total.get(name, 0) + rows.sum(0)

    table = tabulate(fed.context.measures, 7, total, range(4), protocols, masks)
    rows = {}
    for values in zip(*table.values(), strict=True):
        # NaN as None, so that rows can be compared: NaN differs from itself.
        row = {name: None if value != value else value for name, value in zip(table, values, strict=True)}
        rows[row["protocol"], row["model"], row["client"]] = row
    return rows


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_client_is_judged_on_its_own_and_on_everybodys_tests_with_both_models(executor):
    fed = judged_federation(executor)
    personal = models_of(fed)
    shared = personal[0] + 0.3
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
    """A network that records whether it runs under autocast, and whether images have channels last."""

    calls: ClassVar[list[tuple[bool, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(16, CLASSES)

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

    x = fed.normalised(fed.tests[3]).float()
    y = torch.from_numpy(fed.labels[fed.tests[3]])
    with torch.no_grad():
        exact = float(F.cross_entropy(as_module(Watched, personal[3])(x), y))

    assert table["local", "personal", 3]["loss"] == pytest.approx(exact, rel=0.05)
    assert table["local", "personal", 3]["loss"] != pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_class_weighted_accuracy_is_the_sum_over_everybodys_tests_weighed_by_the_clients_classes(executor):
    fed = judged_federation(executor)
    personal = models_of(fed)
    shared = personal[0] + 0.3
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
    fed.context.pools = Pools(fed.context.samples, {"ood/strange": np.arange(20, 31)})
    batch_sizes = []
    executor_class = type(fed.context.executor)
    predict = executor_class.predict

    def record_batch(self, at, x, **options):
        batch_sizes.append(x.shape[0])
        return predict(self, at, x, **options)

    monkeypatch.setattr(executor_class, "predict", record_batch)
    shared = models_of(fed)[1]
    table = scored(fed, None, shared, ("ood/strange",), groups=((0, 2), (1,), (3,)))
    right, loss, *_ = by_hand(fed, shared, np.arange(20, 31))
    (row,) = table.values()

    assert (row["client"], row["samples"], row["accuracy"]) == (-1, 11, pytest.approx(right / 11))
    assert row["loss"] == pytest.approx(loss / 11, rel=1e-6)
    assert sum(batch_sizes) == 11


def with_several_labels(fed: Federation) -> Federation:
    fed.labels = (np.random.default_rng(2).random((len(fed.labels), CLASSES)) < 0.5).astype(np.int8)
    fed.context.samples = replace(fed.context.samples, labels=fed.labels)
    fed.context.measures = Measures(MultiLabel(), targets=CLASSES)
    return fed


@pytest.mark.parametrize("executor", EXECUTORS)
def test_several_labels_a_sample_give_every_client_and_the_union_an_area_under_the_curve(executor):
    fed = with_several_labels(judged_federation(executor))
    personal = models_of(fed)
    shared = personal[0] + 0.3
    table = scored(fed, personal, shared, ("local", "global"), groups=((0, 2), (1, 3)))
    union = np.concatenate(fed.tests)

    def area(theta, samples):
        with torch.no_grad():
            scores = as_module(fed.factory, theta)(fed.normalised(samples))
        return roc_auc_score(fed.labels[samples], scores.numpy(), average="macro")

    assert table["global", "global", -1]["auc"] == pytest.approx(area(shared, union))
    for k in range(4):
        assert table["global", "personal", k]["auc"] == pytest.approx(area(personal[k], union))
    assert table["local", "personal", 3]["auc"] == pytest.approx(area(personal[3], fed.tests[3]))

    # A single sample has positives or negatives of a label, never both.
    row = table["local", "personal", 1]
    assert row["auc"] is None and row["left_out"] == CLASSES and row["ece"] is None


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_common_set_whose_labels_are_several_is_scored_as_a_whole(executor):
    fed = with_several_labels(judged_federation(executor))
    fed.context.pools = Pools(fed.context.samples, {"strange": np.arange(20, 34)})
    cut = scored(fed, None, models_of(fed)[1], ("ood/strange",), groups=((0, 2), (1,), (3,)))

    assert cut == scored(fed, None, models_of(fed)[1], ("ood/strange",))
    assert cut["ood/strange", "global", -1]["samples"] == 14


class Spread(OverAll):
    """The deviation of all logits."""

    name: ClassVar[str] = "spread"

    def of_all(self, outputs, targets):
        return float(outputs.std())


def test_a_metric_of_all_outputs_changes_no_other_metric_by_any_protocol():
    protocols = ("local", "global", "pm_v", "pm_l")

    def table(*extra):
        fed = judged_federation("vectorised")
        fed.context.measures = Measures(extra=extra, targets=CLASSES)
        return scored(fed, models_of(fed), models_of(fed)[1], protocols, groups=((0, 2), (1, 3)))

    plain = table()
    with_spread = table(Spread())
    assert list(with_spread) == list(plain)
    for (protocol, model, client), row in with_spread.items():
        assert (row["spread"] is None) == protocol.startswith("pm_")
        for column in ("samples", "accuracy", "loss"):
            assert row[column] == pytest.approx(plain[protocol, model, client][column], rel=1e-9)


# -------------------------------------------------------------------------------------------------- states in place


class ChangesItsState(Ditto):
    """Ditto that changes in place the model that it reads from a client's state."""

    def personal_model(self, clients, server):
        theta = clients.state.get("personal", default=clients.initial)
        theta += 1.0
        theta[:, :3] = 0.0
        return theta


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_method_may_change_a_state_in_evaluation_and_the_stored_state_stays(executor):
    fed = judged_federation(executor)
    states = models_of(fed).numpy().copy()
    states.flags.writeable = False
    group = fed.group(states=[{"personal": row} for row in states])
    values = score(group, lambda clients: ChangesItsState().personal_model(clients, {}), None, ("local",), [])
    changed = torch.tensor(states) + 1.0
    changed[:, :3] = 0.0

    for k in (0, 1, 3):
        right, *_ = by_hand(fed, changed[k], fed.tests[k])
        assert values["personal/local"].rows[k, 1] == pytest.approx(right / len(fed.tests[k]))


def test_a_model_that_is_judged_alone_is_read_without_a_copy_of_its_state():
    fed = judged_federation("sequential")
    states = models_of(fed).numpy()
    group = fed.group(states=[{"personal": row} for row in states])
    addresses = []

    def personal_model(clients):
        addresses.append(clients.state["personal"].data_ptr())
        return clients.state["personal"]

    score(group, personal_model, None, ("local",), [])

    assert addresses == [row.ctypes.data for row in states]


# ------------------------------------------------------------------------------------------------------- corruptions


@pytest.mark.parametrize("room", [0, 10**9])
def test_every_model_sees_the_same_corrupted_images_cached_or_not(room):
    fed = judged_federation("sequential")
    fed.context.scale = 16.0
    fed.context.corrupted_bytes = room
    personal = models_of(fed)
    personal[2] = personal[0]
    table = scored(fed, personal, personal[0], ("ood/corrupt/impulse_noise/5",), groups=((0, 2), (1, 3)))
    rows = [table["ood/corrupt/impulse_noise/5", "personal", k] for k in range(4)]
    shared = table["ood/corrupt/impulse_noise/5", "global", -1]

    assert rows[0] | {"client": 2} == rows[2] and bool(fed.context.corrupted) == bool(room)
    assert shared["loss"] == pytest.approx(rows[0]["loss"]) and shared["samples"] == 15
    assert rows[0]["loss"] != pytest.approx(by_hand(fed, personal[0], np.concatenate(fed.tests))[1] / 15)


def pictures(channels=3, side=32):
    return torch.from_numpy(np.random.default_rng(0).integers(60, 190, (5, channels, side, side), dtype=np.uint8))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_is_the_same_in_any_batch_and_grows_with_its_severity(name):
    x = pictures()
    sample_ids = np.array([4, 90, 2, 17, 3])
    whole = Corruption(name, 3)(x, sample_ids, 255.0)
    assert whole.dtype == torch.uint8 and whole.shape == x.shape and not torch.equal(whole, x)
    assert torch.equal(Corruption(name, 3)(x[1:3], sample_ids[1:3], 255.0), whole[1:3])
    assert len({Corruption(name, s)(x, sample_ids, 255.0).numpy().tobytes() for s in SEVERITIES}) == len(SEVERITIES)

    # The first two severities of saturation take colour away, and the others add some.
    if name != "saturation":
        damage = [(Corruption(name, s)(x, sample_ids, 255.0).float() - x.float()).square().mean() for s in SEVERITIES]
        assert damage == sorted(damage)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_small_grey_images_of_another_scale_can_be_corrupted(name):
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 17, (4, 1, 8, 8), dtype=np.uint8))
    worse = Corruption(name, 5)(x, np.arange(4), 16.0)
    assert worse.shape == x.shape and int(worse.max()) <= 16


def gray(x):
    return (x * torch.tensor([0.299, 0.587, 0.114]).reshape(-1, 1, 1)).sum(1, keepdim=True)  # ITU-R BT.601


def blurred(x, sigma):
    options = {"mode": "mirror", "radius": math.ceil(3 * sigma), "axes": (2, 3)}
    return torch.from_numpy(gaussian_filter(x.numpy(), sigma, **options))


def as_jpeg(x, quality):
    files = [io.BytesIO() for _ in x]
    for image, file in zip(x, files, strict=True):
        pixels = (255 * image).round().to(torch.uint8).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]) / 255


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize(
    ("name", "strengths", "reference"),
    [
        ("gaussian_blur", (0.4, 0.6, 0.7, 0.8, 1.0), blurred),
        ("brightness", (0.05, 0.1, 0.15, 0.2, 0.3), lambda x, added: x + added),
        ("contrast", (0.75, 0.5, 0.4, 0.3, 0.15), lambda x, f: f * x + (1 - f) * gray(x).mean((1, 2, 3), keepdim=True)),
        ("saturation", (0.3, 0.1, 1.5, 2.0, 2.5), lambda x, f: f * x + (1 - f) * gray(x)),
        ("jpeg", (80, 65, 58, 50, 40), as_jpeg),
    ],
)
def test_a_corruption_equals_a_reference_implementation_at_its_strength(name, strengths, reference, severity):
    x = pictures()
    expected = 255 * reference(x / 255, strengths[severity - 1]).clamp(0, 1)
    torch.testing.assert_close(Corruption(name, severity)(x, np.arange(5), 255.0).float(), expected, atol=1.01, rtol=0)


@pytest.mark.parametrize(("severity", "side"), [(1, 30), (2, 28), (3, 27), (4, 24), (5, 20)])
def test_a_pixelated_picture_has_fewer_rows_and_columns(severity, side):
    worse = Corruption("pixelate", severity)(pictures(), np.arange(5), 255.0)
    for image in worse:
        assert len(image.unique(dim=1)[0]) == len(image.unique(dim=2)[0][0]) == side


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_is_as_strong_as_its_severity_says(severity):
    x = torch.full((8, 1, 60, 60), 100, dtype=torch.uint8)

    def changed(name):
        return Corruption(name, severity)(x, np.arange(8), 255.0).float() / 255 - 100 / 255

    gaussian, speckle, impulse = map(changed, ("gaussian_noise", "speckle_noise", "impulse_noise"))
    assert float(gaussian.std()) == pytest.approx((0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1], rel=0.03)
    assert float(speckle.std()) == pytest.approx((0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1] * 100 / 255, rel=0.03)
    assert float((impulse != 0).float().mean()) == pytest.approx((0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1], rel=0.1)
    assert float((impulse > 0).sum() / (impulse != 0).sum()) == pytest.approx(0.5, abs=0.1)


def test_noise_has_its_strength_and_differs_from_sample_to_sample():
    x = torch.full((8, 1, 40, 40), 128, dtype=torch.uint8)
    worse = Corruption("gaussian_noise", 5)(x, np.arange(8), 255.0).float()
    assert float(worse.std() / 255) == pytest.approx(0.10, rel=0.03)
    assert float(worse.mean() / 255) == pytest.approx(128 / 255, abs=0.005)
    assert len({image.numpy().tobytes() for image in worse}) == 8
