"""CReFF is FedAvg with a head that the server retrains on features fitted to the clients' gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.methods import CReFF, FedAvg, PartialPersonalization
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    NormalisedConv,
    as_module,
    both_executors,
    both_networks,
    run_method,
    small_mlp,
    without_bias,
)

QUICK = CReFF(features=4, feature_steps=3, head_steps=5)
CENTRE = Federation(method=QUICK).cohort()


any_net = pytest.mark.parametrize("factory", [small_mlp, without_bias, NormalisedConv])


@both_executors
@both_networks
def test_creffs_averaged_and_personal_models_are_fedavgs_to_the_bit(factory, executor):
    options = {"factory": factory, "executor": executor}
    last = PartialPersonalization(personal="", body="last")
    creff, fedavg, personal = (run_method(m, **options) for m in (QUICK, FedAvg(), last))
    assert torch.equal(creff.server["theta"], fedavg.server["theta"])
    for client in range(4):
        assert (creff.state_of(client)["model"] == personal.state_of(client)["shared"]).all()


@both_executors
@both_networks
def test_creffs_global_model_is_the_averaged_body_under_the_retrained_head(factory, executor):
    fed = run_method(QUICK, factory=factory, executor=executor)
    head = fed.model.mask("output layer")
    theta = fed.method.global_model(fed.server)
    weight, *bias = (fed.model.segment(theta, name) for name in fed.model.names("output layer"))
    assert torch.equal(theta[~head], fed.server["theta"][~head])
    assert not torch.equal(theta[head], fed.server["theta"][head])
    assert torch.equal(torch.cat([weight, *(b[:, None] for b in bias)], dim=1), fed.server["head"])


@both_executors
@pytest.mark.parametrize("factory", [small_mlp, without_bias])
def test_clients_report_the_gradients_of_each_of_their_classes(factory, executor):
    fed = Federation(factory, executor=executor, method=QUICK, training=FP64, group_size=3)
    server = fed.method.start(fed.task)
    reply = fed.cohort().run(fed.method.train, theta=server["theta"], head=server["head"])
    expected = torch.zeros_like(reply["gradients"])
    owners = torch.zeros(CLASSES, dtype=torch.float64)

    for client in range(4):
        x, y = fed.samples(client)
        for c in y.unique():
            net = as_module(factory, server["theta"]).eval()
            F.cross_entropy(net(x[y == c]), y[y == c]).backward()
            slopes = [p.grad.reshape(CLASSES, -1) for p in net[3].parameters()]
            expected[c] += torch.cat(slopes, dim=1)
            owners[c] += 1

    torch.testing.assert_close(reply["gradients"], expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(reply["owners"], owners)


def test_features_are_fitted_to_the_reported_gradients():
    draws = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    head = normal(3, 6)
    real = normal(3, 9, 5)
    start = normal(3, 4, 5)
    inputs = F.pad(real, (0, 1), value=1.0)
    error = (inputs @ head.T).softmax(-1) - torch.eye(3, dtype=torch.float64)[:, None]
    gradients = error.mT @ inputs / 9
    owned = torch.tensor([True, True, False])

    def apart(features: Tensor) -> Tensor:
        z = F.pad(features, (0, 1), value=1.0)
        e = (z @ head.T).softmax(-1) - torch.eye(3, dtype=torch.float64)[:, None]
        return (1 - F.cosine_similarity(e.mT @ z, gradients, dim=-1))[owned].sum()

    losses = [
        float(apart(CReFF(feature_steps=n, feature_lr=0.5).match_features(CENTRE, head, start, gradients, owned)))
        for n in (0, 50, 500)
    ]

    assert losses[2] < losses[1] < losses[0] and losses[2] < 0.1 * losses[0]
    moved = CReFF(feature_lr=0.5).match_features(CENTRE, head, start, gradients, owned)
    assert torch.equal(moved[2], start[2])  # nobody has that class


def test_each_classs_features_are_fitted_independently():
    draws = torch.Generator().manual_seed(1)
    shapes = ((3, 6), (3, 4, 5), (3, 3, 6))
    head, start, gradients = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in shapes)
    method = CReFF(feature_steps=5, feature_lr=0.3)
    together = method.match_features(CENTRE, head, start, gradients, torch.tensor([True, True, True]))
    for c in range(3):
        alone = method.match_features(CENTRE, head, start, gradients, torch.arange(3) == c)
        torch.testing.assert_close(alone[c], together[c])


def test_the_head_is_trained_by_plain_descent_on_the_features_of_known_classes():
    head = torch.zeros(3, 3, dtype=torch.float64)
    features = torch.randn(3, 4, 2, dtype=torch.float64)
    known_classes = torch.tensor([True, False, True])
    layer = nn.Linear(2, 3).double()
    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    labels = torch.tensor([0] * 4 + [2] * 4)

    for _ in range(7):
        optimizer.zero_grad()
        F.cross_entropy(layer(features[known_classes].reshape(8, 2)), labels).backward()
        optimizer.step()

    trained = CReFF(head_steps=7, head_lr=0.3).retrain_head(CENTRE, head, features, known_classes)
    torch.testing.assert_close(trained, torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach())


def test_a_model_and_class_gradients_go_up_and_a_model_and_a_head_go_down():
    fed = Federation(without_bias, method=QUICK, group_size=2)
    fed.labels[fed.split[1]] = 0
    fed.labels[fed.split[2]] = torch.arange(11) % CLASSES
    fed.run_rounds([1, 2])
    model = fed.model.size
    head = 5 * CLASSES
    sent = [(e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries]

    assert sent == [
        ("down", "theta", 2, model),
        ("down", "head", 2, head),
        ("up", "theta", 2, model),
        ("up", "gradients", 1, CLASSES * head),
        ("up", "gradients", 1, head),
    ]
