"""FedNH follows its paper: evenly spread prototypes, a head of cosines, slow updates toward clients' features."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import FedBABU, FedNH, PartialPersonalization
from raypfl.methods.uniform_prototypes import search_prototypes, uniform_prototypes
from raypfl.models import MODELS
from raypfl.models.heads import PrototypeHead, output_layer, with_output_layer
from tests.support import federation as support
from tests.support.federation import (
    CLASSES,
    FP32,
    FP64,
    ROUNDS,
    Federation,
    assert_close,
    both_executors,
    both_networks,
    sent_per_client,
    small_mlp,
    without_bias,
)

run_method = partial(support.run_method, training=FP64)


def prototypes(fed: Federation) -> Tensor:
    return fed.model.segment(fed.server["theta"], fed.model.names("output layer")[0])


def cosines(w: Tensor) -> Tensor:
    """Return the cosines of all pairs of different rows."""
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
def test_the_search_reaches_the_best_known_smallest_distance(count, dimension, squared):
    for w in (
        search_prototypes(count, dimension, torch.Generator().manual_seed(0)),
        uniform_prototypes(count, dimension, 0),
    ):
        assert 2 - 2 * float(cosines(w).max()) == pytest.approx(squared, abs=1e-4)


@pytest.mark.parametrize(("count", "dimension"), [(66, 64), (100, 64), (128, 64), (8, 5)])
def test_up_to_twice_as_many_prototypes_as_dimensions_are_axes_and_their_opposites(count, dimension):
    w = uniform_prototypes(count, dimension, seed=1)
    assert abs(float(cosines(w).max())) < 1e-12 and torch.allclose(w.norm(dim=1), torch.ones(1).double())


def test_a_single_class_has_a_unit_prototype():
    assert float(uniform_prototypes(1, 5, seed=0).norm()) == pytest.approx(1.0)


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


@both_executors
def test_the_scale_is_trained_and_averaged_without_weight_decay(executor):
    fixed = run_method(FedNH(train_scale=False), executor=executor)
    assert fixed.model.names("output layer") == ["3.weight"]
    ends = {}
    for decay in (0.0, 0.1):
        fed = run_method(
            FedNH(), None, executor=executor, training=replace(FP64, lr=1e-3, weight_decay=decay, epochs=20)
        )
        place = fed.model.segments["3.scale"].start
        scales = [float(fed.state_of(c)["model"][place]) for c in range(4)]
        assert len(set(scales)) == 4
        ends[decay] = float(fed.server["theta"][place])
        assert ends[decay] == pytest.approx(np.mean(scales), rel=1e-12)

    # With weight decay it would be 30 * 0.1 * 1e-3 less for each of some 40 steps.
    assert ends[0.1] == pytest.approx(ends[0.0], abs=0.02) and abs(ends[0.0] - 30) > 1e-6


@both_executors
@both_networks
def test_a_round_of_fednh_by_hand(factory, executor):
    fed = Federation(factory, executor=executor, method=FedNH(rho=0.7), training=FP64, group_size=3)
    start = fed.method.start(fed.task)["theta"]
    fed.run_rounds(None)
    name = fed.model.names("output layer")[0]
    old = fed.model.segment(start, name)
    sums = torch.zeros_like(old)
    bodies = []

    for client in range(4):
        theta = torch.from_numpy(fed.state_of(client)["model"])
        module = fed.model.factory().double().eval()
        tensors = fed.model.unflatten(theta)
        module.load_state_dict(tensors, strict=False)
        features = []
        module.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(
            lambda _, z, features=features: features.append(z[0])
        )
        x, y = fed.samples(client)
        with torch.no_grad():
            module(x)
        f = features[0] / features[0].norm(dim=1, keepdim=True)
        for c in y.unique():
            sums[c] += f[y == c].mean(0)
        bodies.append(theta)

    new = 0.7 * old + 0.3 * sums / 4
    assert_close(prototypes(fed), new / new.norm(dim=1, keepdim=True))
    body = ~fed.model.mask(name)
    assert_close(fed.server["theta"][body], torch.stack(bodies).mean(0)[body])


def test_the_prototypes_of_the_worked_example():
    old = torch.tensor([[1.0, 0], [0, 1], [-1, 0]], dtype=torch.float64)
    means = torch.tensor([[[0.3, 0.4], [0, 0], [0, 0]], [[0.8, 0.0], [0.5, 0.5], [0, 0]]], dtype=torch.float64)
    literal = FedNH(rho=0.9).move_prototypes(old, means.sum(0), 2.0)
    expected = [[0.99978078, 0.02093782], [0.02701716, 0.99963497], [-1, 0]]

    torch.testing.assert_close(literal, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
    assert torch.equal(literal[2], old[2])
    owners = torch.tensor([[2.0], [1.0], [0.0]], dtype=torch.float64)
    by_owners = FedNH(rho=0.9, missing="owners").move_prototypes(old, means.sum(0), owners)

    torch.testing.assert_close(
        by_owners[1], torch.tensor([0.05255883, 0.99861783], dtype=torch.float64), rtol=0, atol=1e-8
    )
    assert torch.equal(by_owners[2], old[2])


def test_a_prototype_whose_update_would_be_zero_stays_unchanged():
    old = F.normalize(torch.randn(2, 4, dtype=torch.float64))
    sums = torch.stack([-old[0], old[1]])
    moved = FedNH(rho=0.5).move_prototypes(old, sums, 1.0)
    assert torch.equal(moved[0], old[0])
    torch.testing.assert_close(moved[1], old[1])


@pytest.mark.parametrize("head", ["random", "default"])
def test_a_head_may_start_from_torchs_random_rows_or_from_their_directions(head):
    fed = Federation(method=FedNH(head=head), training=FP64)
    fed.server = fed.method.start(fed.task)
    initial = fed.model.segment(fed.model.init(fed.seed), "3.weight")
    assert torch.equal(prototypes(fed), initial / initial.norm(dim=1, keepdim=True) if head == "random" else initial)
    fed.run_rounds(*ROUNDS)
    torch.testing.assert_close(prototypes(fed).norm(dim=1), torch.ones(CLASSES, dtype=torch.float64))


def test_a_class_without_samples_keeps_its_prototype_to_the_bit():
    fed = Federation(method=FedNH(), training=FP64)
    fed.labels = np.minimum(fed.labels, 1)
    start = fed.model.segment(fed.method.start(fed.task)["theta"], "3.weight")
    fed.run_rounds(*ROUNDS)
    assert torch.equal(prototypes(fed)[2], start[2]) and not torch.equal(prototypes(fed)[:2], start[:2])


@both_executors
def test_without_smoothing_normalising_or_scale_fednhs_body_is_fedbabus_to_the_bit(executor):
    method = FedNH(rho=1.0, head="default", normalise=False, scale=1.0, train_scale=False)
    training = TrainingSettings(batch_size=4, lr=0.1, epochs=2, momentum=0.5)
    nh, babu = (
        run_method(m, factory=without_bias, executor=executor, training=training)
        for m in (method, FedBABU(weighting="uniform", finetune_epochs=0))
    )
    assert torch.equal(nh.server["theta"], babu.server["theta"])


def test_the_personal_model_is_the_last_trained_with_the_prototypes_it_was_trained_against():
    fed = run_method(FedNH(), [0, 1])
    models = fed.method.personal_model(
        fed.clients([0], model=torch.from_numpy(fed.state_of(0)["model"])[None]), fed.server
    )
    assert (models.numpy()[0] == fed.state_of(0)["model"]).all()
    never = fed.method.personal_model(fed.clients([3]), fed.server)
    assert torch.equal(never.as_subclass(Tensor)[0], fed.server["theta"])


def with_classes(fed: Federation, *owned: tuple[int, ...]) -> Federation:
    """Give each client samples of these classes alone."""
    for indices, classes in zip(fed.split, owned, strict=True):
        fed.labels[indices] = np.resize(classes, len(indices))
    return fed


@pytest.mark.parametrize("missing", ["zero", "owners", "samples"])
def test_a_client_sends_the_body_the_scale_and_a_row_for_each_class_that_it_has(missing):
    model = Federation(lambda: MODELS.get("conv2cifar")((3, 32, 32), 10), method=FedNH()).model
    assert model.num_parameters == 796_032 + 1 + 10 * 192
    fed = Federation(method=FedNH(missing=missing), group_size=2)
    with_classes(fed, (0, 1, 2), (1,), (0, 2), (0, 1)).run_rounds(None)
    body = 32 * 5 + 5 + 1
    d = 5
    sent = [("down", "body", 4, body), ("down", "prototypes", 4, 3 * d), ("up", "body", 4, body)]
    sent += [("up", "means", clients, classes * d) for classes, clients in ((3, 1), (2, 2), (1, 1))]
    if missing == "samples":
        sent += [("up", "weights", clients, classes) for classes, clients in ((3, 1), (2, 2), (1, 1))]
    assert [(e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries] == sent


def test_a_network_without_a_dense_layer_at_its_end_is_refused():
    with pytest.raises(ConfigError, match=r"its last layer, 0, is a Conv2d; register an nn\.Linear last"):
        output_layer(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten()))


def test_it_logs_prototype_movement_and_cosines_with_the_closest_pair_first():
    fed = Federation(method=FedNH(), training=FP64)
    old = fed.model.segment(fed.method.start(fed.task)["theta"], fed.model.names("output layer")[0])
    fed.run_rounds(None, None)
    logged = [cohort.logged for cohort in fed.cohorts]
    fed = run_method(FedNH(), None)
    new = prototypes(fed)

    assert logged[0].values["prototype_distance"] == pytest.approx(float((new - old).norm(dim=1).mean()))
    table = fed.cohorts[0].logged.tables["prototype_cosines"]
    pairs = zip(table["class"].tolist(), table["other"].tolist(), strict=True)
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 2)] and (np.diff(table["cosine"]) <= 0).all()
    np.testing.assert_allclose(table["cosine"], (new @ new.T)[table["class"], table["other"]])


class FedAvgUnderAFixedHead(PartialPersonalization):
    """FedAvg of the body and the scale, under the head with which FedNH begins."""

    personal: str = ""
    frozen: str = "3.weight"
    weighting: str = "uniform"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        rows = uniform_prototypes(layer.out_features, layer.in_features, seed=3).to(layer.weight)
        return with_output_layer(network, PrototypeHead(rows, 30.0, trainable=True, normalise=True))


@both_executors
def test_with_fixed_prototypes_fednh_is_fedavg_under_a_fixed_head_to_the_bit(executor):
    methods = (FedAvgUnderAFixedHead(), FedNH(rho=1.0), FedNH())
    fixed, still, moving = (run_method(m, executor=executor, training=FP32).server["theta"] for m in methods)
    assert torch.equal(still, fixed) and not torch.equal(moving, fixed)


def by_hand(fed: Federation, rounds: int, rho: float, s: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Train a client in plain torch under a moving average of its class means; returns body, scale and head."""
    body = nn.Sequential(*list(small_mlp().double())[:3])
    start = fed.model.unflatten(fed.server["theta"])
    body.load_state_dict({name: start[name] for name in body.state_dict()})
    w = start["3.weight"].clone()
    scale = torch.tensor(s, dtype=torch.float64, requires_grad=True)
    t = fed.training

    for round in range(rounds):
        groups = [{"params": body.parameters(), "weight_decay": t.weight_decay}, {"params": [scale]}]
        optimizer = torch.optim.SGD(groups, lr=t.lr, momentum=t.momentum)
        for x, y in fed.visits(0, round):
            optimizer.zero_grad()
            F.cross_entropy(scale * F.normalize(body(x)) @ w.T, y).backward()
            nn.utils.clip_grad_norm_([*body.parameters(), scale], t.clip_norm or math.inf)
            optimizer.step()

        x, y = fed.samples(0)
        with torch.no_grad():
            f = F.normalize(body(x))
        for c in y.unique():
            w[c] = F.normalize(rho * w[c] + (1 - rho) * f[y == c].mean(0), dim=0)

    return body.state_dict(), scale.detach(), w


