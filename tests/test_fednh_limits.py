"""What FedNH becomes at the ends of its options, what it must not depend on, and the bounds that hold for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raypfl
from raypfl.methods import FedNH, PartialPersonalization
from raypfl.models.heads import PrototypeHead, output_layer, with_output_layer
from raypfl.models.prototypes import uniform_prototypes
from raypfl.training.settings import TrainingSettings
from tests.runs import experiment
from tests.support import CLASSES, FP64, Federation, NormalisedConv, small_mlp

ROUNDS = ([0, 1, 3], [2, 3], [0, 2], [1, 3])
WHOLE = replace(FP64, batch_size=100)
both = pytest.mark.parametrize("executor", ["vectorised", "sequential"])


class FedAvgUnderAFixedHead(PartialPersonalization):
    """FedAvg of the body and the scale, under the head with which FedNH begins."""

    personal: str = ""
    frozen: str = "3.weight"
    weighting: str = "uniform"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        rows = uniform_prototypes(layer.out_features, layer.in_features, seed=3).to(layer.weight)
        return with_output_layer(network, PrototypeHead(rows, 30.0, trainable=True, normalise=True))


def federation(**options) -> Federation:
    return Federation(**{"method": FedNH(), "training": FP64, "group_size": 2, **options})


def prototypes(fed: Federation) -> Tensor:
    return fed.model.segment(fed.server["theta"], fed.model.names("output layer")[0])


def means_of(fed: Federation, client: int) -> Tensor:
    """What one client would send of its classes in the first round, ``[C, d]``."""
    if not fed.server:
        fed.server = fed.method.start(fed.task)
    head = fed.model.mask(fed.model.names("output layer")[0])
    theta = fed.server["theta"]
    reply = fed.cohort([client]).run(fed.method.train, body=theta[~head], prototypes=prototypes(fed))
    return reply["means"]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- limiting cases -------------------------------------------------------------------------------------------------


@both
def test_prototypes_that_never_move_make_it_fedavg_under_a_fixed_head_to_the_bit(executor):
    training = TrainingSettings(batch_size=4, lr=0.1, epochs=2, momentum=0.5)
    nh, fixed = (
        federation(method=m, executor=executor, training=training) for m in (FedNH(rho=1.0), FedAvgUnderAFixedHead())
    )
    for fed in (nh, fixed):
        fed.play(*ROUNDS)
    assert torch.equal(nh.server["theta"], fixed.server["theta"])
    moving = federation(executor=executor, training=training)
    moving.play(*ROUNDS)
    assert not torch.equal(moving.server["theta"], fixed.server["theta"])


@pytest.mark.parametrize("rho", [0.0, 1e-9])
def test_without_smoothing_the_head_is_the_direction_of_the_rounds_mean_features(rho):
    fed = federation(method=FedNH(rho=rho), group_size=None)
    for where in fed.split:
        fed.labels[where] = np.arange(len(where)) % CLASSES
    fed.play(None)
    again = federation(method=FedNH(rho=rho), group_size=None)
    again.labels, again.split = fed.labels, fed.split
    sums = sum(means_of(again, client) for client in range(4))
    close(prototypes(fed), F.normalize(sums), 1e-7)


def by_hand(fed: Federation, rounds: int, rho: float, s: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """One client's training in plain torch, the head an average of its class means that forgets: body, scale, head."""
    body = nn.Sequential(*list(small_mlp().double())[:3])
    start = fed.model.unflatten(fed.server["theta"])
    body.load_state_dict({name: start[name] for name in body.state_dict()})
    w, scale = start["3.weight"].clone(), torch.tensor(s, dtype=torch.float64, requires_grad=True)
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


