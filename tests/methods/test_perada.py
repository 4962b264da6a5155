"""PerAda: limiting cases to the bit, its steps by hand, what it trains and sends, and its distillation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from raypfl.learning.augmentation import Crop, Flip
from raypfl.methods import Ditto, FedAvg, FedDF, Local, PerAda
from raypfl.models import FlatModel
from raypfl.models.architectures.residual import ResidualAdapter
from tests.support.federation import (
    CLASSES,
    FP64,
    ONE_STEP,
    POOLED,
    ROUNDS,
    Federation,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    small_mlp,
)

ADAPTED = "adapters, output layer"
SAMPLES = {"weighting": "samples"}


class AdaptedConv(nn.Module):
    """A convolution with an adapter, batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.adapter = ResidualAdapter(3, nn.BatchNorm2d(3))
        nn.init.normal_(self.adapter.conv.weight)  # far from the identity
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.adapter(self.conv(x))).relu().flatten(1))


def adapting(method, trained: str = ADAPTED, **options) -> Federation:
    """Return a federation whose clients train a part of the network; the rest is frozen."""
    fed = Federation(AdaptedConv, method=method, group_size=2, **options)
    fed.model = FlatModel(AdaptedConv, seed=11, dtype=torch.float64, trained=trained)
    return fed


def distillation_loss(fed: Federation) -> float:
    return fed.cohorts[-1].logged.values["distillation_loss"]


# Limiting cases


@both_executors
@both_networks
def test_perada_without_adapters_and_distillation_is_ditto_to_the_bit(factory, executor):
    ditto = run_method(Ditto(lam=0.3), factory=factory, executor=executor)
    perada = run_method(PerAda(lam=0.3, steps=0, **SAMPLES), factory=factory, executor=executor)
    assert torch.equal(perada.server["theta"], ditto.server["theta"])
    assert torch.equal(client_states(perada), client_states(ditto))


@both_networks
def test_peradas_global_model_without_adapters_is_feddfs_to_the_bit(factory):
    options = {"steps": 5, "batch_size": 4, "lr": 0.01}
    feddf = run_method(FedDF(**options), factory=factory)
    perada = run_method(PerAda(**options, **SAMPLES, student="train"), factory=factory)
    assert torch.equal(perada.server["theta"], feddf.server["theta"])
    assert not torch.equal(perada.server["theta"], run_method(FedAvg(), factory=factory).server["theta"])


@both_executors
def test_peradas_personal_adapters_without_pull_are_trained_alone_to_the_bit(executor):
    alone = adapting(Local(), executor=executor)
    perada = adapting(PerAda(lam=0.0, steps=3), executor=executor)
    for fed in (alone, perada):
        fed.run_rounds(*ROUNDS)
    assert torch.equal(client_states(perada), client_states(alone))


def test_peradas_adapters_without_distillation_are_uniform_fedavgs():
    fedavg = adapting(FedAvg(weighting="uniform"))
    perada = adapting(PerAda(lam=5.0, steps=0))
    assert torch.equal(perada.run_rounds(*ROUNDS)["theta"], fedavg.run_rounds(*ROUNDS)["theta"])


# Its steps


def test_a_personal_step_descends_the_loss_and_pulls_toward_the_received_model():
    lam = 0.7
    lr = 0.1
    fed = Federation(method=PerAda(lam=lam, steps=0), training=ONE_STEP)
    w = v = fed.model.init(fed.seed)

    for _ in range(3):
        fed.run_rounds(None)
        v = v - lr * (gradient(fed, v, 1) + lam * (v - w))
        w = torch.stack([w - lr * gradient(fed, w, c) for c in range(4)]).mean(0)
        assert_close(client_states(fed)[1], v)
        assert_close(fed.server["theta"], w)


def test_clients_keep_their_adapters_between_the_rounds_they_take_part_in():
    fed = adapting(PerAda(steps=0))
    fed.run_rounds([0, 1, 2, 3])
    before = client_states(fed)
    fed.run_rounds([0, 2], [0, 2])
    after = client_states(fed)
    assert torch.equal(after[[1, 3]], before[[1, 3]]) and not torch.equal(after[0], before[0])
    clients = fed.clients([1, 3], fed.round, personal=before[[1, 3]])
    assert torch.equal(fed.method.personal_model(clients, fed.server).as_subclass(Tensor), before[[1, 3]])


# What is trained and sent


