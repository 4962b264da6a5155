"""FedNH keeps to its paper: evenly spread prototypes, a head of cosines, a slow move toward the clients' features."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import FedBABU, FedNH
from raypfl.models import MODELS, FlatModel
from raypfl.models.heads import PrototypeHead, output_layer
from raypfl.models.prototypes import spread, uniform_prototypes
from raypfl.training.settings import TrainingSettings
from tests.runs import experiment
from tests.support import CLASSES, FP64, Federation, NormalisedConv, small_mlp

EXECUTORS = ["vectorised", "sequential"]
ROUNDS = ([0, 1, 3], [2, 3], [0, 2], [1, 3])
both = pytest.mark.parametrize("executor", EXECUTORS)


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False))


def played(method, *rounds, **options) -> Federation:
    fed = Federation(method=method, **{"group_size": 2, "training": FP64, **options})
    fed.play(*(rounds or ROUNDS))
    return fed


def prototypes(fed: Federation) -> Tensor:
    return fed.model.segment(fed.server["theta"], fed.model.names("output layer")[0])


def cosines(w: Tensor) -> Tensor:
    """Of every two different rows."""
    return (w @ w.T)[~torch.eye(len(w), dtype=torch.bool)]


@pytest.mark.parametrize(("count", "dimension"), [(10, 192), (100, 192), (200, 512), (4, 3), (2, 2)])
def test_up_to_one_more_prototype_than_dimensions_are_a_regular_simplex(count, dimension):
    w = uniform_prototypes(count, dimension, seed=1)
    torch.testing.assert_close(w.norm(dim=1), torch.ones(count, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (cosines(w) + 1 / (count - 1)).abs().max() < 1e-12
    assert w.sum(0).norm() < 1e-12
    other = uniform_prototypes(count, dimension, seed=2)
    assert torch.equal(w, uniform_prototypes(count, dimension, seed=1)) and not torch.allclose(w, other)
    torch.testing.assert_close(w @ w.T, other @ other.T, rtol=0, atol=1e-12)
    noise = torch.randn(count, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert cosines(F.normalize(noise)).max() > cosines(w).max()


@pytest.mark.parametrize(
    ("count", "dimension", "squared"),
    [(6, 2, 1.0), (6, 3, 2.0), (12, 3, 1.105573), (10, 16, 2.222222), (5, 3, 2.0), (8, 4, 2.0)],
)
def test_the_search_reaches_the_largest_smallest_distance_that_is_known(count, dimension, squared):
    for w in (spread(count, dimension, torch.Generator().manual_seed(0)), uniform_prototypes(count, dimension, 0)):
        assert 2 - 2 * float(cosines(w).max()) == pytest.approx(squared, abs=1e-4)


def test_a_prototype_head_compares_directions_only():
    head = PrototypeHead(uniform_prototypes(5, 8, 0).float(), 30.0, trainable=True, normalise=True)
    z = torch.randn(7, 8)
    out = head(z)
    torch.testing.assert_close(head.directions(z).norm(dim=1), torch.ones(7))
    torch.testing.assert_close(head(3.7 * z), out)
    assert out.abs().max() <= 30 and out.sum(1).abs().max() < 1e-4  # a simplex: the rows sum to zero
    nothing = torch.zeros(2, 8, requires_grad=True)
    head(nothing).sum().backward()
    assert torch.isfinite(nothing.grad).all()


def test_gradients_through_the_head_are_those_derived_for_it():
    s, w = 20.0, uniform_prototypes(4, 6, 0)
    head = PrototypeHead(w, s, trainable=True, normalise=True).double()
    z = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(head(z), torch.tensor([2])).backward()
    f = F.normalize(z[0].detach(), dim=0)
    p = (s * w @ f).softmax(0)
    error = p - F.one_hot(torch.tensor(2), 4)
    slope = s * w.T @ error
    torch.testing.assert_close(z.grad[0], (slope - f * (f @ slope)) / z[0].detach().norm())
    assert abs(float(z.grad[0] @ z[0].detach())) < 1e-12
    torch.testing.assert_close(head.scale.grad, (p @ (w @ f) - w[2] @ f))


@pytest.mark.parametrize(
    ("classes", "scale", "floor"),
    [
        (10, 1, 1.376935),
        (10, 10, 1.34499e-4),
        (10, 20, 2.01027e-9),
        (10, 30, 3.00441e-14),
        (100, 1, 3.612377),
        (100, 10, 4.05454e-3),
        (100, 20, 1.66728e-7),
        (100, 30, 6.84221e-12),
        (200, 1, 4.301915),
        (200, 10, 8.55511e-3),
        (200, 20, 3.70950e-7),
        (200, 30, 1.60157e-11),
    ],
)
def test_the_loss_has_the_floor_that_the_scale_sets(classes, scale, floor):
    w = uniform_prototypes(classes, classes + 1, 0)
    head = PrototypeHead(w, scale, trainable=False, normalise=True).double()
    losses = F.cross_entropy(head(w), torch.arange(classes))
    assert losses.item() == pytest.approx(floor, rel=1e-4, abs=1e-15)
    assert floor == pytest.approx(
        math.log1p((classes - 1) * math.exp(-scale * classes / (classes - 1))), rel=1e-4, abs=0
    )


@both
@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv])
def test_clients_train_the_body_against_fixed_prototypes(factory, executor):
    fed = Federation(factory, executor=executor, method=FedNH(), training=replace(FP64, weight_decay=0.1, momentum=0.9))
    fed.play(None)
    start = fed.method.start(fed.task)["theta"]
    weight = fed.model.mask(fed.model.names("output layer")[0])
    for client in range(4):
        model = torch.from_numpy(fed.state_of(client)["model"])
        assert torch.equal(model[weight], start[weight]) and (model != start)[~weight].any()


@both
def test_the_scale_is_trained_and_averaged_without_weight_decay(executor):
    fixed = played(FedNH(train_scale=False), executor=executor)
    assert fixed.model.names("output layer") == ["3.weight"]
    ends = {}
    for decay in (0.0, 0.1):
        fed = played(FedNH(), None, executor=executor, training=replace(FP64, lr=1e-3, weight_decay=decay, epochs=20))
        place = fed.model.segments["3.scale"].start
        scales = [float(fed.state_of(c)["model"][place]) for c in range(4)]
        assert len(set(scales)) == 4
        ends[decay] = float(fed.server["theta"][place])
        assert ends[decay] == pytest.approx(np.mean(scales), rel=1e-12)
    # With weight decay it would be 30 * 0.1 * 1e-3 less for each of some 40 steps.
    assert ends[0.1] == pytest.approx(ends[0.0], abs=0.02) and abs(ends[0.0] - 30) > 1e-6


@both
@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv])
def test_a_round_by_hand(factory, executor):
    fed = Federation(factory, executor=executor, method=FedNH(rho=0.7), training=FP64, group_size=3)
    start = fed.method.start(fed.task)["theta"]
    fed.play(None)
    name = fed.model.names("output layer")[0]
    old = fed.model.segment(start, name)
    sums, bodies = torch.zeros_like(old), []
    for client in range(4):
        theta = torch.from_numpy(fed.state_of(client)["model"])
        module = fed.model.factory().double().eval()
        tensors = fed.model.unflatten(theta)
        module.load_state_dict(tensors, strict=False)
        seen = []
        module.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(
            lambda _, z, seen=seen: seen.append(z[0])
        )
        x, y = fed.samples(client)
        with torch.no_grad():
            module(x)
        f = seen[0] / seen[0].norm(dim=1, keepdim=True)
        for c in y.unique():
            sums[c] += f[y == c].mean(0)
        bodies.append(theta)
    new = 0.7 * old + 0.3 * sums / 4
    torch.testing.assert_close(prototypes(fed), new / new.norm(dim=1, keepdim=True), rtol=1e-10, atol=1e-10)
    body = ~fed.model.mask(name)
    torch.testing.assert_close(fed.server["theta"][body], torch.stack(bodies).mean(0)[body], rtol=1e-10, atol=1e-10)


def test_the_prototypes_of_the_worked_example():
    old = torch.tensor([[1.0, 0], [0, 1], [-1, 0]], dtype=torch.float64)
    means = torch.tensor([[[0.3, 0.4], [0, 0], [0, 0]], [[0.8, 0.0], [0.5, 0.5], [0, 0]]], dtype=torch.float64)
    literal = FedNH(rho=0.9).moved(old, means.sum(0), 2.0)
    expected = [[0.99978078, 0.02093782], [0.02701716, 0.99963497], [-1, 0]]
    torch.testing.assert_close(literal, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(literal[2], old[2])
    owners = torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64)
    theirs = FedNH(rho=0.9, missing="owners").moved(old, means.sum(0), owners)
    torch.testing.assert_close(
        theirs[1], torch.tensor([0.05255883, 0.99861783], dtype=torch.float64), rtol=0, atol=1e-8
    )
    assert torch.equal(theirs[2], old[2])


def test_a_prototype_that_means_pull_to_nothing_stays_where_it_was():
    old = F.normalize(torch.randn(2, 4, dtype=torch.float64))
    sums = torch.stack([-old[0], old[1]])
    moved = FedNH(rho=0.5).moved(old, sums, 1.0)
    assert torch.equal(moved[0], old[0])
    torch.testing.assert_close(moved[1], old[1])


@pytest.mark.parametrize("head", ["random", "default"])
def test_a_head_may_begin_with_the_rows_that_torch_draws_or_with_their_directions(head):
    fed = Federation(method=FedNH(head=head), training=FP64)
    fed.server = fed.method.start(fed.task)
    drawn = fed.model.segment(fed.model.init(fed.seed), "3.weight")
    assert torch.equal(prototypes(fed), drawn / drawn.norm(dim=1, keepdim=True) if head == "random" else drawn)
    fed.play(*ROUNDS)
    torch.testing.assert_close(prototypes(fed).norm(dim=1), torch.ones(CLASSES, dtype=torch.float64))


def test_a_client_without_a_class_weakens_its_pull_and_does_not_turn_it():
    rho, old = 0.9, F.normalize(torch.randn(1, 4, dtype=torch.float64))
    sums = torch.rand(1, 4, dtype=torch.float64)
    one, two = (rho * old + (1 - rho) * sums / n for n in (3.0, 4.0))
    for n, v in ((3.0, one), (4.0, two)):
        torch.testing.assert_close(FedNH(rho=rho).moved(old, sums, n), F.normalize(v))
    torch.testing.assert_close(two - rho * old, (one - rho * old) * 3 / 4)


@pytest.mark.parametrize("rho", [0.9, 0.7])
def test_prototypes_stay_of_length_one_and_move_no_further_than_the_bound(rho):
    fed = Federation(method=FedNH(rho=rho), training=replace(FP64, epochs=3))
    fed.server = fed.method.start(fed.task)
    bound = 2 * math.sin(0.5 * math.asin((1 - rho) / rho))
    for ids in ROUNDS:
        before = prototypes(fed).clone()
        fed.play(ids)
        torch.testing.assert_close(prototypes(fed).norm(dim=1), torch.ones(CLASSES, dtype=torch.float64))
        assert 0 < (prototypes(fed) - before).norm(dim=1).max() <= bound + 1e-12


def test_a_class_that_nobody_has_keeps_its_prototype_to_the_bit():
    fed = Federation(method=FedNH(), training=FP64)
    fed.labels = np.minimum(fed.labels, 1)
    start = fed.model.segment(fed.method.start(fed.task)["theta"], "3.weight")
    fed.play(*ROUNDS)
    assert torch.equal(prototypes(fed)[2], start[2]) and not torch.equal(prototypes(fed)[:2], start[:2])


@both
def test_without_smoothing_normalising_or_scale_its_body_is_fedbabus_to_the_bit(executor):
    method = FedNH(rho=1.0, head="default", normalise=False, scale=1.0, train_scale=False)
    training = TrainingSettings(batch_size=4, lr=0.1, epochs=2, momentum=0.5)
    nh, babu = (
        played(m, factory=without_bias, executor=executor, training=training)
        for m in (method, FedBABU(weighting="uniform", finetune_epochs=0))
    )
    assert torch.equal(nh.server["theta"], babu.server["theta"])


def test_prototypes_that_are_not_smoothed_never_move():
    fed = played(FedNH(rho=1.0))
    assert torch.equal(prototypes(fed), fed.model.segment(fed.method.start(fed.task)["theta"], "3.weight"))


def test_the_personal_model_is_the_last_trained_with_the_prototypes_it_was_trained_against():
    fed = played(FedNH(), [0, 1])
    models = fed.method.personal_model(
        fed.clients([0], model=torch.from_numpy(fed.state_of(0)["model"])[None]), fed.server
    )
    assert (models.numpy()[0] == fed.state_of(0)["model"]).all()
    never = fed.method.personal_model(fed.clients([3]), fed.server)
    assert torch.equal(never.as_subclass(Tensor)[0], fed.server["theta"])


def with_classes(fed: Federation, *owned: tuple[int, ...]) -> Federation:
    """Give each client samples of these classes alone."""
    for where, classes in zip(fed.split, owned, strict=True):
        fed.labels[where] = np.resize(classes, len(where))
    return fed


@pytest.mark.parametrize("missing", ["zero", "owners", "samples"])
def test_a_client_sends_the_body_the_scale_and_a_row_for_each_class_that_it_has(missing):
    model = Federation(lambda: MODELS.get("conv2cifar")((3, 32, 32), 10), method=FedNH()).model
    assert model.num_parameters == 796_032 + 1 + 10 * 192
    fed = Federation(method=FedNH(missing=missing), group_size=2)
    with_classes(fed, (0, 1, 2), (1,), (0, 2), (0, 1)).play(None)
    body, d = 32 * 5 + 5 + 1, 5
    sent = [("down", "body", 4, body), ("down", "prototypes", 4, 3 * d), ("up", "body", 4, body)]
    sent += [("up", "means", clients, classes * d) for classes, clients in ((3, 1), (2, 2), (1, 1))]
    if missing == "samples":
        sent += [("up", "weights", clients, classes) for classes, clients in ((3, 1), (2, 2), (1, 1))]
    assert [(e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries] == sent


@pytest.mark.parametrize("missing", ["zero", "owners", "samples"])
def test_how_a_cohort_is_cut_changes_rounding_only(missing):
    a, b = (
        played(FedNH(missing=missing), group_size=g, executor=e, factory=NormalisedConv)
        for g, e in ((2, "vectorised"), (3, "sequential"))
    )
    torch.testing.assert_close(a.server["theta"], b.server["theta"], rtol=1e-9, atol=1e-9)


def test_a_network_without_a_dense_layer_at_its_end_is_refused():
    with pytest.raises(ConfigError, match=r"its last layer, 0, is a Conv2d; register an nn\.Linear last"):
        output_layer(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten()))
    with pytest.raises(ConfigError, match=r"method.rho is 1.2; it must be between 0 and 1"):
        raypfl.Experiment(method={"name": "fednh", "rho": 1.2})


def test_it_learns_digits_and_its_table_has_both_models(tmp_path):
    result = raypfl.run(experiment(tmp_path, method="fednh", rounds=12, cohort__size=12, evaluation__every=0))
    accuracy = {(s["model"], s["protocol"]): s["accuracy"] for s in result.summary()}
    assert accuracy["global", "global"] > 0.8 and accuracy["personal", "local"] > 0.85
    model = FlatModel(lambda: FedNH().network(MODELS.get("mlp")((1, 8, 8), 10, hidden=[16])))
    assert result.global_model().shape == (model.size,)


def test_it_logs_how_far_prototypes_move_and_their_cosines_the_closest_pair_first():
    fed = Federation(method=FedNH(), training=FP64)
    old = fed.model.segment(fed.method.start(fed.task)["theta"], fed.model.names("output layer")[0])
    fed.play(None, None)
    logged = [cohort.logged for cohort in fed.cohorts]
    fed = played(FedNH(), None)
    new = prototypes(fed)
    assert logged[0].values["prototype_distance"] == pytest.approx(float((new - old).norm(dim=1).mean()))
    table = fed.cohorts[0].logged.tables["prototype_cosines"]
    pairs = zip(table["class"].tolist(), table["other"].tolist(), strict=True)
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2)] and (np.diff(table["cosine"]) <= 0).all()
    np.testing.assert_allclose(table["cosine"], (new @ new.T)[table["class"], table["other"]])
