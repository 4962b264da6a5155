"""Residual networks of basic blocks (He et al. 2016), with torchvision's names, so that its weights fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from raypfl.models.adapters import ResidualAdapter
from raypfl.models.networks import MODELS, image_shape

WIDTHS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Layers:
    """How the layers inside a block are made.

    Attributes
    ----------
    norm : makes the normalisation of so many channels.
    adapter : makes what stands behind each 3x3 convolution of so many channels.
    """

    norm: Callable[[int], nn.Module]
    adapter: Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added: ``[b, inputs, H, W] -> [b, width, H/stride, W/stride]``."""

    def __init__(self, inputs: int, width: int, stride: int, layers: Layers):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.adapter1 = layers.adapter(width)
        self.bn1 = layers.norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.adapter2 = layers.adapter(width)
        self.bn2 = layers.norm(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), layers.norm(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.adapter1(self.conv1(x))).relu()
        out = self.bn2(self.adapter2(self.conv2(out)))
        return (out + self.downsample(x)).relu()


class ResNet(nn.Module):
    """A stem, four layers of basic blocks, the mean over all places, and the head ``fc``.

    Parameters
    ----------
    blocks : in each of the four layers.
    cifar_stem : a 3x3 convolution of stride 1; otherwise ImageNet's 7x7 of stride 2, and max-pooling.
    """

    def __init__(
        self, channels: int, num_classes: int, blocks: Sequence[int], layers: Layers, cifar_stem: bool, head_bias: bool
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        if cifar_stem:
            self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = layers.norm(64)
        inputs = (64, *WIDTHS)
        self.layer1, self.layer2, self.layer3, self.layer4 = (
            nn.Sequential(
                BasicBlock(inputs[i], width, 1 if i == 0 else 2, layers),
                *(BasicBlock(width, width, 1, layers) for _ in range(blocks[i] - 1)),
            )
            for i, width in enumerate(WIDTHS)
        )
        self.fc = nn.Linear(512, num_classes, bias=head_bias)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and "adapter" not in name:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _resnet(
    blocks: Sequence[int],
    input_shape: tuple[int, ...],
    num_classes: int,
    norm: str,
    stem: str,
    adapters: str,
    head_bias: bool,
) -> nn.Module:
    def normalise(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(2, channels)

    def adapt(channels: int) -> nn.Module:
        if adapters == "none":
            return nn.Identity()
        return ResidualAdapter(channels, normalise(channels), bias=adapters == "bias")

    channels, *_ = image_shape("resnet", input_shape)
    return ResNet(channels, num_classes, blocks, Layers(normalise, adapt), stem == "cifar", head_bias)


@MODELS.register("resnet18")
def resnet18(
    input_shape: tuple[int, ...],
    num_classes: int,
    norm: Literal["batch", "group"] = "batch",
    stem: Literal["imagenet", "cifar"] = "imagenet",
    adapters: Literal["none", "bias", "no bias"] = "none",
    head_bias: bool = True,
) -> nn.Module:
    """ResNet-18: 11,176,512 parameters for 3 channels in the body, and 5,130 in the head for 10 classes.

    Parameters
    ----------
    norm : batch norm, or group norm with two groups.
    stem : ImageNet's, or CIFAR's: a 3x3 convolution of stride 1 without pooling.
    adapters : residual adapters behind all 16 convolutions of its blocks, with a bias (1,404,160 parameters) or without
        (1,400,320).
    head_bias : whether the head has one.
    """
    return _resnet((2, 2, 2, 2), input_shape, num_classes, norm, stem, adapters, head_bias)


@MODELS.register("resnet34")
def resnet34(
    input_shape: tuple[int, ...],
    num_classes: int,
    norm: Literal["batch", "group"] = "batch",
    stem: Literal["imagenet", "cifar"] = "imagenet",
    adapters: Literal["none", "bias", "no bias"] = "none",
    head_bias: bool = True,
) -> nn.Module:
    """ResNet-34: 21,284,672 parameters for 3 channels in the body; options as for resnet18."""
    return _resnet((3, 4, 6, 3), input_shape, num_classes, norm, stem, adapters, head_bias)
