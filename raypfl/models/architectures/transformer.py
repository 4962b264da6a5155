"""Vision transformers (Dosovitskiy et al. 2021), with the tensor names of timm, so that its weights fit."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.models.architectures.option_checks import require_multiple
from raypfl.models.networks import MODELS, image_shape


class BottleneckAdapter(nn.Module):
    """``y = x + up(gelu(down(x)))`` on tokens ``[b, n, d]`` (Houlsby et al. 2019).

    It starts as the identity: the weights of `up` are zero. It has ``2 d size + d + size`` parameters.
    """

    def __init__(self, width: int, size: int):
        super().__init__()
        self.down = nn.Linear(width, size)
        self.up = nn.Linear(size, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.gelu(self.down(x)))


class Attention(nn.Module):
    """Self-attention, ``[b, n, d] -> [b, n, d]``; if `causal`, a token attends to itself and those before it."""

    def __init__(self, width: int, heads: int, causal: bool = False):
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Return ``[b, n, d]``; no token attends to those that are False in `is_token`, ``bool[b, n]``."""
        # Each [b, heads, n, d / heads].
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores + torch.full_like(scores[0, 0], -torch.inf).triu(1)
        if is_token is not None:
            # Not minus infinity, which would give NaN for a text without words.
            scores = scores.masked_fill(~is_token[:, None, None], -1e30)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.proj(mixed.flatten(2))


class Feedforward(nn.Module):
    """A hidden layer of four times the width, ``[b, n, d] -> [b, n, d]``."""

    def __init__(self, width: int):
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network, each after a layer norm and with a shortcut; the adapter follows."""

    def __init__(self, width: int, heads: int, adapter: nn.Module, causal: bool = False):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Feedforward(width)
        self.adapter = adapter

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), is_token)
        return x + self.adapter(self.mlp(self.norm2(x)))


class PatchEmbedding(nn.Module):
    """Square patches as tokens, ``[b, C, H, W] -> [b, n, d]``."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


@MODELS.register("vit_s_16")
class ViTS16(nn.Module):
    """ViT-S/16: 21,665,664 parameters for 3 channels in the body, and 3,850 in the head for 10 classes.

    It has no batch norm, so that DP-SGD can train it. Weights of timm's ``vit_small_patch16_224`` fit
    (``model.weights``).

    Parameters
    ----------
    size : height and width to which images are scaled.
    adapters : ``bottleneck`` puts adapters after the feed-forward networks of all blocks (595,200 parameters).
    adapter_size : number of an adapter's hidden units.
    width : length of a token.
    depth : number of blocks.
    heads : number of attention heads in each block.
    patch : height and width of a patch, in pixels.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        size: int = 224,
        adapters: Literal["none", "bottleneck"] = "none",
        adapter_size: int = 64,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        patch: int = 16,
    ):
        super().__init__()
        channels, *_ = image_shape("vit_s_16", input_shape)
        require_multiple("size", size, "patch", patch)
        require_multiple("width", width, "heads", heads)

        self.size = size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.patch_embed = PatchEmbedding(channels, width, patch)

        blocks = []
        for _ in range(depth):
            adapter = nn.Identity() if adapters == "none" else BottleneckAdapter(width, adapter_size)
            blocks.append(TransformerBlock(width, heads, adapter))
        self.blocks = nn.Sequential(*blocks)

        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)

        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and "adapter" not in name:
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.size, self.size):
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", align_corners=False)
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])
