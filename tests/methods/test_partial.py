"""Partial personalization is one mechanism, and its presets are the methods of their papers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial as applied

import numpy as np
import pytest
import torch
from torch import Tensor

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import (
    FedAlt,
    FedAvg,
    FedBABU,
    FedBN,
    FedPer,
    FedRep,
    FedSim,
    LGFedAvg,
    Local,
    PartialPersonalization,
)
from tests.support import federation as support
from tests.support.federation import (
    FP64,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    sent_per_client,
    small_mlp,
    torch_sgd,
)
from tests.support.runs import experiment

ORDERS = ["together", "personal first", "shared first"]
PRESETS = [FedPer(), FedRep(personal_epochs=1), FedBABU(), LGFedAvg(), FedBN(), FedAlt(), FedSim(personal="conv")]
NAMES = [type(method).__name__ for method in PRESETS]
run_method = applied(support.run_method, factory=NormalisedConv)


def models(fed: Federation, **state: Tensor) -> Tensor:
    """Return the personal models of all clients, ``[4, P+B]``."""
    states = [fed.state_of(client) for client in range(4)]
    for name in states[0]:
        if all(name in client_state for client_state in states):
            state[name] = torch.from_numpy(np.stack([client_state[name] for client_state in states]))
    return fed.method.personal_model(fed.clients(round=fed.round, **state), fed.server).as_subclass(Tensor)


def charged(fed: Federation) -> dict:
    return sent_per_client(fed.ledger, 1)


@both_executors
@both_networks
@pytest.mark.parametrize("order", ORDERS)
def test_with_nothing_personal_partial_personalization_is_fedavg_to_the_bit(order, factory, executor):
    options = {"factory": factory, "executor": executor}
    nothing = run_method(PartialPersonalization(personal="", order=order), **options)
    fedavg = run_method(FedAvg(), **options)
    assert torch.equal(nothing.server["theta"], fedavg.server["theta"])
    assert nothing.ledger.total("up", 1) == fedavg.ledger.total("up", 1)
    assert torch.equal(models(nothing), fedavg.server["theta"].expand(4, -1))


@both_executors
@both_networks
@pytest.mark.parametrize("order", ORDERS)
def test_with_nothing_shared_partial_personalization_is_training_alone_to_the_bit(order, factory, executor):
    options = {"factory": factory, "executor": executor}
    everything = run_method(PartialPersonalization(personal="*", order=order), **options)
    alone = run_method(Local(), **options)
    for client in range(4):
        assert (everything.state_of(client)["personal"] == alone.state_of(client)["personal"]).all()
    assert everything.ledger.entries == []


@both_executors
def test_fedbn_without_batch_norm_warns_and_is_fedavg_to_the_bit(executor):
    a, b = (run_method(m, factory=small_mlp, executor=executor) for m in (FedAvg(), FedBN()))
    assert torch.equal(a.server["theta"], b.server["theta"])
    assert b.warnings and "has no batch norm" in b.warnings[0]


@both_executors
def test_lg_fedavg_of_a_network_with_only_a_head_is_fedavg_to_the_bit(executor):
    factory = applied(torch.nn.Sequential, torch.nn.Flatten(), torch.nn.Linear(32, 3))
    a, b = (run_method(m, factory=factory, executor=executor) for m in (FedAvg(), LGFedAvg()))
    assert torch.equal(a.server["theta"], b.server["theta"])


@both_executors
def test_fedsim_of_the_output_layer_is_fedper_to_the_bit(executor):
    a, b = (run_method(m, executor=executor) for m in (FedPer(), FedSim(personal="head")))
    assert torch.equal(a.server["theta"], b.server["theta"]) and torch.equal(models(a), models(b))


@both_executors
@pytest.mark.parametrize("method", [FedRep(personal_epochs=0), FedAlt(personal_epochs=0)])
def test_fedrep_and_fedalt_without_head_epochs_train_fedbabus_body(method, executor):
    a, b = (run_method(m, executor=executor) for m in (method, FedBABU(finetune_epochs=0)))
    assert torch.equal(a.server["theta"], b.server["theta"])
    assert torch.equal(models(a), models(b))


@pytest.mark.parametrize("method", PRESETS, ids=NAMES)
def test_a_preset_keeps_and_freezes_its_named_parts_and_shares_the_rest(method):
    fed = run_method(replace(method, finetune_epochs=0))
    personal_part = {FedBABU: "", LGFedAvg: "conv,norm", FedBN: "norm", FedSim: "conv"}.get(type(method), "head")
    personal, frozen = (
        fed.model.mask(p) if p else torch.zeros(fed.model.size, dtype=torch.bool)
        for p in (personal_part, "head" if isinstance(method, FedBABU) else "")
    )
    start = fed.model.init(fed.seed)
    rows = models(fed)

    assert torch.equal(fed.server["theta"][personal | frozen], start[personal | frozen])
    assert torch.equal(rows[:, frozen], start[frozen].expand(4, -1))
    shared = ~(personal | frozen)
    assert torch.equal(rows[:, shared], fed.server["theta"][shared].expand(4, -1))
    assert (fed.server["theta"] != start)[shared].any()

    sizes = {len(fed.state_of(c).get("personal", ())) for c in range(4)}
    assert sizes == {int(personal.sum())}
    if personal.any():
        assert (rows[:, personal] != start[personal]).any(dim=1).all() and (rows[0] != rows[1])[personal].any()
    assert charged(fed) == dict.fromkeys((("down", "shared"), ("up", "shared")), int(shared.sum()))


@both_executors
@pytest.mark.parametrize("order", ["personal first", "shared first"])
def test_training_part_after_part_with_separate_epochs_is_the_bare_loops(order, executor):
    personal_epochs = 3
    shared_epochs = 1
    method = PartialPersonalization(
        personal="3", order=order, personal_epochs=personal_epochs, shared_epochs=shared_epochs
    )
    fed = run_method(method, None, factory=small_mlp, executor=executor, training=FP64)
    phases = [("3", personal_epochs), ("1", shared_epochs)]
    heads = []
    bodies = []
    head = fed.model.mask("3")

    for client in range(4):
        net = as_module(small_mlp, fed.model.init(fed.seed))
        for segment, epochs in phases if order == "personal first" else phases[::-1]:
            fed.training = replace(FP64, epochs=epochs)
            torch_sgd(net, fed.visits(client), lr=0.1, trained=segment)
        heads.append(as_vector(net)[head])
        bodies.append(as_vector(net)[~head])

    body = torch.from_numpy(np.average(torch.stack(bodies), axis=0, weights=fed.sizes))
    assert_close(fed.server["theta"][~head], body)
    assert_close(models(fed)[:, head], torch.stack(heads))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_clients_are_weighted_by_samples_or_equally(weighting):
    fed = run_method(FedPer(weighting=weighting, body="last"), None, training=FP64)
    shared = fed.model.mask("conv,norm")
    weights = fed.sizes if weighting == "samples" else None
    mean = np.average([fed.state_of(c)["shared"] for c in range(4)], axis=0, weights=weights)
    np.testing.assert_allclose(fed.server["theta"][shared].numpy(), mean, rtol=1e-12)


def test_the_body_of_a_personal_model_is_the_average_or_the_clients_last():
    average, last = (run_method(FedPer(body=body)) for body in ("average", "last"))
    assert torch.equal(average.server["theta"], last.server["theta"])
    head = average.model.mask("head")
    assert torch.equal(models(average)[:, head], models(last)[:, head])
    last_bodies = torch.from_numpy(np.stack([last.state_of(c)["shared"] for c in range(4)]))
    assert torch.equal(models(last)[:, ~head], last_bodies) and not torch.equal(last_bodies[0], last_bodies[1])
    assert "shared" not in average.state_of(0)


def test_a_client_that_never_took_part_has_the_shared_part_and_an_initial_personal_part():
    for body in ("average", "last"):
        fed = run_method(FedPer(body=body), [0, 1])
        (model,) = fed.method.personal_model(fed.clients([3]), fed.server).as_subclass(Tensor)
        assert torch.equal(model, fed.server["theta"])


@both_executors
def test_an_unseen_client_trains_its_part_with_the_shared_one_fixed_and_then_fine_tunes(executor):
    fed = run_method(FedAlt(personal_epochs=3, finetune_epochs=1), executor=executor, training=FP64)
    reference = Federation(NormalisedConv, training=replace(FP64, epochs=3))
    models = fed.method.unseen_model(fed.clients(round=9), fed.server).as_subclass(Tensor)
    head = fed.model.mask("head")

    for client in range(4):
        net = as_module(NormalisedConv, fed.server["theta"])
        torch_sgd(net, reference.visits(client, 9, "unseen"), lr=0.1, trained="head")
        half = torch.where(head, as_vector(net), fed.server["theta"])  # the body's statistics stay, too
        net = as_module(NormalisedConv, half)
        torch_sgd(net, fed.visits(client, 9, "finetuning"), lr=0.1)
        assert_close(models[client], as_vector(net))

    nothing = run_method(FedBABU(finetune_epochs=0), executor=executor)
    unseen = nothing.method.unseen_model(nothing.clients(round=9), nothing.server)
    assert torch.equal(unseen.as_subclass(Tensor), nothing.server["theta"].expand(4, -1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal": "haed"}, "method.personal is 'haed'.*did you mean 'head'"),
        ({"frozen": "norm, cnov.weight"}, "method.frozen is 'norm, cnov.weight'.*did you mean 'conv.weight'"),
        ({"personal": "output layers"}, "did you mean 'output layer'"),
        ({"personal": "head", "frozen": "*.bias"}, "both select head.bias"),
        ({"personal": "", "frozen": "*"}, r"method.frozen '\*' is all of this network, so no round would train"),
    ],
)
def test_missing_segments_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PartialPersonalization(**options).check(Federation(NormalisedConv).model)


def test_missing_segments_are_refused_before_anything_starts(tmp_path):
    heard: list = []
    wrong = experiment(tmp_path, method="{name: partial, personal: haed}", engine__backend="ray")
    with pytest.raises(ConfigError, match=r"method.personal is 'haed'"):
        raypfl.run(wrong, listeners=[heard.append])
    assert [event.text for event in heard] == ["preparing data"]


def test_contradictory_epochs_are_refused_with_the_experiment():
    with pytest.raises(
        ConfigError, match=r"personal_epochs is 3, which has no effect while method.order is 'together'"
    ):
        raypfl.Experiment(method={"name": "fedper", "personal_epochs": 3})
