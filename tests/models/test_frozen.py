"""Frozen layers are in no vector and never move, and their batch norm normalises by its stored statistics."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.common.messages import per_client
from raypfl.methods import FedAvg, PartialPersonalization
from raypfl.models import MODELS, FlatModel
from raypfl.models.heads import output_segments
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    NormalisedConv,
    assert_close,
    bare_loop,
    both_executors,
    sent_per_client,
    small_mlp,
)


class HalfFrozenConv(NormalisedConv):
    """A network whose convolution and batch norm are frozen, with statistics that are not the initial ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.norm.running_mean.fill_(0.3)
        self.norm.running_var.fill_(2.0)


def frozen_by(how: str, factory=NormalisedConv) -> FlatModel:
    dtype = torch.float64
    if how == "the network":
        return FlatModel(HalfFrozenConv, seed=11, dtype=dtype)
    if how == "frozen":
        return FlatModel(factory, seed=11, dtype=dtype, frozen="conv, norm")
    return FlatModel(factory, seed=11, dtype=dtype, trained="output layer")


def with_model(model: FlatModel, **options) -> Federation:
    fed = Federation(**options)
    fed.model = model
    return fed


@both_executors
@pytest.mark.parametrize("how", ["the network", "frozen", "trained"])
def test_frozen_batch_norm_neither_moves_nor_sends_its_statistics_and_normalises_by_them(how, executor):
    model = frozen_by(how)
    assert list(model.segments) == ["head.weight", "head.bias"] and model.num_buffers == 0
    fed = with_model(model, executor=executor, method=FedAvg())
    start = model.init(fed.seed)
    clients = fed.clients()
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    trained = clients.sgd(clients.loss, start)

    for k in range(4):
        net = model.as_module(start)  # in evaluation mode, so its batch norm uses its statistics
        optimizer = torch.optim.SGD(net.head.parameters(), lr=fed.training.lr)
        for x, y in fed.visits(k):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        assert_close(trained[k], torch.cat([p.detach().reshape(-1) for p in net.head.parameters()]))

    fed.run_rounds(None)
    assert set(sent_per_client(fed.ledger, 0).values()) == {model.size}
    after = model.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@both_executors
def test_a_frozen_network_may_be_called_twice_and_takes_batches_of_one_sample(executor):
    def factory() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))

    fed = with_model(FlatModel(factory, dtype=torch.float64, frozen="2"), sizes=(5, 9), executor=executor)
    clients = fed.clients()

    def twice(p, batch):
        return (clients.loss(p, batch) + clients.loss(p, batch)) / 2

    once = clients.sgd(clients.loss, clients.initial).as_subclass(Tensor)
    assert_close(clients.sgd(twice, clients.initial), once)


def test_batch_norm_without_parameters_is_frozen_with_the_layers_around_it():
    def factory() -> nn.Module:
        body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False))
        return nn.Sequential(body, nn.Flatten(), nn.Linear(12, CLASSES))

    assert FlatModel(factory).num_buffers == FlatModel(factory, frozen="2").num_buffers == 6
    assert FlatModel(factory, frozen="0").num_buffers == 0
    assert not FlatModel(factory, frozen="0").module.get_submodule("0.1").training


@pytest.mark.parametrize(
    ("adapters", "numbers"), [("bias", 1_404_160 + 5_130), ("no bias", 1_400_320 + 5_130)], ids=["bias", "no bias"]
)
def test_a_resnet_that_trains_adapters_and_head_sends_them_and_their_statistics(adapters, numbers):
    resnet = partial(MODELS.get("resnet18"), (3, 32, 32), 10, stem="cifar", adapters=adapters)
    model = FlatModel(resnet, trained="adapters, output layer")
    adapter_norms = 2 * (4 * 64 + 4 * 128 + 4 * 256 + 4 * 512)
    assert (model.num_parameters, model.num_buffers) == (numbers, adapter_norms)
    assert FlatModel(resnet).num_buffers == adapter_norms + 9_600
    with model.mode(train=True):
        training = {name for name, m in model.module.named_modules() if isinstance(m, nn.BatchNorm2d) and m.training}
    assert len(training) == 16 and all("adapter" in name for name in training)


