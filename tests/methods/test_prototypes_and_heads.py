"""FedProto and FedROD follow their papers, and equal simpler methods in limiting cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.methods import FedAvg, FedProto, FedROD, Local
from tests.support.by_hand import assert_parts_close, descend, leaves
from tests.support.federation import (
    CLASSES,
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    client_states,
    run_method,
    sent_per_client,
    small_mlp,
)


def latent(net: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of small_mlp's last layer."""
    return net[2](net[1](net[0](x)))


@both_executors
@both_networks
def test_fedproto_without_pull_is_training_alone_to_the_bit(factory, executor):
    alone, proto = (run_method(m, factory=factory, executor=executor) for m in (Local(), FedProto(lam=0.0)))
    assert torch.equal(client_states(proto, "model"), client_states(alone, "personal"))
    pulled = run_method(FedProto(lam=1.0), factory=factory, executor=executor)
    assert not torch.equal(client_states(pulled, "model"), client_states(alone, "personal"))
    assert not proto.warnings


@both_executors
@pytest.mark.parametrize("paper", [False, True])
def test_two_rounds_of_fedproto_by_hand(executor, paper):
    lam = 0.7
    options = {"distance": "sum", "weighting": "samples", "prediction": "prototypes"} if paper else {}
    fed = run_method(FedProto(lam=lam, **options), None, None, executor=executor, training=ONE_STEP)
    nets = [as_module(small_mlp, fed.model.init(fed.seed)) for _ in range(4)]
    means = torch.zeros(CLASSES, 5, dtype=torch.float64)

    for _ in range(2):
        sums = torch.zeros_like(means)
        owners = torch.zeros(CLASSES, 1, dtype=torch.float64)
        for client, net in enumerate(nets):
            x, y = fed.samples(client)
            z = latent(net, x)
            loss = F.cross_entropy(net[3](z), y)
            pulls = [(z[y == c].mean(0) - means[c]).square().sum() for c in y.unique() if means[c].any()]
            descend(loss + lam * sum(pulls) / (1 if paper else max(len(pulls), 1)), net.parameters())

            with torch.no_grad():
                z = latent(net, x)
                for c in y.unique():
                    weight = (y == c).sum() if paper else 1
                    sums[c] += weight * z[y == c].mean(0)
                    owners[c] += weight

        means = sums / owners

    assert_close(fed.server["means"], means)
    expected = torch.stack([as_vector(net) for net in nets])
    assert_close(client_states(fed, "model"), expected)

    if paper:
        x, _ = fed.samples(2)
        predicted = fed.method.personal_model(fed.clients([2]), fed.server)
        outputs = predicted.function(x, local=fed.clients([2]).other(expected[2]), means=means)
        assert outputs.argmax(1).equal(torch.cdist(latent(nets[2], x), means).argmin(1))


def test_a_class_without_samples_in_the_cohort_keeps_its_mean():
    fed = Federation(method=FedProto(), training=FP64)
    fed.labels = np.array([c % 2 for c in range(len(fed.labels))])
    fed.labels[fed.split[2]] = 2
    fed.run_rounds([2])
    before = fed.server["means"].clone()
    fed.run_rounds([0, 1])
    after = fed.server["means"]
    assert torch.equal(after[2], before[2]) and before[2].any() and not before[:2].any() and after[:2].any()


