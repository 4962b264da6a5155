"""HeteroFL, FedRolex and FjORD equal loops that slice the layers' weights, and FedAvg where all have all units."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.events import Warned
from raypfl.engine.prepared import Prepared
from raypfl.learning.objectives import Regression
from raypfl.methods import FedAvg, FedRolex, FjORD, HeteroFL
from raypfl.methods.sub_networks.slices import slices_of, units_of
from raypfl.models import FlatModel
from raypfl.models.networks import MODELS
from raypfl.runs.choices.turn import turn_of
from tests.support.federation import (
    CLASSES,
    FP64,
    ROUNDS,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    dropping_mlp,
    run_method,
    sent_per_client,
)
from tests.support.runs import TIMED, experiment

ALL = [0, 1, 2, 3]
RATES = (1.0, 0.5, 0.25)
TRAINING = replace(FP64, momentum=0.5, weight_decay=0.01, clip_norm=1.0, epochs=2)


def two_hidden() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES))


class TwoConvolutions(nn.Module):
    """Two convolutions with instance norm and pooling, then dense layers; its forward calls functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.GroupNorm(5, 5)
        self.conv2 = nn.Conv2d(5, 4, 3, padding=1, bias=False)
        self.dense = nn.Linear(16, 7)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.max_pool2d(self.conv2(x), 2).relu()
        return self.head(F.gelu(self.dense(torch.flatten(x, 1))))


both_networks = pytest.mark.parametrize("factory", [two_hidden, TwoConvolutions])

WIDTHS = {two_hidden: {"1": 6, "3": 5}, TwoConvolutions: {"conv1": 5, "conv2": 4, "dense": 7}}
"""The units of the hidden layers."""

INPUTS = {
    two_hidden: {"3": "1", "5": "3"},
    TwoConvolutions: {"norm": "conv1", "conv2": "conv1", "dense": "conv2", "head": "dense"},
}
"""Layer -> the hidden layer that it follows."""


def sliced(factory, net: nn.Module, rate: float, shift: int = 0) -> dict[str, tuple[Tensor, ...]]:
    """For each parameter, the indices that a slice has along its axes."""
    windows = {
        layer: (shift + torch.arange(math.ceil(rate * width))) % width for layer, width in WIDTHS[factory].items()
    }
    indices = {}
    for name, parameter in net.named_parameters():
        layer = name.split(".")[0]
        before = INPUTS[factory].get(layer)
        rows = windows.get("conv1" if layer == "norm" else layer, torch.arange(len(parameter)))
        axes = [rows]
        if parameter.dim() > 1:
            columns = windows[before] if before else torch.arange(parameter.shape[1])
            if layer == "dense":  # 2 x 2 numbers of each channel
                columns = (columns[:, None] * 4 + torch.arange(4)).flatten()
            axes.append(columns)
        indices[name] = tuple(axes)
    return indices


def outputs(factory, p: dict[str, Tensor], x: Tensor, rate: float = 1.0) -> Tensor:
    """The narrow network, by functions alone; hidden layers' outputs are divided by `rate`."""
    if factory is two_hidden:
        z = F.relu(F.linear(x.flatten(1), p["1.weight"], p["1.bias"]) / rate)
        return F.linear(torch.tanh(F.linear(z, p["3.weight"], p["3.bias"]) / rate), p["5.weight"], p["5.bias"])
    z = F.conv2d(x, p["conv1.weight"], p["conv1.bias"], padding=1) / rate
    z = F.relu(F.instance_norm(z, weight=p["norm.weight"], bias=p["norm.bias"]))
    z = F.relu(F.max_pool2d(F.conv2d(z, p["conv2.weight"], padding=1) / rate, 2)).flatten(1)
    return F.linear(F.gelu(F.linear(z, p["dense.weight"], p["dense.bias"]) / rate), p["head.weight"], p["head.bias"])


def slice_parameters(net, indices) -> dict[str, Tensor]:
    """Copy the entries of a slice, to be trained apart."""
    slices = {}
    for name, parameter in net.named_parameters():
        slices[name] = parameter.detach()[_grid(indices[name])].clone().requires_grad_()
    return slices


