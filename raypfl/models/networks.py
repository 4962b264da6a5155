"""The registry of networks, and the simplest ones: dense layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.common.registry import Registry

MODELS = Registry("model")
"""Each entry is called as ``entry(input_shape=(C, H, W), num_classes=n, **options)`` and returns an ``nn.Module`` with
n outputs. `input_shape` is the shape of one sample, which may also be ``(features,)``. A network for texts also has the
parameter `num_tokens`, the number of different words."""


def facts_for(
    name: str, entry: Callable[..., Any], input_shape: tuple[int, ...], num_classes: int, num_tokens: int | None
) -> dict[str, Any]:
    """Return the arguments of an entry of `MODELS` that describe the data.

    `num_tokens` : number of different words in the samples; None: they are no texts.

    Raises
    ------
    ConfigError : if it is a network for texts, and the samples are none.
    """
    facts: dict[str, Any] = {"input_shape": input_shape, "num_classes": num_classes}
    parameter = inspect.signature(entry).parameters.get("num_tokens")
    if parameter is None:
        return facts
    if num_tokens is None and parameter.default is inspect.Parameter.empty:
        raise ConfigError(f"The {name} model takes texts, such as those of data=text_table, but samples here are not.")
    return {**facts, "num_tokens": num_tokens}


def image_shape(name: str, input_shape: tuple[int, ...], min_side: int = 1) -> tuple[int, int, int]:
    """Return the samples' (channels, height, width), for networks that take only images.

    Raises
    ------
    ConfigError : if samples are not images, or have fewer than `min_side` pixels a side.
    """
    if len(input_shape) != 3:
        raise ConfigError(f"The {name} model takes images, but samples here are {list(input_shape)}; use mlp.")
    channels, height, width = input_shape
    if width in (1, 3) and channels > width:
        raise ConfigError(
            f"The {name} model takes images [C, H, W], but these are [{channels}, {height}, {width}]: their channels "
            "seem to come last. Transpose them, as with images.transpose(0, 3, 1, 2)."
        )

    if min(height, width) < min_side:
        raise ConfigError(
            f"The {name} model needs images of at least {min_side}x{min_side} pixels, these are {height}x{width}; use "
            "mlp."
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
    hidden : numbers of units in the hidden layers.
    latent : number of units in an additional layer before the head. It has no ReLU, so that features can be negative.
    head_bias : whether the head has a bias.
    """
    if min(hidden, default=1) < 1:
        raise ConfigError(f"model.hidden is {list(hidden)}; each layer needs at least one unit.")
    if latent is not None and latent < 1:
        raise ConfigError(f"model.latent is {latent}; the layer needs at least one unit.")

    layers: list[nn.Module] = [nn.Flatten()]
    size = prod(input_shape)
    for units in hidden:
        layers += [nn.Linear(size, units), nn.ReLU()]
        size = units
    if latent is not None:
        layers.append(nn.Linear(size, latent))
        size = latent
    return nn.Sequential(*layers, nn.Linear(size, num_classes, bias=head_bias))


@MODELS.register("two_layer")
class TwoLayerReLU(nn.Module):
    """The two layers of theories of wide networks: ``a . relu(W x) / sqrt(m)`` for inputs scaled to length 1.

    Only W is trained, which starts as normal noise; a is drawn once from -1 and 1. There is one output.

    Parameters
    ----------
    width : m, the number of hidden units.
    sigma : standard deviation of W's initial entries.
    paired : whether every unit has a twin with the opposite sign, so that the initial output is 0.
    """

    signs: Tensor

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        width: int = 1024,
        sigma: float = 1.0,
        paired: bool = False,
    ):
        super().__init__()
        if num_classes != 1 or width < 1 or (paired and width % 2) or not sigma > 0:
            raise ConfigError(
                "The two_layer model needs 1 output, a width above 0 that is even if paired, and a sigma above 0, not "
                f"{num_classes} outputs, width {width} and sigma {sigma}."
            )

        self.sigma = sigma
        units = width // 2 if paired else width
        weight = sigma * torch.randn(units, prod(input_shape))
        signs = torch.randint(0, 2, (units,)) * 2.0 - 1
        if paired:
            weight = torch.cat([weight, weight])
            signs = torch.cat([signs, -signs])

        self.weight = nn.Parameter(weight)
        self.signs = nn.Parameter(signs, requires_grad=False)

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        """Return the inputs ``[b, d]`` that the first layer sees: each of length 1."""
        return F.normalize(x.flatten(1), dim=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.scaled(x) @ self.weight.T)
        return (hidden @ self.signs / sqrt(len(self.signs)))[:, None]
