"""Networks of token sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models.architectures.option_checks import require_counts, require_multiple
from raypfl.models.architectures.transformer import TransformerBlock
from raypfl.models.networks import MODELS


class _CausalConvolution(nn.Module):
    """A residual convolution over time that sees only the past."""

    def __init__(self, width: int, kernel: int, dilation: int):
        super().__init__()
        self.pad = nn.ConstantPad1d(((kernel - 1) * dilation, 0), 0.0)
        self.conv = nn.Conv1d(width, width, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(self.pad(x)))


@MODELS.register("causal_cnn")
class CausalCNN(nn.Module):
    """Dilated causal convolutions (as in Bai et al. 2018), from tokens ``int64[b, T]`` to logits ``[b, T, tokens]``.

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
        require_sequences("causal_cnn", input_shape)
        require_counts(width=width, kernel=kernel)
        self.embedding = nn.Embedding(num_classes, width)
        self.layers = nn.Sequential(*(_CausalConvolution(width, kernel, 2**i) for i in range(layers)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # Convolutions take channels first: [b, width, T].
        features = self.layers(self.embedding(x).transpose(1, 2))
        return self.head(features.transpose(1, 2))


@MODELS.register("gru")
class GRU(nn.Module):
    """A gated recurrent unit (Cho et al. 2014), from tokens ``int64[b, T]`` to logits ``[b, T, tokens]``.

    Parameters
    ----------
    width : size of the embeddings and of the state.
    layers : number of recurrent layers.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 128, layers: int = 1):
        super().__init__()
        require_sequences("gru", input_shape)
        require_counts(width=width, layers=layers)
        self.embedding = nn.Embedding(num_classes, width)
        self.gru = nn.GRU(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(x))
        return self.head(states)


@MODELS.register("causal_transformer")
class CausalTransformer(nn.Module):
    """A transformer that sees only the past (Radford et al. 2018).

    It maps tokens ``int64[b, T]`` to logits ``[b, T, tokens]``.

    Parameters
    ----------
    width, depth, heads : size of the embeddings, number of blocks, and heads in each.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, width: int = 64, depth: int = 2, heads: int = 4):
        super().__init__()
        require_sequences("causal_transformer", input_shape)
        require_multiple("width", width, "heads", heads)

        self.embedding = nn.Embedding(num_classes, width)
        self.positions = nn.Parameter(torch.empty(input_shape[0], width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, nn.Identity(), causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding(x) + self.positions
        return self.head(self.norm(self.blocks(tokens)))


def require_sequences(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise a ConfigError unless samples are rows of tokens."""
    if len(input_shape) != 1:
        raise ConfigError(f"The {name} model takes sequences of tokens, but samples are {list(input_shape)}.")