def scaled_loss(fed: Federation, rate: float):
    """The loss of HeteroFL and FedRolex at the parameters of a slice of this rate."""
    scale = rate if fed.method.scaler else 1.0
    return lambda p, x, y: F.cross_entropy(outputs(fed.factory, p, x, scale), y)


def rounds_by_hand(
    fed: Federation, cohorts, rates_of, shift_of=lambda round: 0, loss_of=None, classes_of=lambda client: range(CLASSES)
) -> Tensor:
    """Train narrow networks in a bare loop; return the global model after these rounds.

    ``loss_of(net, client, round)`` makes a client's loss of a slice, inputs and labels; None: `scaled_loss`. Of the
    output layer, the rows of ``classes_of(client)`` count.
    """
    t = fed.training
    net = as_module(fed.factory, fed.model.init(fed.seed))
    for round, cohort in enumerate(cohorts):
        total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        weights = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for client in cohort:
            rate = rates_of(client, round)
            indices = sliced(fed.factory, net, rate, shift_of(round))
            p = slice_parameters(net, indices)
            loss = loss_of(net, client, round) if loss_of else scaled_loss(fed, rate)
            optimizer = torch.optim.SGD(p.values(), t.lr, t.momentum, weight_decay=t.weight_decay)
            for x, y in fed.visits(client, round):
                optimizer.zero_grad()
                loss(p, x, y).backward()
                nn.utils.clip_grad_norm_(p.values(), t.clip_norm)
                optimizer.step()

            weight = fed.sizes[client] if fed.method.weighting == "samples" else 1
            for name, trained in p.items():
                mask = torch.ones(len(trained), dtype=torch.bool)
                if name.split(".")[0] in ("5", "head"):
                    mask = torch.tensor([c in classes_of(client) for c in range(CLASSES)])
                mask = mask.reshape(-1, *[1] * (trained.dim() - 1))
                total[name][_grid(indices[name])] += weight * mask * trained.detach()
                weights[name][_grid(indices[name])] += weight * mask

        with torch.no_grad():
            for name, parameter in net.named_parameters():
                has_owner = weights[name] > 0
                parameter[has_owner] = total[name][has_owner] / weights[name][has_owner]
    return as_vector(net)


