"""How methods combine low-rank adapters ``B A``: which factors they send, and what the mean of the products is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.federation.method import Method
from raypfl.methods import FedAvg, FedSALoRA, FFALoRA, FlexLoRA, PartialPersonalization
from raypfl.methods.lora.flexlora import best_factors
from raypfl.models.lora import factor_pairs, with_lora
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    assert_close,
    both_executors,
    run_method,
    sent_per_client,
    torch_sgd,
)
from tests.support.runs import experiment

RANK = 2
SENT_A = RANK * 32 + RANK * 6
SENT_B = RANK * 6 + RANK * 5
FAST = replace(FP64, lr=0.5, epochs=2)
HEAD = 5 * CLASSES + CLASSES


def adapted(rank: int = RANK) -> nn.Module:
    """Return two dense layers with adapters, of which only these and the output layer are trained."""

    def plain() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)
        )

    network = with_lora(plain, rank)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("adapter" in name or name.startswith("5."))
    return network


def run(method: Method, *rounds, **options) -> Federation:
    return run_method(method, *rounds, **{"factory": adapted, **options})


def products(fed: Federation, theta: Tensor) -> list[Tensor]:
    """Return ``B A`` of each adapter, in float64, of models ``[..., P]``."""
    theta = theta.as_subclass(Tensor).double()
    return [fed.model.segment(theta, b) @ fed.model.segment(theta, a) for a, b in factor_pairs(fed.model)]


def trained_by_torch(fed: Federation, frozen: str = "") -> tuple[Tensor, Tensor]:
    """Train each client from the initial model by the bare loop; return models ``[K, P]`` and shares of samples."""
    rows = []
    start = fed.model.init(fed.seed)
    for client in range(len(fed.sizes)):
        net = fed.model.as_module(start)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in fed.model.segments and not (frozen and frozen in name))
        torch_sgd(net, fed.visits(client), lr=fed.training.lr)
        rows.append(fed.model.flatten(dict(net.named_parameters())))
    shares = torch.tensor(fed.sizes, dtype=start.dtype)
    return torch.stack(rows), shares / shares.sum()


@both_executors
@pytest.mark.parametrize("options", [{}, {"server_optimizer": "adam"}], ids=["sgd", "adam"])
def test_ffa_lora_never_changes_or_sends_a_and_charges_b_and_the_output_layer(options, executor):
    fed = run(FFALoRA(**options), executor=executor)
    is_a = fed.model.mask("lora A")
    start = fed.model.init(fed.seed)

    assert torch.equal(fed.server["theta"][is_a], start[is_a]) and int(is_a.sum()) == SENT_A
    assert (fed.server["theta"] != start)[~is_a].all()
    assert sent_per_client(fed.ledger, 1) == dict.fromkeys((("down", "theta"), ("up", "theta")), SENT_B + HEAD)


@both_executors
def test_ffa_lora_is_partial_training_with_a_frozen_to_the_bit(executor):
    a = run(FFALoRA(), executor=executor)
    b = run(PartialPersonalization(personal="", frozen="lora A"), executor=executor)
    assert torch.equal(a.server["theta"], b.server["theta"])


@both_executors
def test_the_mean_of_the_clients_products_is_exact_with_one_a_and_not_with_two_trained_factors(executor):
    for method, frozen in ((FFALoRA(), "adapter.0"), (FedAvg(), "")):
        fed = run(method, None, training=FAST, executor=executor)
        rows, shares = trained_by_torch(fed, frozen)
        assert_close(fed.server["theta"], shares @ rows)
        for of_mean, of_clients in zip(products(fed, fed.server["theta"]), products(fed, rows), strict=True):
            expected = torch.einsum("k,koi->oi", shares, of_clients)
            error = (of_mean - expected).norm() / expected.norm()
            assert error < 1e-12 if frozen else error > 1e-3


@both_executors
def test_fedsa_lora_with_nothing_personal_is_fedavg_of_the_adapters_to_the_bit(executor):
    a = run(FedSALoRA(personal=""), executor=executor)
    b = run(FedAvg(), executor=executor)
    assert torch.equal(a.server["theta"], b.server["theta"])


@both_executors
def test_fedsa_lora_sends_a_alone_keeps_b_and_the_output_layer_and_trains_all(executor):
    fed = run(FedSALoRA(), None, training=FP64, executor=executor)
    rows, shares = trained_by_torch(fed)
    is_a = fed.model.mask("lora A")

    assert_close(fed.server["theta"][is_a], (shares @ rows)[is_a])
    personal = torch.stack([torch.from_numpy(fed.state_of(client)["personal"]) for client in range(4)])
    assert_close(personal, rows[:, ~is_a])
    assert (fed.server["theta"] != fed.model.init(fed.seed))[is_a].any() and not (personal == personal[0])[1:].any()
    assert sent_per_client(fed.ledger, 0) == dict.fromkeys((("down", "shared"), ("up", "shared")), SENT_A)
    assert fed.method.global_model(fed.server) is None


def test_a_client_that_fedsa_lora_never_trained_trains_its_b_from_zero_and_leaves_a_as_it_is():
    fed = run(FedSALoRA(), [0, 1, 3], training=FP64)
    theta = fed.server["theta"]
    unseen = fed.method.unseen_model(fed.clients([2], round=fed.round), fed.server)[0].as_subclass(Tensor)

    net = fed.model.as_module(theta)
    assert all(not product.any() for product in products(fed, theta))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in fed.model.names("lora B, output layer"))
    torch_sgd(net, fed.visits(2, fed.round, "unseen"), lr=FP64.lr)
    assert_close(unseen, fed.model.flatten(dict(net.named_parameters())))
    assert torch.equal(unseen[fed.model.mask("lora A")], theta[fed.model.mask("lora A")])


@both_executors
@pytest.mark.parametrize("rank", [2, 7])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_flexlora_sends_the_best_approximation_of_the_mean_of_the_products(weighting, rank, executor):
    fed = run(FlexLoRA(weighting=weighting), None, training=FAST, factory=partial(adapted, rank), executor=executor)
    rows, shares = trained_by_torch(fed)
    if weighting == "uniform":
        shares = torch.full_like(shares, 0.25)

    is_adapter = fed.model.mask("adapters")
    assert_close(fed.server["theta"][~is_adapter], (shares @ rows)[~is_adapter])
    for sent, of_clients in zip(products(fed, fed.server["theta"]), products(fed, rows), strict=True):
        mean = torch.einsum("k,koi->oi", shares, of_clients)
        if rank == 7:  # more than either layer's outputs
            assert_close(sent, mean)
        else:
            singular_values = torch.linalg.svdvals(mean)
            assert singular_values[rank] > 1e-3 * singular_values[0] and torch.linalg.matrix_rank(sent) == rank
            assert_close((sent - mean).square().sum(), singular_values[rank:].square().sum())
            assert_close(torch.linalg.svdvals(sent)[:rank], singular_values[:rank])

    everything = rank * (32 + 6) + rank * (6 + 5) + HEAD
    assert sent_per_client(fed.ledger, 0) == dict.fromkeys((("down", "theta"), ("up", "theta")), everything)


def test_flexlora_of_one_client_is_its_training():
    fed = run(FlexLoRA(), [2], training=FAST)
    rows, _ = trained_by_torch(fed)
    for sent, of_client in zip(products(fed, fed.server["theta"]), products(fed, rows[2]), strict=True):
        assert_close(sent, of_client)


def test_flexlora_leaves_out_a_client_that_failed():
    expected = run(FlexLoRA(), [0, 1, 3], training=FAST)
    fed = Federation(method=FlexLoRA(), factory=adapted, training=FAST)
    fed.server = fed.method.start(fed.task)
    cohort = fed.cohort()
    cohort.present[2] = False
    fed.method.round(fed.server, cohort)
    assert_close(fed.server["theta"], expected.server["theta"])


def test_the_factors_depend_on_the_product_alone():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 2, 9, generator=generator, dtype=torch.float64)
    b = torch.randn(3, 7, 2, generator=generator, dtype=torch.float64)
    share = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    mixing = torch.randn(3, 2, 2, generator=generator, dtype=torch.float64)

    factors = best_factors(a, b, share)
    of_others = best_factors(torch.linalg.solve(mixing, a), b @ mixing, share)
    for factor, other in zip(factors, of_others, strict=True):
        assert_close(factor, other)
    assert_close(factors[0] @ factors[0].T, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("method", ["ffa-lora", "fedsa-lora", "flexlora"])
def test_a_network_without_adapters_is_refused_with_what_to_set(tmp_path: Path, method: str):
    with pytest.raises(ConfigError, match=rf"'{method}'.* but the network has none\. Set model\.lora to their rank"):
        raypfl.run(experiment(tmp_path, method=method, model__lora=0))
    for changes in ({"model__trained": "output layer"}, {"model__frozen": "lora A"}):
        with pytest.raises(ConfigError, match=r"freezes them\. Leave both out, or name 'adapters' in model.trained"):
            raypfl.run(experiment(tmp_path, method=method, **changes))
