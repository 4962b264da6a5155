"""Residual networks (He et al. 2016), with torchvision's tensor names, so that its weights can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

from torch import Tensor, nn

from raypfl.models.networks import MODELS, image_shape

Layer = Callable[[int], nn.Module]
"""Makes a layer for a number of channels."""


class ResidualAdapter(nn.Module):
    """``y = x + conv1x1(dropout(norm(x)))`` on feature maps ``[b, C, H, W]`` (Rebuffi et al. 2017; Xie et al. 2024).

    It starts close to the identity: the weights of the convolution are drawn from N(0, 1e-4^2), and its bias is zero.
    It has C^2 + 2 C parameters, and C more with a bias.
    """

    def __init__(self, channels: int, norm: nn.Module, bias: bool = True, dropout: float = 0.0):
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv = nn.Conv2d(channels, channels, 1, bias=bias)
        nn.init.normal_(self.conv.weight, std=1e-4)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.dropout(self.norm(x)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: ``[b, inputs, H, W] -> [b, width, H/stride, W/stride]``.

    Parameters
    ----------
    norm, adapter : make the normalisation, and the adapter after each 3x3 convolution, for a number of channels.
    """

    def __init__(self, inputs: int, width: int, stride: int, norm: Layer, adapter: Layer):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.adapter1 = adapter(width)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.adapter2 = adapter(width)
        self.bn2 = norm(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.adapter1(self.conv1(x))).relu()
        out = self.bn2(self.adapter2(self.conv2(out)))
        return (out + self.downsample(x)).relu()


@MODELS.register("resnet18")
class ResNet18(nn.Module):
    """ResNet-18: 11,176,512 parameters for 3 channels in the body, and 5,130 in the head for 10 classes.

    A stem, four layers of basic blocks, the mean over all positions, and the head ``fc``.

    Parameters
    ----------
    norm : batch norm, or group norm with two groups.
    stem : ImageNet's 7x7 convolution of stride 2 with max-pooling, or CIFAR's 3x3 convolution of stride 1.
    adapters : residual adapters after all 16 convolutions of the blocks, with a bias (1,404,160 parameters) or without
        one (1,400,320).
    adapter_dropout : the share of an adapter's normalised inputs that is dropped in training.
    width : channels of the stem and of the first layer; every further layer has twice as many.
    head_bias : whether the head has a bias.
    """

    blocks: ClassVar[tuple[int, ...]] = (2, 2, 2, 2)
    """Blocks in each of the four layers."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        norm: Literal["batch", "group"] = "batch",
        stem: Literal["imagenet", "cifar"] = "imagenet",
        adapters: Literal["none", "bias", "no bias"] = "none",
        adapter_dropout: float = 0.0,
        width: int = 64,
        head_bias: bool = True,
    ):
        super().__init__()
        normalise = normalisation(norm)

        def adapter(channels: int) -> nn.Module:
            if adapters == "none":
                return nn.Identity()
            return ResidualAdapter(channels, normalise(channels), adapters == "bias", adapter_dropout)

        def layer(index: int, inputs: int, outputs: int) -> nn.Sequential:
            blocks = [BasicBlock(inputs, outputs, 1 if index == 0 else 2, normalise, adapter)]
            for _ in range(self.blocks[index] - 1):
                blocks.append(BasicBlock(outputs, outputs, 1, normalise, adapter))
            return nn.Sequential(*blocks)

        channels, *_ = image_shape("resnet", input_shape)
        self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        if stem == "cifar":
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = normalise(width)

        self.layer1 = layer(0, width, width)
        self.layer2 = layer(1, width, 2 * width)
        self.layer3 = layer(2, 2 * width, 4 * width)
        self.layer4 = layer(3, 4 * width, 8 * width)
        self.fc = nn.Linear(8 * width, num_classes, bias=head_bias)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1(self.conv1(x)).relu())
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


@MODELS.register("resnet10")
class ResNet10(ResNet18):
    """ResNet-10, with one block a layer: 4,900,224 parameters for 3 channels in the body; options as for resnet18."""

    blocks: ClassVar[tuple[int, ...]] = (1, 1, 1, 1)


@MODELS.register("resnet34")
class ResNet34(ResNet18):
    """ResNet-34: 21,284,672 parameters for 3 channels in the body; options as for resnet18."""

    blocks: ClassVar[tuple[int, ...]] = (3, 4, 6, 3)


class Bottleneck(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, and a shortcut: ``[b, inputs, H, W] -> [b, 4 width, H/stride, W/stride]``."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Layer):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = norm(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), norm(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1(self.conv1(x)).relu()
        out = self.bn2(self.conv2(out)).relu()
        return (self.bn3(self.conv3(out)) + self.downsample(x)).relu()


@MODELS.register("resnet56")
class ResNet56(nn.Module):
    """ResNet-56 for CIFAR as in FedML, of bottleneck blocks: 591,322 parameters for 3 channels and 10 classes.

    A 3x3 convolution, three layers of six blocks, the mean over all positions, and the head ``fc``.

    Parameters
    ----------
    norm : batch norm, or group norm with two groups.
    width : channels of the first convolution and of the first layer's 3x3 convolutions; each further layer has twice
        as many.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        norm: Literal["batch", "group"] = "batch",
        width: int = 16,
    ):
        super().__init__()
        normalise = normalisation(norm)

        def layer(inputs: int, layer_width: int, stride: int) -> nn.Sequential:
            blocks = [Bottleneck(inputs, layer_width, stride, normalise)]
            for _ in range(5):
                blocks.append(Bottleneck(4 * layer_width, layer_width, 1, normalise))
            return nn.Sequential(*blocks)

        channels, *_ = image_shape("resnet56", input_shape)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = normalise(width)
        self.layer1 = layer(width, width, stride=1)
        self.layer2 = layer(4 * width, 2 * width, stride=2)
        self.layer3 = layer(8 * width, 4 * width, stride=2)
        self.fc = nn.Linear(16 * width, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu())))
        return self.fc(x.mean((2, 3)))


def normalisation(norm: str) -> Layer:
    """Return a function that makes layers of this normalisation: ``batch``, or ``group`` with two groups."""
    if norm == "batch":
        return nn.BatchNorm2d
    return lambda channels: nn.GroupNorm(2, channels)


def initialise(network: nn.Module) -> None:
    """Draw the weights of all convolutions but those of adapters (He et al. 2015)."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d) and "adapter" not in name:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
