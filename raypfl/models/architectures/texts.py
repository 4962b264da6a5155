"""Networks that classify texts: tokens ``int64[b, T]``, which end in zeros where a text is shorter than T.

The zeros have no effect, so a text has the same outputs whatever the length of the longest one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.models.architectures.option_checks import require_counts, require_multiple
from raypfl.models.architectures.sequences import require_sequences
from raypfl.models.architectures.transformer import TransformerBlock
from raypfl.models.networks import MODELS


@MODELS.register("fasttext")
class FastText(nn.Module):
    """A linear classifier on the mean of a text's word vectors (Joulin et al. 2017), without n-grams.

    Parameters
    ----------
    width : length of a word vector.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, num_tokens: int, width: int = 32):
        super().__init__()
        require_sequences("fasttext", input_shape)
        require_counts(width=width)
        self.embedding = nn.Embedding(num_tokens, width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(mean_of_words(self.embedding(x), x != 0))


@MODELS.register("text_cnn")
class TextCNN(nn.Module):
    """Convolutions over words, and for each filter its largest value in the text (Kim 2014).

    Parameters
    ----------
    width : length of a word vector.
    kernels : numbers of neighbouring words that the convolutions see.
    filters : number of filters of each convolution.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        num_tokens: int,
        width: int = 32,
        kernels: Sequence[int] = (3, 4, 5),
        filters: int = 32,
    ):
        super().__init__()
        require_sequences("text_cnn", input_shape)
        require_counts(width=width, kernels=kernels, filters=filters)
        self.kernels = tuple(kernels)
        self.embedding = nn.Embedding(num_tokens, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, filters, kernel) for kernel in kernels)
        self.head = nn.Linear(filters * len(kernels), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        is_word = (x != 0)[:, None]
        # Convolutions take channels first: [b, width, T].
        words = self.embedding(x).transpose(1, 2) * is_word

        features = []
        for kernel, convolution in zip(self.kernels, self.convolutions, strict=True):
            # Every word begins a window, so the last windows reach beyond the text. Windows that begin with padding are
            # set to zero, which no word's window falls below after its ReLU.
            windows = F.pad(words, (0, kernel - 1))
            features.append((convolution(windows).relu() * is_word).amax(2))
        return self.head(torch.cat(features, 1))


@MODELS.register("text_transformer")
class TextTransformer(nn.Module):
    """A transformer in which all words of a text see each other (Vaswani et al. 2017), and the mean of its outputs.

    Parameters
    ----------
    width, depth, heads : length of a word vector, number of blocks, and attention heads in each.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        num_tokens: int,
        width: int = 32,
        depth: int = 2,
        heads: int = 4,
    ):
        super().__init__()
        require_sequences("text_transformer", input_shape)
        require_multiple("width", width, "heads", heads)

        self.embedding = nn.Embedding(num_tokens, width)
        self.positions = nn.Parameter(torch.empty(input_shape[0], width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, nn.Identity()) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        is_word = x != 0
        words = self.embedding(x) + self.positions
        for block in self.blocks:
            words = block(words, is_word)
        return self.head(mean_of_words(self.norm(words), is_word))


def mean_of_words(words: Tensor, is_word: Tensor) -> Tensor:
    """Return the mean ``[b, d]`` over the words of each text; 0 for a text without words.

    Parameters
    ----------
    words : ``[b, T, d]``.
    is_word : ``bool[b, T]``.
    """
    weights = is_word.to(words.dtype)
    sums = (words * weights[:, :, None]).sum(1)
    return sums / weights.sum(1, keepdim=True).clamp(min=1)