@both_executors
@pytest.mark.parametrize("clip_norm", [None, 0.2])
def test_a_single_client_is_centralised_training_under_a_head_of_averaged_class_means(executor, clip_norm):
    training = replace(FP64, momentum=0.9, weight_decay=0.01, lr=0.01, clip_norm=clip_norm)
    fed = Federation(sizes=(23,), executor=executor, training=training, method=FedNH(rho=0.8, scale=10.0))
    fed.server = fed.method.start(fed.task)
    body, scale, w = by_hand(fed, rounds=3, rho=0.8, s=10.0)
    fed.run_rounds(None, None, None)
    trained = fed.model.unflatten(fed.server["theta"])
    for name, tensor in {**body, "3.scale": scale, "3.weight": w}.items():
        assert_close(trained[name], tensor)
    assert abs(float(scale) - 10) > 1e-3


def test_the_authors_server_step_is_one_of_the_options():
    """Their release: unit class means, weighted by the clients' samples of the class, at length one, then smoothed."""
    fed = Federation(method=FedNH(scale=1.0, unit_means=True, missing="samples"), training=FP64, group_size=2)
    fed.labels[fed.split[1]] = 2
    fed.labels[np.concatenate([fed.split[0], fed.split[3]])] %= 2  # classes have 3, 3 and 2 owners
    fed.server = fed.method.start(fed.task)

    for ids in ([0, 1, 3], [0, 3], [2]):
        old = prototypes(fed).numpy().copy()
        place = fed.model.segments["3.scale"].start
        fed.run_rounds(ids)
        summed = np.zeros_like(old)
        counted = np.zeros((CLASSES, 1))
        bodies = []

        for client in ids:
            theta = torch.from_numpy(fed.state_of(client)["model"])
            bodies.append(theta.numpy())
            x, y = fed.samples(client)
            with torch.no_grad():
                z, _ = fed.model.features(theta, x)
            f = z.numpy() / np.linalg.norm(z.numpy(), axis=1, keepdims=True)
            for c in np.unique(y):
                mean = f[y.numpy() == c].mean(axis=0)
                summed[c] += (y.numpy() == c).sum() * mean / np.linalg.norm(mean)
                counted[c] += (y.numpy() == c).sum()

        new = old.copy()
        present = counted[:, 0] > 0
        mean = summed[present] / counted[present]
        new[present] = 0.9 * old[present] + 0.1 * mean / np.linalg.norm(mean, axis=1, keepdims=True)
        new /= np.linalg.norm(new, axis=1, keepdims=True)

        np.testing.assert_allclose(prototypes(fed), new, rtol=0, atol=1e-12)
        body = ~fed.model.mask("3.weight").numpy()
        np.testing.assert_allclose(fed.server["theta"].numpy()[body], np.mean(bodies, axis=0)[body], atol=1e-12)
        assert fed.server["theta"][place] != 1


@both_executors
def test_a_client_may_keep_its_own_scale(executor):
    fed = Federation(method=FedNH(share_scale=False), executor=executor, training=FP64)
    fed.run_rounds([0, 1])
    place = fed.model.segments["3.scale"].start
    assert fed.server["theta"][place] == 30

    first = {c: fed.state_of(c)["model"][place] for c in (0, 1)}
    assert first[0] != first[1] and 30 not in first.values()
    assert sent_per_client(fed.ledger, 0)["up", "body"] == fed.model.size - CLASSES * 5 - 1

    fed.training = replace(fed.training, steps=0)
    fed.context.training = fed.training  # a round without a step
    fed.run_rounds([0])
    assert fed.state_of(0)["model"][place] == first[0]