def test_fedproto_sends_a_row_for_each_class_and_no_model():
    fed = Federation(method=FedProto(), group_size=2)
    fed.labels[fed.split[1]] = 0
    fed.labels[fed.split[2]] = np.arange(11) % 2
    fed.run_rounds([1, 2])
    sent = [(e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries]

    assert sent == [("down", "means", 2, 15), ("up", "means", 1, 10), ("up", "means", 1, 5)]
    assert fed.method.global_model(fed.server) is None
    never = FedProto().personal_model(fed.clients([3]), fed.server)
    assert never.shape == (1, fed.model.size)


@both_executors
@both_networks
@pytest.mark.parametrize("head", ["linear", "hypernetwork"])
def test_fedrods_global_model_is_fedavgs_if_every_client_has_all_classes_equally_often(head, factory, executor):
    plain, rod = (
        Federation(factory, sizes=(6, 3, 12, 6), method=m, executor=executor, training=FP64, group_size=2)
        for m in (FedAvg(), FedROD(head=head))
    )

    for fed in (plain, rod):
        for indices in fed.split:
            fed.labels[indices] = np.arange(len(indices)) % CLASSES
        fed.run_rounds(*ROUNDS)

    generic = ~rod.model.mask("*.personal.*")
    assert_close(rod.server["theta"][generic], plain.server["theta"])
    assert not rod.server["theta"][rod.model.mask("*.prior" if head == "hypernetwork" else "*.personal.*")].any()

    x, _ = rod.samples(0)
    with torch.no_grad(), rod.model.mode(train=False), plain.model.mode(train=False):
        torch.testing.assert_close(rod.model(rod.server["theta"], x), plain.model(plain.server["theta"], x))


@both_executors
def test_a_round_of_fedrod_by_hand(executor):
    fed = run_method(FedROD(personal_epochs=2), None, executor=executor, training=ONE_STEP)
    bodies = []
    for client in range(4):
        x, y = fed.samples(client)
        start = fed.model.unflatten(fed.model.init(fed.seed))
        net = small_mlp().double()
        names = {"1.weight": "1.weight", "1.bias": "1.bias", "3.weight": "3.generic.weight", "3.bias": "3.generic.bias"}
        net.load_state_dict({network_name: start[model_name] for network_name, model_name in names.items()})
        prior = torch.bincount(y, minlength=CLASSES).double().clamp_min(1e-30).log()
        descend(F.cross_entropy(net(x) + prior, y), net.parameters())
        z = latent(net, x).detach()
        generic = net(x).detach()

        bodies.append(as_vector(net))
        head = torch.nn.Linear(5, CLASSES).double()
        torch.nn.init.zeros_(head.weight), torch.nn.init.zeros_(head.bias)
        for _ in range(2):
            descend(F.cross_entropy(generic + head(z), y), head.parameters())

        expected = {f"3.personal.{name}": tensor.detach() for name, tensor in head.named_parameters()}
        assert_parts_close(fed, torch.from_numpy(fed.state_of(client)["model"]), expected)

    generic = ~fed.model.mask("*.personal.*")
    mean = torch.from_numpy(np.average(torch.stack(bodies), axis=0, weights=fed.sizes))
    assert_close(fed.server["theta"][generic], mean)


def test_a_client_without_a_class_trains_together_with_others_under_fedrod():
    fed = Federation(method=FedROD(), training=FP64, group_size=2)
    fed.labels[fed.split[2]] = 1
    fed.run_rounds(*ROUNDS)
    assert torch.isfinite(fed.server["theta"]).all() and not fed.warnings


def test_fedrods_personal_head_carries_over_between_rounds_and_is_never_sent():
    fed = run_method(FedROD(), [0, 1])
    personal = fed.model.mask("*.personal.*")
    first = fed.state_of(0)["model"][personal.numpy()]
    fed.run_rounds([0], [2])
    assert (fed.state_of(0)["model"][personal.numpy()] != first).any() and first.any()
    assert not fed.server["theta"][personal].any()
    sent = int((~personal).sum())
    assert sent_per_client(fed.ledger, 1) == {("down", "shared"): sent, ("up", "shared"): sent}


@both_executors
def test_a_round_of_fedrods_hypernetwork_by_hand(executor):
    hidden = 4
    fed = run_method(FedROD(head="hypernetwork", hidden=hidden), None, executor=executor, training=ONE_STEP)
    start = fed.model.unflatten(fed.model.init(fed.seed))
    generated = []

    for client in range(4):
        x, y = fed.samples(client)
        client_tensors = fed.model.unflatten(torch.from_numpy(fed.state_of(client)["model"]))
        shares = torch.bincount(y, minlength=CLASSES).double() / len(y)
        assert torch.equal(client_tensors["3.personal.prior"], shares)

        z = (x.flatten(1) @ client_tensors["1.weight"].T + client_tensors["1.bias"]).tanh()
        generic = z @ client_tensors["3.generic.weight"].T + client_tensors["3.generic.bias"]
        names = [f"3.personal.generator.{n}" for n in ("0.weight", "0.bias", "2.weight", "2.bias")]
        w1, b1, w2, b2 = parameters = leaves(start[n] for n in names)
        head = (w2 @ (w1 @ shares + b1).relu() + b2).reshape(CLASSES, 5)
        descend(F.cross_entropy(generic + z @ head.T, y), parameters)
        after = [p.detach() for p in parameters]
        for name, expected in zip(names, after, strict=True):
            assert_close(client_tensors[name], expected)
        generated.append(torch.cat([p.reshape(-1) for p in after]))

    mean = torch.from_numpy(np.average(torch.stack(generated), axis=0, weights=fed.sizes))
    theta = fed.server["theta"][fed.model.mask("*.generator.*")]
    assert_close(theta, mean)
    assert set(sent_per_client(fed.ledger, 0).values()) == {fed.model.size - CLASSES}
