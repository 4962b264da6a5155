"""Networks of token sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models.networks import MODELS


class _Causal(nn.Module):
    """A residual convolution over time that sees only the past."""

    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__()
        self.past = nn.ConstantPad1d(((kernel - 1) * dilation, 0), 0.0)
        self.conv = nn.Conv1d(width, width, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(self.past(x)))


@MODELS.register("causal_cnn")
class CausalCNN(nn.Module):
    """Dilated causal convolutions (as in Bai et al. 2018): tokens ``int64[b, T]`` to logits ``[b, T, tokens]``.

    Parameters
    ----------
    width : size of the embeddings and of all layers.
    layers : number of convolutions; the i-th has dilation ``2 ** i``.
    kernel : kernel size.
    """

    def __init__(
        self, input_shape: tuple[int, ...], num_classes: int, width: int = 64, layers: int = 4, kernel: int = 3
    ):
        super().__init__()
        if len(input_shape) != 1:
            raise ConfigError(f"The causal_cnn model takes sequences of tokens, but samples are {list(input_shape)}.")
        self.embedding = nn.Embedding(num_classes, width)
        self.layers = nn.Sequential(*(_Causal(width, kernel, 2**i) for i in range(layers)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x).transpose(1, 2)).transpose(1, 2))
