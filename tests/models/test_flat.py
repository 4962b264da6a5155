"""A network is a function of one flat vector, to the bit."""

from __future__ import annotations

from typing import Self

import pytest
import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models import FlatModel
from raypfl.models.flat import FunctionalCall
from raypfl.models.heads import output_segments
from tests.support.federation import SHAPE, NormalisedConv, as_module, as_vector, both_networks, small_mlp


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Scaled(nn.Module):
    """A layer whose outputs are multiplied by a trained number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


class HalfFrozen(nn.Module):
    """A frozen layer between two that learn, with a buffer that is not stored and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.last = nn.Linear(3, 2)
        self.register_buffer("table", torch.ones(7), persistent=False)
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(self.first(x)))


@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv, Tied, Scaled, HalfFrozen])
def test_a_vector_as_a_module_computes_the_same_and_is_a_copy(factory):
    model = FlatModel(factory)
    theta = torch.rand(model.size)
    module = model.as_module(theta)
    x = torch.randn(2, 2, 4, 4) if factory in (small_mlp, NormalisedConv) else torch.randn(2, 4)
    with model.mode(train=False):
        expected = model(theta, x)
    assert torch.equal(module(x), expected) and not module.training

    with torch.no_grad():
        next(module.parameters()).zero_()
    assert torch.equal(model.as_module(theta)(x), expected) and model.module.training


@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv, Tied, Scaled, HalfFrozen])
def test_unflattening_and_flattening_a_vector_changes_no_bit(factory):
    model = FlatModel(factory)
    theta = torch.randn(model.size)
    parts = model.unflatten(theta)
    assert torch.equal(model.flatten(parts), theta)
    assert list(parts) == list(model.segments)
    assert all(parts[n].untyped_storage().data_ptr() == theta.untyped_storage().data_ptr() for n in parts)


@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv, Tied, Scaled, HalfFrozen])
def test_segments_follow_the_network_without_gap_or_overlap(factory):
    model = FlatModel(factory)
    net = model.factory()
    expected = {n: p.shape for n, p in net.named_parameters() if p.requires_grad}
    expected |= {n: b.shape for n, b in net.named_buffers() if b.is_floating_point() and n in net.state_dict()}

    assert {n: s.shape for n, s in model.segments.items()} == expected
    ends = [0]
    for segment in model.segments.values():
        assert segment.start == ends[-1]
        assert segment.stop - segment.start == segment.shape.numel()
        ends.append(segment.stop)

    assert ends[-1] == model.size


@both_networks
@pytest.mark.parametrize("train", [True, False])
def test_the_function_of_a_vector_is_the_module(factory, train):
    model = FlatModel(factory, dtype=torch.float64)
    theta = torch.rand(model.size, dtype=torch.float64)
    net = as_module(factory, theta).train(train)
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    with model.mode(train=train):
        assert torch.equal(model(theta.clone(), x), net(x))


def test_calls_in_training_mode_move_a_copy_of_the_statistics():
    model = FlatModel(NormalisedConv, dtype=torch.float64)
    theta = torch.rand(model.size, dtype=torch.float64)
    before = theta.clone()
    net = as_module(NormalisedConv, theta).train()
    batches = torch.randn(2, 5, 2, 4, 4, dtype=torch.float64)
    call = FunctionalCall(model, model.buffers(theta))

    for x in batches:
        with model.mode(train=True), call:
            assert torch.equal(model(model.parameters(theta), x), net(x))

    torch.testing.assert_close(call.moved(), as_vector(net)[model.num_parameters :], rtol=0, atol=0)
    assert not torch.equal(call.moved(), model.buffers(before))
    assert torch.equal(theta, before)


def test_parameters_without_statistics_are_refused_outside_training():
    model = FlatModel(NormalisedConv)
    with pytest.raises(ValueError, match="batch-norm statistics"):
        model(torch.zeros(model.num_parameters), torch.zeros(1, 2, 4, 4))


def test_a_vector_of_another_length_is_refused_with_both_lengths():
    model = FlatModel(NormalisedConv)
    expected = f"vector of {model.size + 1} numbers.*{model.num_parameters} parameters and 6 buffer"
    with pytest.raises(ValueError, match=expected):
        model.unflatten(torch.zeros(model.size + 1))


