"""Networks of dense layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import nn

from raypfl.models.networks import MODELS


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
    latent : units of a last layer before the head, without ReLU, so that features point in all directions.
    head_bias : whether the head has one.
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
