"""Convolutional networks without skip connections.

Papers put the max-pool after the ReLU. Here it comes before, except in :class:`FedAvgCNN`: outputs and gradients are
the same, bit for bit, and the ReLU has a quarter of the work. With ``training.channels_last`` the gradient of the dense
layers arrives channels first; the ReLU converts it while it is four times smaller.
"""

from __future__ import annotations

from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models.networks import MODELS, image_shape


@MODELS.register("lenet")
class LeNet(nn.Module):
    """LeNet: 16 and 32 filters of 5x5, and dense layers of 120 and 84 units (PeFLL, Table 2).

    121,182 parameters for 3x32x32 inputs and 10 classes. Inputs need at least 16 pixels a side.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = image_shape("lenet", input_shape, min_side=16)
        rows = _side_after_convolutions(height)
        columns = _side_after_convolutions(width)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU()
        )
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(32 * rows * columns, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        )
        self.head = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.features(x)))


@MODELS.register("fedavg_cnn")
class FedAvgCNN(nn.Module):
    """Two 5x5 convolutions (32, 64) with max-pools, and a dense layer of 512 units: PFLlib's 4-layer CNN.

    Federated averaging's network for MNIST (McMahan et al. 2017) without padding. 582,026 parameters for 1x28x28 inputs
    and 10 classes, 924,708 for 3x32x32 and 100. Inputs need at least 16 pixels a side.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = image_shape("fedavg_cnn", input_shape, min_side=16)
        pixels = _side_after_convolutions(height) * _side_after_convolutions(width)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64 * pixels, 512), nn.ReLU())
        self.head = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.features(x)))


@MODELS.register("cnn")
class CNN(nn.Module):
    """Two 3x3 convolutions (32, 64), a max-pool and a dense layer of 128 units: pfl-research's CIFAR-10 network.

    1,626,442 parameters for 3x32x32 inputs and 10 classes.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int):
        super().__init__()
        channels, height, width = image_shape("cnn", input_shape, min_side=6)
        pixels = ((height - 4) // 2) * ((width - 4) // 2)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU()
        )
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64 * pixels, 128), nn.ReLU())
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.features(x)))


@MODELS.register("conv2cifar")
class Conv2Cifar(nn.Module):
    """Two 5x5 convolutions of 64 filters, dense layers of 384 and 192 units, a head without bias (Dai et al. 2023).

    796,032 parameters in the body and 1,920 in the head for 3x32x32 inputs and 10 classes. Inputs need at least 16
    pixels a side.

    Parameters
    ----------
    head_bias : whether the head has a bias.
    relu_latent : whether the features that go into the head pass a ReLU, as in the paper.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        head_bias: bool = False,
        relu_latent: bool = True,
    ):
        super().__init__()
        channels, height, width = image_shape("conv2cifar", input_shape, min_side=16)
        rows = _side_after_convolutions(height)
        columns = _side_after_convolutions(width)
        self.conv1 = nn.Conv2d(channels, 64, 5)
        self.conv2 = nn.Conv2d(64, 64, 5)
        self.linear1 = nn.Linear(64 * rows * columns, 384)
        self.linear2 = nn.Linear(384, 192)
        self.head = nn.Linear(192, num_classes, bias=head_bias)
        self.pool = nn.MaxPool2d(2)
        self.last = nn.ReLU() if relu_latent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv1(x)).relu()
        x = self.pool(self.conv2(x)).relu().flatten(1)
        return self.head(self.last(self.linear2(self.linear1(x).relu())))


@MODELS.register("convnet")
class ConvNet(nn.Module):
    """Blocks of 3x3 convolution, instance norm, ReLU and average pooling, and a dense layer (Cazenavette et al. 2022).

    It is that of Gidaris and Komodakis 2018, and has no running statistics. 320,010 parameters for 3x32x32 inputs and
    10 classes, 317,706 for 1x28x28.

    Parameters
    ----------
    depth : number of blocks, each of which halves the image. Inputs of one channel are first padded by two pixels.
    width : filters of each block.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, depth: int = 3, width: int = 128):
        super().__init__()
        channels, image_height, image_width = image_shape("convnet", input_shape)
        first_padding = 3 if channels == 1 else 1
        # Each block halves the sides. A padding of 1 keeps the size in the convolution; the first one may enlarge it.
        rows = (image_height + 2 * (first_padding - 1)) >> depth
        columns = (image_width + 2 * (first_padding - 1)) >> depth
        if min(rows, columns) < 1:
            raise ConfigError(
                f"{depth} blocks of the convnet model leave nothing of images of {image_height}x{image_width} pixels; "
                "lower model.depth."
            )

        layers: list[nn.Module] = []
        for block in range(depth):
            if block == 0:
                layers.append(nn.Conv2d(channels, width, 3, padding=first_padding))
            else:
                layers.append(nn.Conv2d(width, width, 3, padding=1))
            # One group for each channel is instance norm.
            layers += [nn.GroupNorm(width, width), nn.ReLU(), nn.AvgPool2d(2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Linear(width * rows * columns, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def _side_after_convolutions(side: int) -> int:
    """Return an image's side after two 5x5 convolutions without padding, each followed by 2x2 pooling."""
    return ((side - 4) // 2 - 4) // 2
