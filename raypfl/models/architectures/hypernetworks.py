"""Hypernetworks, which generate other networks' parameters, and networks that describe a client's samples to them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.models.architectures.convolutional import LeNet

Size = Literal["S", "M", "L"]
Embedding = Literal["linear", "mlp1", "cnn"]

HIDDEN_LAYERS: dict[Size, int] = {"S": 1, "M": 3, "L": 5}
"""The number of square hidden layers of a hypernetwork; one more leads from its input to their width."""

WIDTH = 100
"""The number of units in a hidden layer."""


def hypernetwork(inputs: int, outputs: int, size: Size) -> nn.Module:
    """Build a network from vectors ``[b, inputs]`` to the parameters of networks ``[b, outputs]``.

    Size M is that of PeFLL, Table 4.
    """
    layers: list[nn.Module] = [nn.Linear(inputs, WIDTH), nn.ReLU()]
    for _ in range(HIDDEN_LAYERS[size]):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


class EmbeddingNetwork(nn.Module):
    """Maps a pair of samples ``x[b, ...]`` and classes ``y[b]`` to embeddings ``[b, length]`` (PeFLL, section 4).

    `kind` : ``linear`` and ``mlp1`` (one hidden layer) see the class alone; ``cnn`` is LeNet on images with a further
    channel for each class, which is 1 for the sample's own.

    Raises
    ------
    ConfigError : if `kind` is ``cnn`` and samples are not images of 16 x 16 pixels or more.
    """

    def __init__(self, kind: Embedding, input_shape: tuple[int, ...], num_classes: int, length: int):
        super().__init__()
        self.num_classes = num_classes
        self.sees_images = kind == "cnn"

        if kind == "linear":
            self.layers: nn.Module = nn.Linear(num_classes, length)
        elif kind == "mlp1":
            self.layers = nn.Sequential(nn.Linear(num_classes, WIDTH), nn.ReLU(), nn.Linear(WIDTH, length))
        else:
            if len(input_shape) != 3 or min(input_shape[1:]) < 16:
                raise ConfigError(
                    "The embedding network cnn needs images of at least 16x16 pixels, but samples here are "
                    f"{list(input_shape)}; choose method.embedding=linear or mlp1."
                )

            channels, height, width = input_shape
            self.layers = LeNet((channels + num_classes, height, width), length)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        # Tokens are integers, so they cannot give the one-hot classes their dtype.
        dtype = x.dtype if x.is_floating_point() else next(self.parameters()).dtype
        one_hot = F.one_hot(y, self.num_classes).to(dtype)
        if not self.sees_images:
            return self.layers(one_hot)

        planes = one_hot[:, :, None, None].expand(-1, -1, *x.shape[2:])
        return self.layers(torch.cat([x, planes], dim=1))