@pytest.mark.parametrize("bound", [False, True])
def test_a_tied_weight_is_counted_once_and_learns_from_both_places(bound):
    model = FlatModel(Tied, dtype=torch.float64)
    assert model.num_parameters == 4 * 4 + 4 + 4
    theta = torch.randn(24, dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64)
    net = as_module(Tied, theta)
    net(x).square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in net.parameters()])

    if bound:
        with model.bound() as vector, vector:
            vector.bind(theta)
            out = model(vector.parameters, x)
            assert torch.equal(out, net(x))
            grads = torch.autograd.grad(out.square().sum(), vector.tensors)
            gradient = torch.cat([g.reshape(-1) for g in grads])
    else:
        p = theta.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(p, x).square().sum(), p)

    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_output_layer_has_the_weight_that_it_shares_with_another_layer():
    model = FlatModel(Tied)
    assert model.names("output layer") == ["first.weight", "second.bias"]
    assert model.names("feature extractor") == ["first.bias"]
    assert output_segments(model, "weight", "bias") == "first.weight,second.bias"

    theta = torch.randn(model.size)
    x = torch.randn(6, 4)
    z, outputs = model.features(theta, x)
    layer = as_module(Tied, theta).second
    assert torch.equal(outputs, layer(z)) and torch.equal(outputs, model(theta, x))


def test_frozen_parameters_are_in_no_vector_and_stay_those_of_the_template():
    model = FlatModel(HalfFrozen, seed=5)
    assert list(model.segments) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert model.num_buffers == 0

    with torch.random.fork_rng():
        torch.manual_seed(5)
        template = HalfFrozen()

    theta = model.init(9)
    x = torch.randn(3, 4)
    parts = model.unflatten(theta)
    hidden = template.frozen(x @ parts["first.weight"].T + parts["first.bias"])

    torch.testing.assert_close(model(theta, x), hidden @ parts["last.weight"].T + parts["last.bias"])


def test_a_network_with_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no trainable parameters"):
        FlatModel(lambda: nn.Linear(2, 2).requires_grad_(False))


def test_batch_norm_with_a_cumulative_average_is_refused():
    with pytest.raises(ConfigError, match="momentum=None"):
        FlatModel(lambda: nn.BatchNorm1d(3, momentum=None))


def test_initial_vectors_depend_on_their_seed_alone_and_leave_the_global_stream_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    a = FlatModel(small_mlp, seed=1)
    b = FlatModel(small_mlp, seed=2)

    assert torch.equal(a.init(7), b.init(7))
    assert not torch.equal(a.init(7), a.init(8))
    assert torch.equal(torch.rand(3), expected)

    with torch.random.fork_rng():
        torch.manual_seed(7)
        assert torch.equal(a.init(7), as_vector(small_mlp()))


def test_batch_norm_starts_at_mean_zero_and_variance_one():
    model = FlatModel(NormalisedConv)
    assert torch.equal(model.buffers(model.init(0)), torch.tensor([0.0, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("head", {"head.weight", "head.bias"}),
        ("head.bias", {"head.bias"}),
        ("*.weight", {"conv.weight", "norm.weight", "head.weight"}),
        ("norm", {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}),
        ("conv, head.bias", {"conv.weight", "conv.bias", "head.bias"}),
        ("norm,*running*", {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}),
    ],
)
def test_patterns_select_segments_and_masks_mark_them(pattern, chosen):
    model = FlatModel(NormalisedConv)
    assert set(model.names(pattern)) == chosen
    assert model.names(pattern) == [n for n in model.segments if n in chosen]
    marks = model.unflatten(model.mask(pattern))
    assert {n for n, mark in marks.items() if mark.all()} == chosen
    assert {n for n, mark in marks.items() if mark.any()} == chosen


@pytest.mark.parametrize(
    ("word", "chosen"),
    [
        ("input layer", "conv"),
        ("output layer", "head"),
        ("feature extractor", "conv,norm"),
        ("batch norm", "norm"),
        ("output layer, conv.bias", "head,conv.bias"),
    ],
)
def test_words_select_the_parts_that_most_networks_have(word, chosen):
    model = FlatModel(NormalisedConv)
    assert model.names(word) == model.names(chosen)


def test_words_go_by_layers_that_learn_and_may_select_nothing():
    assert FlatModel(HalfFrozen).names("output layer") == ["last.weight", "last.bias"]
    assert FlatModel(small_mlp).names("input layer") == ["1.weight", "1.bias"]
    assert FlatModel(small_mlp).names("batch norm") == []
    alone = FlatModel(lambda: nn.Linear(2, 2))
    assert alone.names("output layer") == ["weight", "bias"] and not alone.mask("feature extractor").any()


@pytest.mark.parametrize("frozen", [None, "output layer"])
def test_the_number_of_features_is_the_width_of_the_output_layers_inputs(frozen):
    model = FlatModel(NormalisedConv, frozen=frozen)
    features, _ = model.features(model.init(0), torch.zeros(2, *SHAPE))
    assert features.shape == (2, model.num_features)


def test_a_network_that_ends_in_a_layer_without_a_matrix_has_no_number_of_features():
    with pytest.raises(ConfigError, match=r"no weight of \[outputs, inputs\], but 1.weight, 1.bias: let it end in"):
        _ = FlatModel(lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))).num_features