@both
@pytest.mark.parametrize("clip_norm", [None, 0.2])
def test_one_client_alone_is_centralised_training_under_a_head_of_averaged_class_means(executor, clip_norm):
    training = replace(FP64, momentum=0.9, weight_decay=0.01, lr=0.01, clip_norm=clip_norm)
    fed = federation(sizes=(23,), executor=executor, training=training, method=FedNH(rho=0.8, scale=10.0))
    fed.server = fed.method.start(fed.task)
    body, scale, w = by_hand(fed, rounds=3, rho=0.8, s=10.0)
    fed.play(None, None, None)
    got = fed.model.unflatten(fed.server["theta"])
    for name, tensor in {**body, "3.scale": scale, "3.weight": w}.items():
        close(got[name], tensor)
    assert abs(float(scale) - 10) > 1e-3


def test_clients_with_the_same_samples_are_one_client():
    several, one = federation(sizes=(9, 9, 9), training=WHOLE), federation(sizes=(9,), training=WHOLE)
    several.split = [np.arange(9)] * 3
    one.split = [np.arange(9)]
    one.inputs, one.labels = several.inputs, several.labels
    for fed in (several, one):
        fed.play(None, None, None)
    close(several.server["theta"], one.server["theta"])


# --- what it must not depend on -------------------------------------------------------------------------------------


def test_the_order_of_clients_does_not_matter():
    forwards, backwards = federation(training=WHOLE), federation(training=WHOLE, sizes=(7, 11, 4, 7))
    backwards.inputs, backwards.labels = forwards.inputs, forwards.labels
    backwards.split = forwards.split[::-1]
    forwards.play(None, [0, 1, 3], None)
    backwards.play(None, [0, 2, 3], None)
    close(forwards.server["theta"], backwards.server["theta"])


def test_classes_by_other_names_with_their_prototypes_give_the_same_by_other_names():
    plain, renamed = federation(), federation()
    name = torch.tensor([2, 0, 1])  # class c is called name[c]
    renamed.labels = name.numpy()[plain.labels]
    for fed in (plain, renamed):
        fed.server = fed.method.start(fed.task)
    rows = prototypes(plain).clone()
    renamed.model.segment(renamed.server["theta"], "3.weight")[name] = rows
    for fed in (plain, renamed):
        fed.play(*ROUNDS)
    close(prototypes(renamed)[name], prototypes(plain))
    body = ~plain.model.mask("3.weight")
    close(renamed.server["theta"][body], plain.server["theta"][body])


def test_every_client_counts_the_same_whatever_its_number_of_samples():
    fed = federation(sizes=(3, 30), training=replace(FP64, epochs=2))
    fed.play(None)
    body = ~fed.model.mask("3.weight")
    models = torch.stack([torch.from_numpy(fed.state_of(c)["model"]) for c in range(2)])
    close(fed.server["theta"][body], models.mean(0)[body])


def test_class_means_do_not_depend_on_the_order_or_the_batches_of_samples():
    still = replace(FP64, steps=0)
    fed, shuffled = (federation(factory=NormalisedConv, training=still) for _ in range(2))
    shuffled.split = [where[::-1].copy() for where in shuffled.split]
    close(means_of(fed, 2), means_of(shuffled, 2))
    larger = federation(factory=NormalisedConv, training=replace(still, batch_size=100))
    close(means_of(fed, 2), means_of(larger, 2))


def test_training_leaves_what_the_server_sent_as_it_was():
    fed = federation()
    fed.server = fed.method.start(fed.task)
    before = fed.server["theta"].clone()
    means_of(fed, 0)
    assert torch.equal(fed.server["theta"], before)


def test_all_methods_have_the_same_cohorts_which_a_share_rounded_up_of_the_clients_make(tmp_path):
    cohorts = {}
    for method in ("fednh", "fedavg", "local", "fedproto"):
        changes = {"method": method, "cohort__size": "null", "cohort__fraction": 0.2, "evaluation__every": 0}
        result = raypfl.run(experiment(tmp_path / method, rounds=4, **changes))
        cohorts[method] = result.rounds["cohort"].to_pylist()
    assert all(drawn == cohorts["fedavg"] for drawn in cohorts.values())
    assert all(len(set(drawn)) == len(drawn) == math.ceil(0.2 * 12) for drawn in cohorts["fedavg"])
    assert len(set(map(tuple, cohorts["fedavg"]))) > 1


