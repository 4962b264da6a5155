"""The networks of the jobs, written as in a single script.

The other contenders train these. raypfl trains its own networks of the same names, which compute the same from the same
first weights, and `own` as it is.
"""

from __future__ import annotations

import math

from torch import nn


def network(name: str, input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """The job's network, with weights drawn from torch's global stream."""
    return _NETWORKS[name](input_shape, num_classes)


def _cnn(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def _lenet(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (((height - 4) // 2 - 4) // 2) * (((width - 4) // 2 - 4) // 2), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, num_classes),
    )


def _mlp(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 128), nn.ReLU(), nn.Linear(128, num_classes))


def own(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """A network of a user's own, which raypfl trains as it is: dropout, and ReLU before pooling (Reddi et al. 2021)."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )


def normed(input_shape: tuple[int, int, int], num_classes: int) -> nn.Sequential:
    """A convolution with batch norm, a max-pool, a dense layer and the head, for FedBN in `benchmarks.parity`."""
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


_NETWORKS = {"cnn": _cnn, "lenet": _lenet, "mlp": _mlp, "benchmarks.networks:own": own}
