"""FedCP and GPFL follow their papers, and equal simpler methods in limiting cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raypfl.common import rng
from raypfl.methods import GPFL, FedCP, FedPer
from raypfl.models.heads import GatedLinear
from raypfl.models.rowwise import RowWise
from tests.support.by_hand import assert_parts_close, descend, mean_by_samples
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    NormalisedConv,
    assert_close,
    both_executors,
    client_states,
    run_method,
    sent_per_client,
    small_mlp,
)

COHORTS = ([0, 1, 2, 3], [1, 2])


def start_of(fed):
    """The initial tensors by their names in small_mlp's output layer, which has the number 3."""
    tensors = fed.model.unflatten(fed.model.init(fed.seed))
    return {name.removeprefix("3."): tensor.clone() for name, tensor in tensors.items()}


def leaves(tensors):
    return {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}


def average(fed, models, ids, name):
    return mean_by_samples(fed, {client: models[client][name] for client in ids}, ids)


def named(tensors):
    """Add the number of the output layer again to the names of its tensors."""
    return {name if name.startswith("1.") else f"3.{name}": tensor for name, tensor in tensors.items()}


def body(t, x):
    return (x.flatten(1) @ t["1.weight"].T + t["1.bias"]).tanh()


def normalised(hidden, scale, offset):
    mean = hidden.mean(-1, keepdim=True)
    spread = ((hidden - mean) ** 2).mean(-1, keepdim=True)
    return (hidden - mean) / (spread + 1e-5) ** 0.5 * scale + offset


def kernel(a, b):
    distance = ((a[:, None] - b) ** 2).sum(2)
    return sum((-distance / (2 * scale)).exp() for scale in (10, 15, 20, 50)).mean()


@both_executors
def test_two_rounds_of_fedcp_by_hand(executor):
    lam = 2.0
    fed = run_method(FedCP(lam=lam), *COHORTS, executor=executor, training=FP64)
    shared = start_of(fed)
    personal = ["weight", "bias", "context"]
    personal_parts = [{name: shared[name] for name in personal} for _ in range(4)]
    fixed = {"global_weight", "global_bias", "context"}

    for round, ids in enumerate(COHORTS):
        models = {}
        for client in ids:
            t = leaves(shared | personal_parts[client])
            key = int(rng.keys(fed.seed, "draws", round, [client]).astype("int64")[0])
            for step, (x, y) in enumerate(fed.visits(client, round)):
                z = body(t, x)
                direction = t["context"] / t["context"].norm()
                gate = normalised(
                    (z * direction) @ t["gate_weight"].T + t["gate_bias"], t["norm_weight"], t["norm_bias"]
                )
                first, second = gate.relu().split(5, dim=1)
                with RowWise(None, torch.tensor(key + step)):
                    u = torch.rand_like(first)
                e = (first + (u / (1 - u)).log()).exp()
                r = e / (e + second.exp())
                logits = (r * z) @ t["weight"].T + t["bias"]
                logits = logits + ((1 - r) * z) @ t["global_weight"].T + t["global_bias"]
                sent = body(shared, x)
                apart = kernel(z, z) + kernel(sent, sent) - 2 * kernel(z, sent)
                descend(F.cross_entropy(logits, y) + lam * apart, [t[name] for name in t if name not in fixed])
            t["context"] = t["weight"].sum(0)
            t["global_weight"] = (t["weight"] + t["global_weight"]) / 2
            t["global_bias"] = (t["bias"] + t["global_bias"]) / 2
            personal_parts[client] = {name: t[name].detach() for name in personal}
            models[client] = t
        shared |= {name: average(fed, models, ids, name) for name in shared if name not in personal}

    assert_parts_close(fed, fed.server["theta"], named(shared))
    rows = fed.method.personal_model(fed.clients([2], personal=client_states(fed)[[2]]), fed.server)
    assert_parts_close(fed, rows.as_subclass(torch.Tensor)[0], named(personal_parts[2]))
    assert not fed.warnings

    # P - H + H for the global output layer, and 2 d^2 + 6 d for the gate.
    numbers = 183 + 2 * 5**2 + 6 * 5
    assert sent_per_client(fed.ledger, 1) == {("down", "shared"): numbers, ("up", "shared"): numbers}


def test_fedcps_output_layers_divide_the_features():
    fed = Federation(method=FedCP(), training=FP64)
    x, _ = fed.samples(0)
    theta = fed.model.init(3)
    with fed.model.mode(train=False), torch.no_grad():
        z, outputs = fed.model.features(theta, x)
    start = fed.model.unflatten(theta)
    # Both output layers begin alike, so the shares do not matter.
    assert_close(outputs, z @ start["3.weight"].T + 2 * start["3.bias"])