def test_a_module_with_the_same_prefix_is_not_selected():
    model = FlatModel(lambda: nn.ModuleDict({"head": nn.Linear(2, 2), "head2": nn.Linear(2, 2)}))
    assert model.names("head") == ["head.weight", "head.bias"]


def test_a_segment_is_a_view_for_one_model_and_for_many():
    model = FlatModel(small_mlp)
    theta = torch.arange(2 * model.size, dtype=torch.float32).reshape(2, -1)
    assert model.segment(theta, "3.weight").shape == (2, 3, 5)
    model.segment(theta, "3.bias")[1] = -1
    assert torch.equal(theta[1, -3:], torch.tensor([-1.0, -1, -1]))
    assert (theta[0] >= 0).all()


def test_a_misspelt_segment_gets_the_nearest_name():
    model = FlatModel(NormalisedConv)
    with pytest.raises(ConfigError, match=r"'haed.weight'; did you mean 'head.weight'\?"):
        model.segment(torch.zeros(model.size), "haed.weight")
    with pytest.raises(ConfigError, match=r"matches 'head.wieght'; did you mean 'head.weight'\?"):
        model.mask("conv, head.wieght")
    with pytest.raises(ConfigError, match=r"matches 'output layers'; did you mean 'output layer'\?"):
        model.mask("output layers")
    with pytest.raises(ConfigError, match=r"matches '2'; choose one of: 1, 1\.bias, 1\.weight, 3, 3\.bias"):
        FlatModel(small_mlp).mask("2")  # an activation, which selects nothing


def test_training_a_bound_network_moves_the_vector_and_leaves_the_network_as_it_was():
    model = FlatModel(NormalisedConv, dtype=torch.float64)
    theta = torch.rand(model.size, dtype=torch.float64)
    x = torch.randn(4, 2, 4, 4, dtype=torch.float64)
    net = as_module(NormalisedConv, theta).train()
    out = theta.clone()
    template = [t.clone() for t in model.module.state_dict().values()]

    with model.bound() as bound, model.mode(train=True), bound:
        bound.bind(out)
        loss = model(bound.parameters, x).square().sum()
        grads = torch.autograd.grad(loss, bound.tensors)
        with torch.no_grad():
            bound.parameters.sub_(torch.cat([g.reshape(-1) for g in grads]), alpha=0.1)

    assert all(torch.equal(a, b) for a, b in zip(template, model.module.state_dict().values(), strict=True))
    net(x).square().sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(p.grad, alpha=0.1)

    torch.testing.assert_close(out, as_vector(net), rtol=1e-12, atol=1e-12)
    assert not torch.equal(model.buffers(out), model.buffers(theta))


class Frozen(nn.BatchNorm2d):
    """Batch norm that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, Frozen])
def test_a_mode_holds_for_every_layer_that_does_not_override_train(norm):
    model = FlatModel(lambda: nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(norm(2)), nn.Dropout()))

    def modes() -> list[bool]:
        return [child.training for child in model.module.modules()]

    usual = [not isinstance(child, Frozen) for child in model.module.modules()]
    assert modes() == usual
    with model.mode(train=False):
        assert not any(modes())
        with model.mode(train=True):
            assert modes() == usual
        assert not any(modes())

    assert modes() == usual