# --- what clients send ----------------------------------------------------------------------------------------------


def test_mean_features_are_no_longer_than_one_and_those_of_a_single_sample_are_one_long():
    fed = federation()
    mine = fed.split[2]
    fed.labels[mine] = 1
    fed.labels[mine[0]] = 0
    lengths = means_of(fed, 2).norm(dim=1)
    assert lengths[0].item() == pytest.approx(1.0, abs=1e-12)
    assert 0 < lengths[1] < 1 and lengths[2] == 0


def test_mean_features_may_be_sent_at_length_one():
    scattered, unit = (means_of(federation(method=FedNH(unit_means=u)), 2) for u in (False, True))
    assert (scattered.norm(dim=1) < 0.999).any()
    close(unit, F.normalize(scattered))
    old = F.normalize(torch.randn(CLASSES, 5, dtype=torch.float64))
    moved = FedNH(rho=0.8, unit_means=True, missing="samples").moved(old, 7 * scattered, torch.full((CLASSES, 1), 40.0))
    close(moved, F.normalize(0.8 * old + 0.2 * F.normalize(scattered)))


def test_the_authors_server_step_is_one_of_the_options():
    """Their release: unit class means, weighted by the clients' samples of the class, at length one, then smoothed."""
    fed = federation(method=FedNH(scale=1.0, unit_means=True, missing="samples"))
    fed.labels[fed.split[1]] = 2
    fed.labels[np.concatenate([fed.split[0], fed.split[3]])] %= 2  # classes have 3, 3 and 2 owners
    fed.server = fed.method.start(fed.task)
    for ids in ([0, 1, 3], [0, 3], [2]):
        old, place = prototypes(fed).numpy().copy(), fed.model.segments["3.scale"].start
        fed.play(ids)
        summed, counted, bodies = np.zeros_like(old), np.zeros((CLASSES, 1)), []
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
        here = counted[:, 0] > 0
        mean = summed[here] / counted[here]
        new[here] = 0.9 * old[here] + 0.1 * mean / np.linalg.norm(mean, axis=1, keepdims=True)
        new /= np.linalg.norm(new, axis=1, keepdims=True)
        np.testing.assert_allclose(prototypes(fed), new, rtol=0, atol=1e-12)
        body = ~fed.model.mask("3.weight").numpy()
        np.testing.assert_allclose(fed.server["theta"].numpy()[body], np.mean(bodies, axis=0)[body], atol=1e-12)
        assert fed.server["theta"][place] != 1


@both
def test_a_client_may_keep_its_own_scale(executor):
    fed = federation(method=FedNH(share_scale=False), executor=executor)
    fed.play([0, 1])
    place = fed.model.segments["3.scale"].start
    assert fed.server["theta"][place] == 30
    first = {c: fed.state_of(c)["model"][place] for c in (0, 1)}
    assert first[0] != first[1] and 30 not in first.values()
    assert fed.ledger.per_client(0)["up", "body"] == fed.model.size - CLASSES * 5 - 1
    fed.training = replace(fed.training, steps=0)
    fed.context.training = fed.training  # a round without a step
    fed.play([0])
    assert fed.state_of(0)["model"][place] == first[0]


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("s", [1.0, 30.0])
def test_the_slope_of_the_loss_for_a_prototype_is_no_longer_than_the_scale(s):
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = F.normalize(torch.randn(6, 4, generator=draws, dtype=torch.float64))
        head = PrototypeHead(w, s, trainable=False, normalise=True).double()
        z, y = torch.randn(5, 4, generator=draws, dtype=torch.float64), torch.randint(6, (5,), generator=draws)
        F.cross_entropy(head(z), y).backward()
        assert (head.weight.grad.norm(dim=1) <= s).all() and head.weight.grad.norm() <= math.sqrt(2) * s