def test_a_step_moves_every_tensor_of_the_adapters_and_the_head():
    fed = adapting(PerAda(steps=0))
    start = fed.model.unflatten(fed.model.init(fed.seed))
    after = fed.model.unflatten(fed.run_rounds(None)["theta"])
    assert after.keys() == {"adapter.norm.weight", "adapter.norm.bias", "adapter.conv.weight", "adapter.conv.bias"} | {
        "adapter.norm.running_mean",
        "adapter.norm.running_var",
        "head.weight",
        "head.bias",
    }
    assert all(bool((after[name] != start[name]).any()) for name in after)


def test_frozen_tensors_stay_unchanged_and_trained_ones_are_sent_once_each_way():
    fed = adapting(PerAda(steps=3, batch_size=4))
    before = {name: tensor.clone() for name, tensor in fed.model.module.state_dict().items()}
    fed.run_rounds(*ROUNDS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fed.model.module.state_dict().items())
    assert {name.partition(".")[0] for name in fed.model.segments} == {"adapter", "head"}

    for number, cohort in enumerate(ROUNDS):
        assert sent_per_client(fed.ledger, number) == {(d, "theta"): fed.model.size for d in ("down", "up")}
        sent = {(e.direction, e.clients) for e in fed.ledger.entries if e.round == number}
        assert sum(clients for direction, clients in sent if direction == "up") in (2, len(cohort))


def test_perada_warns_about_a_network_that_is_trained_whole():
    fed = adapting(PerAda())
    fed.method.check(fed.model)
    with pytest.warns(UserWarning, match=r"all 183 parameters of this one are trained and sent: set model\.trained"):
        fed.method.check(FlatModel(small_mlp))


# Distillation


@both_executors
def test_the_uniform_average_is_trained_on_the_softmax_of_the_cohorts_mean_logits(executor):
    cohort = [0, 1, 3]
    lr = 0.02
    options = {"training": FP64, "executor": executor, "group_size": 2}
    fed = Federation(AdaptedConv, method=PerAda(steps=7, batch_size=4, lr=lr), **options)
    theta = fed.run_rounds(cohort)["theta"]
    start = fed.model.init(fed.seed)
    clients = fed.clients(cohort)
    models = clients.sgd(clients.loss, start).as_subclass(Tensor)
    teachers = [as_module(AdaptedConv, model).eval() for model in models]
    student = as_module(AdaptedConv, models.mean(0)).eval()
    statistics = models.mean(0)[fed.model.num_parameters :]
    adam = torch.optim.Adam(student.parameters(), lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 7)

    for batch in fed.pools.pool("auxiliary", 0).batches(4, steps=7):
        with torch.no_grad():
            p = torch.stack([teacher(batch.x) for teacher in teachers]).mean(0).softmax(1)
        adam.zero_grad()
        (p * (p.log() - student(batch.x).log_softmax(1))).sum(1).mean().backward()
        adam.step()
        cosine.step()

    assert_close(theta, as_vector(student), 1e-6)
    assert torch.equal(fed.model.buffers(theta), statistics)  # the pool leaves no trace in them


def test_with_fixed_features_the_mean_head_equals_the_ensemble_and_distilling_changes_nothing():
    once = {"steps": 1, "batch_size": POOLED}
    head = adapting(PerAda(**once), trained="output layer")
    adapters = adapting(PerAda(**once))
    for fed in (head, adapters):
        fed.run_rounds(None)
    assert abs(distillation_loss(head)) < 1e-12 and distillation_loss(adapters) > 1e-8


def test_a_single_teacher_changes_nothing_whatever_view_of_the_pool_both_see():
    standing = {"steps": 6, "batch_size": 4, "lr": 1e-12}
    views = adapting(PerAda(augment=True, **standing), augmentation=[Crop(padding=1), Flip()])
    views.run_rounds([2])
    assert abs(distillation_loss(views)) < 1e-12
    logged = views.cohorts[-1].logged.values
    assert logged["ensemble_accuracy"] == logged["average_accuracy"] == logged["student_accuracy"]

    views.run_rounds([0, 2])
    assert distillation_loss(views) > 1e-8
    alike = Federation(method=PerAda(**standing), training=replace(FP64, lr=1e-300))  # all end where they begin
    alike.run_rounds(None)

    assert abs(distillation_loss(alike)) < 1e-12


def test_distillation_can_be_limited_to_the_first_rounds():
    fed = adapting(PerAda(steps=2, batch_size=4, distill_rounds=2))
    fed.round = 1
    fed.run_rounds(None, None, None)
    assert ["distillation_loss" in cohort.logged.values for cohort in fed.cohorts] == [True, True, False]
