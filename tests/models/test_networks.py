"""Networks have the published layers and the parameter counts of their papers and specifications."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.models import MODELS, FlatModel

CIFAR = (3, 32, 32)


def network(name: str, classes: int = 10, shape: tuple[int, int, int] = CIFAR, **options) -> FlatModel:
    return FlatModel(partial(MODELS.get(name), input_shape=shape, num_classes=classes, **options))


def count(model: FlatModel, pattern: str) -> int:
    """Parameters that a pattern selects; statistics are none."""
    return int(model.parameters(model.mask(pattern)).sum())


@pytest.mark.parametrize(
    ("name", "options", "parameters", "statistics"),
    [
        ("mlp", {"shape": (1, 8, 8)}, 9_610, 0),
        ("lenet", {}, 121_182, 0),
        ("lenet", {"classes": 100}, 128_832, 0),
        ("lenet", {"shape": (1, 28, 28), "classes": 62}, 90_242, 0),
        ("lenet", {"shape": (1, 32, 32), "classes": 62}, 124_802, 0),
        ("cnn", {}, 1_626_442, 0),
        ("fedavg_cnn", {"shape": (1, 28, 28)}, 582_026, 0),
        ("fedavg_cnn", {"classes": 100}, 924_708, 0),
        ("conv2cifar", {}, 796_032 + 1_920, 0),
        ("conv2cifar", {"classes": 100}, 796_032 + 19_200, 0),
        ("resnet18", {}, 11_181_642, 9_600),
        ("resnet18", {"classes": 65}, 11_209_857, 9_600),
        ("resnet18", {"classes": 5}, 11_179_077, 9_600),
        ("resnet34", {"classes": 65}, 21_318_017, 17_024),
        ("resnet18", {"stem": "cifar"}, 11_173_962, 9_600),
        ("resnet18", {"classes": 200, "norm": "group", "head_bias": False}, 11_176_512 + 512 * 200, 0),
        ("resnet56", {}, 591_322, 8_992),
        ("resnet56", {"norm": "group", "shape": (1, 28, 28)}, 591_322 - 288, 0),
    ],
)
def test_networks_have_the_published_number_of_parameters(name, options, parameters, statistics):
    model = network(name, **options)
    assert (model.num_parameters, model.num_buffers) == (parameters, statistics)
    assert sum(p.numel() for p in model.module.parameters()) == parameters


def test_the_layers_of_conv2cifar_are_the_papers():
    model = network("conv2cifar")
    layers = {"conv1": 4_864, "conv2": 102_464, "linear1": 614_784, "linear2": 73_920, "head": 1_920}
    assert {layer: count(model, layer) for layer in layers} == layers
    assert count(model, "feature extractor") == 796_032 and model.names("output layer") == ["head.weight"]


def test_conv2cifar_computes_the_papers_order_of_layers():
    net = MODELS.get("conv2cifar")(input_shape=CIFAR, num_classes=10)

    def papers(x: Tensor) -> Tensor:
        for convolution in (net.conv1, net.conv2):
            x = F.max_pool2d(convolution(x).relu(), 2)
        return net.head(net.linear2(net.linear1(x.flatten(1)).relu()).relu())

    x = torch.randn(3, *CIFAR)
    parameters = list(net.parameters())
    ours, reference = ([y, *torch.autograd.grad(y.square().sum(), parameters)] for y in (net(x), papers(x)))
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("name", ["lenet", "cnn", "conv2cifar"])
def test_gradients_keep_the_memory_layout_of_the_images(name):
    net = MODELS.get(name)(input_shape=CIFAR, num_classes=10)
    formats = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        outputs.register_hook(lambda g: formats.append(g.is_contiguous(memory_format=torch.channels_last)))

    pools = [module for module in net.modules() if isinstance(module, nn.MaxPool2d)]
    for pool in pools:
        pool.register_forward_hook(note)
    for layout in (torch.channels_last, torch.contiguous_format):
        net(torch.randn(2, *CIFAR).contiguous(memory_format=layout)).sum().backward()
    pools_seen = len(formats) // 2

    assert pools_seen == (1 if name == "cnn" else 2)
    assert formats == [True] * pools_seen + [False] * pools_seen


@pytest.mark.parametrize(
    ("name", "classes", "convolutions", "biases", "norms", "sets"),
    [
        ("resnet18", 10, 1_392_640, 3_840, 7_680, (1_409_290, 1_405_450, 1_413_258)),
        ("resnet18", 65, 1_392_640, 3_840, 7_680, (1_437_505, 1_433_665, 1_441_473)),
        ("resnet18", 5, 1_392_640, 3_840, 7_680, (1_406_725, 1_402_885, 1_410_693)),
        ("resnet34", 65, 2_514_944, 7_552, 15_104, (2_570_945, 2_563_393, 2_578_625)),
    ],
)
def test_adapter_sets_count_what_perada_counts(name, classes, convolutions, biases, norms, sets):
    with_bias, without = (network(name, classes, adapters=adapters) for adapters in ("bias", "no bias"))
    assert count(with_bias, "*adapter?.conv.weight") == convolutions
    assert count(with_bias, "*adapter?.conv.bias") == biases
    assert count(with_bias, "*adapter?.norm.*") == norms
    assert len(with_bias.names("*adapter?.conv.weight")) == (16 if name == "resnet18" else 32)

    tuned = "adapters, output layer, bn1.*, *.bn1.*, *.bn2.*"
    assert sets == (
        count(with_bias, "adapters, output layer"),
        count(without, "adapters, output layer"),
        count(without, tuned),
    )


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnets_with_torchvisions_weights_compute_the_same(name):
    import torchvision

    reference = getattr(torchvision.models, name)(num_classes=7).eval()
    ours = MODELS.get(name)(input_shape=CIFAR, num_classes=7).eval()
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(2, *CIFAR)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)


def test_resnets_begin_with_convolutions_as_wide_as_torchvisions():
    ours = MODELS.get("resnet18")(input_shape=CIFAR, num_classes=10)
    for name, weight in ours.named_parameters():
        if weight.dim() == 4 and weight.numel() > 30_000:
            fan_out = weight.shape[0] * weight.shape[2] * weight.shape[3]
            assert weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05), name


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fresh_adapters_change_next_to_nothing(norm):
    plain, adapted = (network("resnet18", norm=norm, adapters=adapters) for adapters in ("none", "bias"))
    theta = adapted.init(0)
    shared = ~adapted.mask("adapters")
    x = torch.randn(2, *CIFAR, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), plain.mode(train=False), adapted.mode(train=False):
        torch.testing.assert_close(adapted(theta, x), plain(theta[shared], x), rtol=1e-2, atol=1e-2)
        half = theta + 0.1 * adapted.mask("adapters")
        assert not torch.allclose(adapted(half, x), adapted(theta, x), rtol=1e-2, atol=1e-2)


def test_group_norm_has_two_groups_and_replaces_every_batch_norm():
    norms = {
        norm: [m for m in network("resnet18", norm=norm).module.modules() if isinstance(m, kind)]
        for norm, kind in (("batch", nn.BatchNorm2d), ("group", nn.GroupNorm))
    }
    assert [m.num_features for m in norms["batch"]] == [m.num_channels for m in norms["group"]]
    assert {m.num_groups for m in norms["group"]} == {2}


def test_the_cifar_stem_keeps_small_images_four_times_as_wide():
    shapes = {}
    for stem in ("imagenet", "cifar"):
        net = MODELS.get("resnet18")(input_shape=CIFAR, num_classes=10, stem=stem).eval()
        net.layer1.register_forward_hook(lambda m, x, out, stem=stem: shapes.update({stem: tuple(out.shape)}))
        net(torch.zeros(1, *CIFAR))
    assert shapes == {"imagenet": (1, 64, 8, 8), "cifar": (1, 64, 32, 32)}


@pytest.mark.parametrize("name", ["mlp", "lenet", "cnn", "conv2cifar", "resnet18"])
def test_networks_take_grey_and_small_images_or_say_which_they_need(name):
    net = MODELS.get(name)(input_shape=(1, 28, 28), num_classes=4)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 4)
    if name in ("lenet", "cnn", "conv2cifar"):
        with pytest.raises(ConfigError, match="use mlp"):
            MODELS.get(name)(input_shape=(1, 4, 4), num_classes=4)


@pytest.mark.parametrize(("option", "value"), [("hidden", [0]), ("latent", 0)])
def test_a_layer_without_units_is_refused(option, value):
    with pytest.raises(ConfigError, match=f"model.{option} is .*0.* at least one unit"):
        network("mlp", **{option: value})