@pytest.mark.parametrize("s", [1.0, 30.0])
def test_the_slope_of_the_loss_for_the_features_is_no_longer_than_twice_the_scale_times_what_is_missing(s):
    draws = torch.Generator().manual_seed(1)
    reached = 0.0
    for _ in range(50):
        w = F.normalize(torch.randn(6, 4, generator=draws, dtype=torch.float64))
        f = F.normalize(torch.randn(1, 4, generator=draws, dtype=torch.float64))
        head = PrototypeHead(w, s, trainable=False, normalise=False).double()  # the slope for f itself
        y = torch.randint(6, (1,), generator=draws)
        f.requires_grad_()
        F.cross_entropy(head(f), y).backward()
        missing = 1 - head(f).softmax(1)[0, y].item()
        slope = float(f.grad.norm())
        assert slope <= 2 * s * missing * (1 + 1e-9)
        reached = max(reached, slope / (2 * s * missing))
    assert reached > 0.8  # so the bound is near: half the scale would not do


def test_the_loss_changes_no_more_than_the_prototypes_moved():
    fed = federation(method=FedNH(rho=0.7))
    fed.server = fed.method.start(fed.task)
    x, y = fed.samples(2)
    for ids in ROUNDS:
        old = prototypes(fed).clone()
        fed.play(ids)
        new, theta = prototypes(fed).clone(), fed.server["theta"]
        before = theta.masked_scatter(fed.model.mask("3.weight"), old)
        scale = float(theta[fed.model.segments["3.scale"].start])
        losses = [F.cross_entropy(fed.model(at, x), y).item() for at in (before, theta)]
        assert 0 < abs(losses[1] - losses[0]) <= 2 * scale * float((new - old).norm(dim=1).max())


def test_the_more_they_are_smoothed_the_less_prototypes_move():
    drifts = []
    for rho in (0.3, 0.6, 0.9, 0.99):
        fed, moved = federation(method=FedNH(rho=rho)), []
        fed.server = fed.method.start(fed.task)
        for ids in ROUNDS:
            before = prototypes(fed).clone()
            fed.play(ids)
            moved.append(float((prototypes(fed) - before).norm(dim=1).mean()))
        drifts.append(np.mean(moved))
    assert drifts == sorted(drifts, reverse=True) and drifts[-1] < 0.1 * drifts[0]


def test_gradients_of_the_body_shrink_as_rounds_go_by():
    fed = federation(training=replace(WHOLE, lr=0.002), method=FedNH(scale=5.0))
    fed.server = fed.method.start(fed.task)
    body, squares = ~fed.model.mask("output layer"), []
    for _ in range(40):
        slopes = fed.clients().grad(lambda p, batch: fed.clients().loss(p, batch), fed.server["theta"])
        squares.append(float(slopes[:, body].square().sum(1).mean()))
        fed.play(None)
    means = np.cumsum(squares) / np.arange(1, 41)
    assert means[9] < means[0] and means[39] < 0.75 * means[9]


def test_gradients_through_the_head_are_its_finite_differences():
    head = PrototypeHead(uniform_prototypes(4, 6, 0), 20.0, trainable=True, normalise=True).double()
    z = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([2, 0, 1])
    assert torch.autograd.gradcheck(lambda z: F.cross_entropy(head(z), y), z, rtol=1e-5)
    assert torch.autograd.gradcheck(
        lambda s: F.cross_entropy(torch.func.functional_call(head, {"scale": s}, z.detach()), y), head.scale, rtol=1e-5
    )


def test_without_scale_the_loss_is_that_of_chance():
    head = PrototypeHead(uniform_prototypes(7, 9, 0), 0.0, trainable=False, normalise=True).double()
    loss = F.cross_entropy(head(torch.randn(5, 9, dtype=torch.float64)), torch.arange(5))
    assert loss.item() == pytest.approx(math.log(7), abs=1e-12)
