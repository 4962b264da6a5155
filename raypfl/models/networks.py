"""The registry of networks, and the simplest one: dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from raypfl.common.errors import ConfigError
from raypfl.common.registry import Registry

MODELS = Registry("model")
"""Each entry is called as ``entry(input_shape=(C, H, W), num_classes=n, **options)`` and returns an ``nn.Module`` with
n outputs. `input_shape` is the shape of one sample, which may also be ``(features,)``."""


def image_shape(name: str, input_shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of the samples, for networks that take only images.

    Raises
    ------
    ConfigError : if samples are not images, or have fewer than `least` pixels a side.
    """
    if len(input_shape) != 3:
        raise ConfigError(f"The {name} model takes images, but samples here are {list(input_shape)}; use mlp.")
    channels, height, width = input_shape
    if min(height, width) < least:
        raise ConfigError(
            f"The {name} model needs images of at least {least}x{least} pixels, these are {height}x{width}; use mlp."
        )
    return channels, height, width


@MODELS.register("mlp")
def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    hidden: Sequence[int] = (128,),
    latent: int | None = None,
    head_bias: bool = True,
) -> nn.Module:
    """Multi-layer perceptron with ReLU; 9,610 parameters for 8x8 inputs, 10 classes and 128 hidden units.

    Parameters
    ----------
    latent : units of an additional layer before the head. It has no ReLU, so that features can be negative.
    head_bias : whether the head has a bias.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    size = prod(input_shape)
    for units in hidden:
        layers += [nn.Linear(size, units), nn.ReLU()]
        size = units
    if latent is not None:
        layers.append(nn.Linear(size, latent))
        size = latent
    return nn.Sequential(*layers, nn.Linear(size, num_classes, bias=head_bias))