def _grid(axes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return axes if len(axes) == 1 else (axes[0][:, None], axes[1])


def rates_of(fed: Federation) -> list[float]:
    return [fed.method.rates[level] for level in fed.server["levels"].tolist()]


@both_executors
@both_networks
@pytest.mark.parametrize("scaler", [True, False])
def test_rounds_of_heterofl_are_those_of_a_loop_that_slices_the_weights(factory, scaler, executor):
    method = HeteroFL(rates=RATES, scaler=scaler)
    fed = run_method(method, factory=factory, executor=executor, training=TRAINING)
    rates = rates_of(fed)
    assert set(rates) == set(RATES)
    assert_close(fed.server["theta"], rounds_by_hand(fed, ROUNDS, lambda client, round: rates[client]), 1e-12)
    assert not fed.warnings


@both_networks
def test_a_personal_model_predicts_as_the_narrow_network(factory):
    fed = run_method(HeteroFL(rates=RATES), factory=factory, training=FP64)
    x, _ = fed.samples(0)
    net = as_module(factory, fed.server["theta"])
    models = fed.method.personal_model(fed.clients(), fed.server).as_subclass(Tensor)
    for model, rate in zip(models, rates_of(fed), strict=True):
        indices = sliced(factory, net, rate)
        p = {name: parameter.detach()[_grid(indices[name])] for name, parameter in net.named_parameters()}
        assert_close(as_module(factory, model).eval()(x).detach(), outputs(factory, p, x), 1e-13)


@both_executors
@pytest.mark.parametrize("factory", [two_hidden, TwoConvolutions, dropping_mlp])
@pytest.mark.parametrize("kind", [HeteroFL, FedRolex, FjORD])
def test_clients_that_all_have_the_whole_network_are_fedavg_to_the_bit(kind, factory, executor):
    method = kind(rates=(1.0,))
    fedavg, sliced = (
        run_method(m, factory=factory, executor=executor) for m in (FedAvg(weighting=method.weighting), method)
    )
    assert torch.equal(sliced.server["theta"], fedavg.server["theta"])
    assert sent_per_client(sliced.ledger, 1)["up", "slices"] == sliced.model.size


def test_a_client_that_is_never_trained_gets_the_widest_slice_of_those_that_are():
    fed = run_method(FedRolex(rates=(0.25, 0.5, 1.0), shares=(1, 1, 0)), factory=two_hidden)
    widest = fed.method.slices(fed.model, len(ROUNDS) - 1)[1]
    assert set(fed.server["levels"].tolist()) == {0, 1}
    models = fed.method.unseen_model(fed.clients(), fed.server).as_subclass(Tensor)
    assert torch.equal(models, torch.where(widest, fed.server["theta"], 0.0).expand(4, -1))


@both_networks
def test_entries_beyond_the_widest_slice_never_move_and_others_do(factory):
    fed = run_method(HeteroFL(rates=(0.5, 0.25)), factory=factory)
    initial = fed.model.init(fed.seed)
    widest = slices_of(fed.model).entries(0.5)
    assert torch.equal(fed.server["theta"][~widest], initial[~widest])
    assert (fed.server["theta"][widest] != initial[widest]).float().mean() > 0.5


@both_executors
@both_networks
def test_rounds_of_fedrolex_are_those_of_a_loop_whose_slices_move(factory, executor):
    fed = run_method(FedRolex(rates=(0.6, 0.25)), factory=factory, executor=executor, training=TRAINING)
    rates = rates_of(fed)
    by_hand = rounds_by_hand(fed, ROUNDS, lambda client, round: rates[client], lambda round: round)
    assert_close(fed.server["theta"], by_hand, 1e-12)

    models = fed.method.personal_model(fed.clients(), fed.server)
    for model, rate in zip(models.as_subclass(Tensor), rates, strict=True):
        indices = sliced(factory, as_module(factory, by_hand), rate, len(ROUNDS) - 1)
        expected = as_module(factory, torch.zeros_like(by_hand))
        with torch.no_grad():
            for name, parameter in expected.named_parameters():
                whole = as_module(factory, by_hand).get_parameter(name)
                parameter[_grid(indices[name])] = whole[_grid(indices[name])]
        assert_close(model, as_vector(expected), 1e-12)


def test_the_first_round_of_fedrolex_is_heterofls_to_the_bit_and_the_second_is_not():
    for rounds, is_equal in (([ALL], True), ([ALL, ALL], False)):
        heterofl, fedrolex = (run_method(kind(rates=(0.5, 0.25)), *rounds) for kind in (HeteroFL, FedRolex))
        assert torch.equal(fedrolex.server["theta"], heterofl.server["theta"]) == is_equal


def test_every_unit_is_in_as_many_slices_in_the_rounds_of_a_width():
    model = FlatModel(two_hidden)
    method = FedRolex(rates=(0.4,))
    counts = torch.zeros(6)
    for round in range(6):
        counts += model.segment(method.slices(model, method.shift(round))[0].float(), "1.bias")
    assert counts.tolist() == [math.ceil(0.4 * 6)] * 6


def narrowed(factory, p: dict[str, Tensor], net: nn.Module, rate: float) -> dict[str, Tensor]:
    """The slice of a rate of the weights of a wider slice, which begins at the same units."""
    indices = sliced(factory, net, rate)
    return {name: tensor[_grid(indices[name])] for name, tensor in p.items()}


@both_executors
@both_networks
@pytest.mark.parametrize("distillation", [True, False])
def test_rounds_of_fjord_are_those_of_a_loop_that_draws_a_width_for_each_mini_batch(factory, distillation, executor):
    method = FjORD(rates=RATES, distillation=distillation)
    fed = run_method(method, factory=factory, executor=executor, training=TRAINING)
    rates = rates_of(fed)

    def loss_of(net, client, round):
        (draws,) = fed.clients([client], round).generators("widths")
        choices = [rate for rate in RATES if rate <= rates[client]]

        def loss(p, x, y):
            rate = choices[torch.randint(len(choices), (), generator=draws)]
            narrow = outputs(factory, narrowed(factory, p, net, rate), x)
            if not distillation:
                return F.cross_entropy(narrow, y)
            whole = outputs(factory, p, x)
            value = F.cross_entropy(whole, y)
            if rate < rates[client]:
                value = value + F.cross_entropy(narrow, whole.detach().softmax(1))
            return value

        return loss

    by_hand = rounds_by_hand(fed, ROUNDS, lambda client, round: rates[client], loss_of=loss_of)
    assert_close(fed.server["theta"], by_hand, 1e-12)
    assert not fed.warnings


@both_executors
@both_networks
@pytest.mark.parametrize(
    "method",
    [
        HeteroFL(rates=RATES, masked_loss=True, weighting="samples"),
        HeteroFL(rates=(0.5,), scaler=False, masked_loss=True),
        FedRolex(rates=(0.6, 0.25), masked_loss=True),
        FjORD(rates=RATES, masked_loss=True),
    ],
    ids=["heterofl", "heterofl, one rate", "fedrolex", "fjord"],
)
def test_rounds_with_a_masked_loss_are_those_of_a_loop_in_which_absent_classes_have_logits_of_zero(
    method, factory, executor
):
    # The first client has all classes; each of the others lacks some.
    classes_of = [range(CLASSES), [0], [0, 2], [1]]

    fed = Federation(method=method, factory=factory, executor=executor, training=TRAINING)
    for samples, classes in zip(fed.split, classes_of, strict=True):
        fed.labels[samples] = np.resize(classes, len(samples))
    fed.run_rounds(*ROUNDS)
    rates = rates_of(fed)
    scaler = isinstance(method, HeteroFL) and method.scaler

    def loss_of(net, client, round):
        has_class = torch.tensor([c in classes_of[client] for c in range(CLASSES)])
        choices = [rate for rate in RATES if rate <= rates[client]]
        (draws,) = fed.clients([client], round).generators("widths")

        def logits(p, x, scale=1.0):
            return outputs(factory, p, x, scale) * has_class

        def loss(p, x, y):
            if not isinstance(method, FjORD):
                return F.cross_entropy(logits(p, x, rates[client] if scaler else 1.0), y)
            rate = choices[torch.randint(len(choices), (), generator=draws)]
            whole = logits(p, x)
            if rate == rates[client]:
                return F.cross_entropy(whole, y)
            narrow = logits(narrowed(factory, p, net, rate), x)
            return F.cross_entropy(whole, y) + F.cross_entropy(narrow, whole.detach().softmax(1))

        return loss

    by_hand = rounds_by_hand(
        fed,
        ROUNDS,
        lambda client, round: rates[client],
        lambda round: round if isinstance(method, FedRolex) else 0,
        loss_of,
        lambda client: classes_of[client],
    )
    assert_close(fed.server["theta"], by_hand, 1e-12)
    assert sent_per_client(fed.ledger, 1)["up", "weights"] == CLASSES
    assert not fed.warnings


def test_a_masked_loss_of_clients_that_have_all_classes_is_no_other():
    masked, plain = (HeteroFL(rates=RATES, masked_loss=is_masked) for is_masked in (True, False))
    models = []
    for method in (masked, plain):
        fed = Federation(method=method, training=TRAINING)
        for samples in fed.split:
            fed.labels[samples] = np.resize(range(CLASSES), len(samples))
        models.append(fed.run_rounds(*ROUNDS)["theta"])
    assert_close(*models, 1e-13)


def test_a_masked_loss_is_for_classes_alone():
    assert not issubclass(Regression, HeteroFL(masked_loss=True).objectives)
    assert issubclass(Regression, HeteroFL().objectives)


def test_fjord_with_one_width_is_heterofl_without_scaler_by_samples_to_the_bit():
    fjord, heterofl = (
        run_method(m, factory=TwoConvolutions)
        for m in (FjORD(rates=(0.5,)), HeteroFL(rates=(0.5,), scaler=False, weighting="samples"))
    )
    assert torch.equal(fjord.server["theta"], heterofl.server["theta"])


def test_fjords_steps_take_the_multiplications_of_the_widths_that_they_draw():
    fed = Federation(factory=lambda: dense(nn.ReLU()))
    assert FjORD(rates=RATES, distillation=False).work(fed.task).tolist() == [1.75 / 3, 0.75 / 2, 0.25]
    assert FjORD(rates=RATES).work(fed.task).tolist() == [1 + 0.75 / 3, 0.5 + 0.25 / 2, 0.25]


def test_the_ledger_has_the_numbers_of_each_clients_slice():
    fed = run_method(HeteroFL(rates=RATES), ALL, factory=two_hidden)
    numbers = {1.0: 32 * 6 + 6 + 6 * 5 + 5 + 5 * 3 + 3, 0.5: 32 * 3 + 3 + 3 * 3 + 3 + 3 * 3 + 3}
    numbers[0.25] = 32 * 2 + 2 + 2 * 2 + 2 + 2 * 3 + 3
    expected = sorted((numbers[rate] for rate in rates_of(fed)), reverse=True)
    for direction, name in (("down", "theta"), ("up", "slices")):
        entries = [entry for entry in fed.ledger.entries if entry.direction == direction]
        assert {entry.name for entry in entries} == {name}
        assert [entry.numbers for entry in entries for _ in range(entry.clients)] == expected
        assert all(entry.bytes == 4 * entry.numbers for entry in entries)


def test_shares_are_exact_and_rates_are_drawn_once_or_in_every_round():
    fed = Federation(sizes=[4] * 12)
    levels = HeteroFL(rates=RATES).start(fed.task)["levels"]
    assert levels.bincount().tolist() == [4, 4, 4] and levels.tolist() != sorted(levels.tolist())
    shared = HeteroFL(rates=RATES, shares=(1, 0, 2)).start(fed.task)["levels"]
    assert shared.bincount(minlength=3).tolist() == [4, 0, 8]
    fixed, dynamic = (
        run_method(HeteroFL(rates=RATES, assignment=assignment), ALL, ALL) for assignment in ("fixed", "dynamic")
    )
    assert fixed.server["levels"].tolist() == fixed.method.start(fixed.task)["levels"].tolist()
    draws = [dynamic.method.drawn_levels(dynamic.task, round).tolist() for round in range(6)]
    assert dynamic.server["levels"].tolist() == draws[1] and len({tuple(draw) for draw in draws}) > 1


@both_executors
def test_rounds_with_rates_that_are_drawn_anew_are_those_of_the_loop(executor):
    method = HeteroFL(rates=(1.0, 0.3), assignment="dynamic")
    fed = run_method(method, factory=two_hidden, executor=executor, training=TRAINING)

    def rate(client: int, round: int) -> float:
        return method.rates[method.drawn_levels(fed.task, round)[client]]

    assert_close(fed.server["theta"], rounds_by_hand(fed, ROUNDS, rate), 1e-12)


@pytest.mark.parametrize(
    "rate, units", [(1.0, 128), (1 / 16, 8), (0.07, 9), (0.001, 1)], ids=["all", "sixteenth", "up", "one"]
)
def test_units_are_rounded_up(rate, units):
    assert units_of(128, rate) == units
    assert units_of(100, 0.07) == 7  # although 0.07 * 100 is a little above


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "fedavg_cnn", "conv2cifar", "convnet"])
def test_slices_of_rate_one_half_have_half_of_the_units_of_built_in_networks(name):
    model = FlatModel(lambda: MODELS.get(name)(input_shape=(1, 16, 16), num_classes=10))
    for segment, is_entry in model.unflatten(slices_of(model).entries(0.5)).items():
        units = is_entry.reshape(len(is_entry), -1).any(1)
        is_output = segment in model.output_tensors.values()
        assert units.sum() == (10 if is_output else len(is_entry) / 2)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.inner = inner
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head((x + self.inner(x)).flatten(1))


class ByShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(32, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dense(x.view(len(x), -1)).sigmoid())


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 8), *layers, nn.Linear(8, CLASSES))


def convolution(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.Flatten(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize(
    "factory, reason",
    [
        (NormalisedConv, "BatchNorm2d 'norm' has running statistics"),
        (lambda: dense(nn.LayerNorm(8)), "LayerNorm '2' normalises over several units"),
        (
            lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)),
            "GroupNorm '1'",
        ),
        (lambda: dense(nn.Sigmoid()), "Sigmoid '2' is not among the layers"),
        (lambda: dense(nn.MaxPool1d(1)), "MaxPool1d '2' pools over units"),
        (lambda: Residual(nn.Conv2d(4, 4, 3, padding=1)), "the step 'add' does not take the output of one layer"),
        (ByShape, "its forward cannot be followed|the step 'view'"),
        (lambda: dense(*[nn.Linear(8, 8)] * 2), "'2' is used twice|shared with another layer"),
        (lambda: convolution(nn.Linear(2, 2)), "Linear '1' has inputs that are not the flattened units of '0'"),
    ],
    ids=["batch norm", "layer norm", "group norm", "sigmoid", "pool", "residual", "view", "twice", "maps"],
)
def test_networks_whose_slices_are_not_narrower_networks_are_refused_with_the_reason(factory, reason):
    with pytest.raises(ConfigError, match=reason):
        HeteroFL().check(FlatModel(factory))