@both_executors
def test_two_rounds_of_gpfl_by_hand(executor):
    lam = 0.3
    mu = 0.2
    fed = run_method(GPFL(lam=lam, mu=mu), *COHORTS, executor=executor, training=replace(FP64, batch_size=5))
    shared = start_of(fed)
    head = ["weight", "bias"]
    personal_parts = [{name: shared[name] for name in head} for _ in range(4)]
    valve = [f"{f}_{n}" for f in ("gamma", "beta") for n in ("weight", "bias", "scale", "offset")]

    def through(z, u, t):
        def factor(f):
            hidden = (t[f"{f}_weight"] @ u + t[f"{f}_bias"]).relu()
            return normalised(hidden, t[f"{f}_scale"], t[f"{f}_offset"])

        return ((1 + factor("gamma")) * z + factor("beta")).relu()

    def condition(client):
        shares = torch.bincount(fed.samples(client)[1], minlength=CLASSES).double() / fed.sizes[client]
        return sum(share * e for share, e in zip(shares, shared["embeddings"], strict=True))

    for round, ids in enumerate(COHORTS):
        models = {}
        received = shared["embeddings"]
        for client in ids:
            t = leaves(shared | personal_parts[client])
            u = condition(client)
            for x, y in fed.visits(client, round):
                z = body(t, x)
                guide = through(z, received.mean(0), t)
                lengths = guide.norm(dim=1, keepdim=True).clamp_min(1e-12) * t["embeddings"].norm(dim=1)
                loss = F.cross_entropy(through(z, u, t) @ t["weight"].T + t["bias"], y)
                loss = loss + F.cross_entropy(guide @ t["embeddings"].T / lengths, y)
                loss = loss + lam * ((guide - received[y]) ** 2).sum() ** 0.5
                loss = loss + mu / 2 * sum((t[name] ** 2).sum() for name in ["embeddings", *valve])
                descend(loss, [t[name] for name in t if name != "condition"])
            personal_parts[client] = {name: t[name].detach() for name in head}
            models[client] = t
        shared |= {name: average(fed, models, ids, name) for name in shared if name not in [*head, "condition"]}

    assert_parts_close(fed, fed.server["theta"], named(shared))
    rows = fed.method.personal_model(fed.clients([2], personal=client_states(fed)[[2]]), fed.server)
    assert_parts_close(fed, rows.as_subclass(torch.Tensor)[0], named(personal_parts[2] | {"condition": condition(2)}))
    assert not fed.warnings

    numbers = 165 + CLASSES * 5 + 2 * 5**2 + 6 * 5
    assert sent_per_client(fed.ledger, 1) == {("down", "shared"): numbers, ("up", "shared"): numbers}


class Positive(torch.nn.Sequential):
    """A network whose features are not negative."""

    def __init__(self, bias=True):
        layers = [torch.nn.Flatten(), torch.nn.Linear(32, 5), torch.nn.ReLU()]
        super().__init__(*layers, torch.nn.Linear(5, CLASSES, bias=bias))


def same_models(fed, fedper):
    """Assert that personal models have the same tensors, of those that FedPer's network has."""
    rows, expected = (
        f.method.personal_model(f.clients(personal=client_states(f)), f.server).as_subclass(torch.Tensor)
        for f in (fed, fedper)
    )
    tensors = fed.model.unflatten(rows)
    for name, values in fedper.model.unflatten(expected).items():
        assert_close(tensors[name], values, 1e-12)


def test_fedcp_with_all_features_for_the_clients_own_layer_is_fedper(monkeypatch):
    monkeypatch.setattr(GatedLinear, "share", lambda layer, z: torch.ones_like(z))
    # The global layer's bias, which both add to the logits, has no counterpart in FedPer.
    options = {"factory": lambda: Positive(bias=False), "training": FP64}
    same_models(*(run_method(method, **options) for method in (FedCP(lam=0.0), FedPer())))


def test_fedcp_with_a_frozen_bias_averages_the_weights_alone():
    def with_frozen_bias() -> nn.Module:
        network = small_mlp()
        network[3].bias.requires_grad_(False)
        return network

    fed = run_method(FedCP(), factory=with_frozen_bias)
    start = start_of(fed)
    end = fed.model.unflatten(fed.server["theta"])
    assert_close(end["3.global_bias"], start["global_bias"], 1e-7)
    assert not torch.equal(end["3.global_weight"], start["global_weight"])


def test_gpfl_with_a_valve_that_passes_everything_and_a_guide_that_leads_nowhere_is_fedper(monkeypatch):
    monkeypatch.setattr("raypfl.models.heads.conditional_valve", lambda z, *_: z.relu())
    monkeypatch.setattr("raypfl.methods.partial_models.gpfl.conditional_valve", lambda z, *_: z.detach())
    options = {"factory": Positive, "training": FP64}
    same_models(*(run_method(method, **options) for method in (GPFL(lam=0.0, mu=0.0), FedPer())))


@pytest.mark.parametrize("method", [FedCP(), GPFL()], ids=repr)
def test_a_network_with_batch_norm_can_have_conditional_features(method):
    fed = run_method(method, factory=NormalisedConv)
    assert torch.isfinite(fed.server["theta"]).all() and not fed.warnings
