"""A network with batch norm, for FedBN. Its last layer is the head, as in raypfl's ``mlp``."""

from __future__ import annotations

from torch import nn


def normed(input_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """A 3x3 convolution of 8 filters with batch norm, a max-pool, a dense layer of 64."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * (height // 2) * (width // 2), 64),
        nn.ReLU(),
        nn.Linear(64, num_classes),
    )