def test_frozen_layers_are_refused():
    with pytest.raises(ConfigError, match=r"'1\.weight' is frozen"):
        HeteroFL().check(FlatModel(two_hidden, frozen="1"))


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        HeteroFL(rates=(1.0, 0.0))
    with pytest.raises(ConfigError, match=r"3 numbers and method\.rates 2"):
        HeteroFL(rates=(1.0, 0.5), shares=(1, 1, 1)).check(FlatModel(two_hidden))


def test_noise_on_the_entries_outside_of_a_slice_is_refused_before_the_run_with_the_reason(tmp_path):
    settings = experiment(tmp_path / "run", method="heterofl", privacy__noise=1.0)
    with pytest.raises(ConfigError, match=r"moved them: by the noise of privacy\.noise"):
        raypfl.run(settings)
    assert not list(tmp_path.rglob("experiment.yaml"))


def test_slices_are_forgotten_with_their_network():
    model = FlatModel(two_hidden)
    assert slices_of(model) is slices_of(model)
    forgotten = weakref.ref(model)
    del model
    gc.collect()
    assert forgotten() is None


def test_a_slice_has_the_share_of_the_multiplications_of_the_narrow_network():
    def multiplications(units: int) -> int:
        return 32 * units + 3 * units

    model = FlatModel(lambda: dense(nn.ReLU()))
    assert slices_of(model).work(0.5, (2, 4, 4)) == multiplications(4) / multiplications(8)
    images = FlatModel(TwoConvolutions)
    whole = 5 * 2 * 9 * 16 + 4 * 5 * 9 * 16 + 16 * 7 + 7 * 3
    assert slices_of(images).work(0.5, (2, 4, 4)) == (3 * 2 * 9 * 16 + 2 * 3 * 9 * 16 + 8 * 4 + 4 * 3) / whole