@both_executors
def test_freezing_by_the_method_is_freezing_by_the_network(executor):
    by_method = Federation(executor=executor, method=PartialPersonalization(personal="", frozen="1"))
    model = FlatModel(small_mlp, seed=11, dtype=torch.float64, frozen="1")
    with torch.no_grad():
        for name in ("weight", "bias"):
            frozen = by_method.model.segment(by_method.model.init(3), f"1.{name}")
            getattr(model.module.get_submodule("1"), name).copy_(frozen)

    by_network = with_model(model, executor=executor, method=FedAvg())
    learned = by_method.model.mask("3")
    assert torch.equal(by_method.run_rounds(None)["theta"][learned], by_network.run_rounds(None)["theta"])

    sent = [list(sent_per_client(fed.ledger, 0).values()) for fed in (by_method, by_network)]
    assert sent[0] == sent[1] == [by_network.model.size] * 2


@both_executors
def test_a_method_trains_as_usual_beside_frozen_layers(executor):
    """Another model, momentum, a mask and steps of a method's own, on a network of which a part is in no vector."""
    fed = with_model(frozen_by("frozen"), executor=executor)
    clients = fed.clients()

    def loss(p, batch, teacher):
        return clients.loss(p, batch) + batch.mean((clients.model(p, batch.x) - teacher(batch.x)).square().sum(1))

    teacher = clients.other(per_client(torch.stack([fed.model.init(50 + k) for k in range(4)])))
    trained = clients.sgd(loss, clients.initial, train="head.weight", teacher=teacher)
    theta = clients.initial.repeat(4, 1)
    for batch in clients.minibatches():
        theta = batch.step(loss, theta, teacher=teacher)
    assert torch.equal(fed.model.segment(trained, "head.bias")[0], fed.model.segment(clients.initial, "head.bias"))
    assert torch.isfinite(theta).all() and not torch.equal(theta[0], theta[1])


def test_patterns_that_freeze_nothing_everything_or_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"'cnov'; did you mean 'conv'"):
        FlatModel(NormalisedConv, frozen="cnov")
    with pytest.raises(ConfigError, match="no trainable parameters"):
        FlatModel(NormalisedConv, frozen="*")
    with pytest.raises(ConfigError, match=r"model\.frozen and model\.trained are both set"):
        raypfl.Experiment(model={"name": "mlp", "frozen": "input layer", "trained": "output layer"})
    with pytest.raises(ConfigError, match=r"model\.frozen is 3; it must be text"):
        raypfl.Experiment(model={"name": "mlp", "frozen": 3})
    with pytest.raises(ConfigError, match=r"'head' selects only frozen tensors \(head\.bias, head\.weight\)"):
        FlatModel(NormalisedConv, frozen="output layer").mask("head")


def test_words_mean_the_same_parts_whatever_is_frozen():
    model = FlatModel(NormalisedConv, frozen="output layer")
    assert model.names("input layer") == ["conv.weight", "conv.bias"]
    assert model.names("feature extractor") == list(model.segments)
    with pytest.raises(
        ConfigError, match=r"selects only frozen tensors.* change model\.frozen, model\.trained or model\.lora"
    ):
        model.names("output layer")
    with pytest.raises(ConfigError, match=r"the output layer, which is frozen; leave it out of model\.frozen"):
        output_segments(model, "weight")


def test_the_setting_frozen_survives_yaml():
    experiment = raypfl.Experiment(model={"name": "mlp", "frozen": "input layer"}, training=FP64)
    assert raypfl.Experiment.from_yaml(experiment.to_yaml()).model.frozen == "input layer"


def test_batch_norm_without_running_statistics_ignores_the_padding_of_a_batch():
    def factory() -> nn.Module:
        body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, track_running_stats=False))
        return nn.Sequential(body, nn.Flatten(), nn.Linear(12, CLASSES))

    fed = Federation(factory)
    clients = fed.clients()
    assert_close(clients.sgd(clients.loss, clients.initial), bare_loop(fed, clients.initial.expand(4, -1))[0])
