"""The networks that published comparisons use, by the names under which an experiment asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from raypfl.errors import ConfigError
from raypfl.registry import Registry

MODELS = Registry("model")
"""Each entry is called as ``entry(input_shape=(C, H, W), num_classes=n, **options)`` and returns an ``nn.Module``."""


@MODELS.register("mlp")
def mlp(input_shape: tuple[int, int, int], num_classes: int, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Multi-layer perceptron with ReLU; 9,610 parameters for 8x8 inputs, 10 classes and 128 hidden units."""
    channels, height, width = input_shape
    layers: list[nn.Module] = [nn.Flatten()]
    size = channels * height * width
    for units in hidden:
        layers += [nn.Linear(size, units), nn.ReLU()]
        size = units
    return nn.Sequential(*layers, nn.Linear(size, num_classes))


@MODELS.register("lenet")
class LeNet(nn.Module):
    """LeNet with 16 and 32 5x5 filters and dense layers of 120 and 84 (PeFLL, Table 2).

    121,182 parameters for 3x32x32 inputs and 10 classes. Inputs need at least 16 pixels a side.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 16:
            raise ConfigError(
                f"The lenet model needs images of at least 16x16 pixels, these are {height}x{width}; use mlp."
            )
        side = [((s - 4) // 2 - 4) // 2 for s in (height, width)]
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * side[0] * side[1], 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        )
        self.head = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.features(x)))


@MODELS.register("cnn")
class CNN(nn.Module):
    """Two 3x3 convolutions (32, 64), one max-pool, a dense layer of 128 (pfl-research's CIFAR-10 network).

    1,626,442 parameters for 3x32x32 inputs and 10 classes.
    """

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        channels, height, width = input_shape
        if min(height, width) < 6:
            raise ConfigError(
                f"The cnn model needs images of at least 6x6 pixels, these are {height}x{width}; use mlp."
            )
        pixels = ((height - 4) // 2) * ((width - 4) // 2)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64 * pixels, 128), nn.ReLU())
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.features(x)))


@MODELS.register("resnet18")
def resnet18(input_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Torchvision's ResNet-18 with batch norm, from random weights (11,181,642 parameters for 10 classes)."""
    from torchvision.models import resnet18 as torchvision_resnet18

    if input_shape[0] != 3:
        raise ConfigError(f"The resnet18 model needs images of 3 channels, these have {input_shape[0]}.")
    return torchvision_resnet18(weights=None, num_classes=num_classes)