@pytest.mark.parametrize("assignment", ["fixed", "dynamic"])
def test_in_simulated_time_a_client_of_a_small_slice_sends_and_computes_less(tmp_path, assignment):
    # With a third of the clients at 1, the mean size is not that of the two clients that are rehearsed.
    method = {"name": "fedrolex", "rates": [1, 0.25], "shares": [1, 2], "assignment": assignment}
    settings = experiment(tmp_path, **TIMED, method=method, training__epochs=1)
    data = settings.load_data()
    prepared = Prepared(settings, data)
    turns = prepared.turns(turn_of(prepared))
    clients = np.arange(data.num_clients)

    level = settings.method.drawn_levels(prepared.task, 0).numpy()
    sizes = np.array([65 * 16 + 17 * 10, 65 * 4 + 5 * 10])[level]
    work = np.array([1.0, 0.25])[level]
    assert turns.turn.down_bytes == turns.turn.up_bytes == pytest.approx(4 * sizes.mean())
    if assignment == "dynamic":
        sizes = np.full(len(clients), sizes.mean())
        work = np.full(len(clients), work.mean())
    expected = turns.devices.turn_seconds(clients, work * data.sizes("train"), 4 * sizes, 4 * sizes)
    np.testing.assert_allclose(turns.turn_seconds(clients), expected)
    np.testing.assert_allclose(turns.download_seconds(clients), turns.devices.download_seconds(clients, 4 * sizes))

    events = []
    result = raypfl.run(settings, listeners=[events.append])
    assert not [event for event in events if isinstance(event, Warned)]
    assert (result.rounds["simulated_seconds"].to_numpy() <= turns.turn_seconds(clients).max()).all()
