"""Batch norm that ignores padding, and dropout and uniform noise with keyed random draws.

Under ``vmap`` torch's own versions would include padding rows and draw from the global random stream. These give what
the network computes for each client alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from raypfl.common.device_rng import GAMMA, MIX_A, MIX_B, index_hashes, scramble

_SMALLEST = -(2**63)
"""The smallest ``int64``."""


class RowWise(TorchFunctionMode):
    """While active, dropout and ``rand_like`` draw by `key`, and ``F.batch_norm`` in training mode ignores padding.

    Parameters
    ----------
    weight : ``Tensor[b]``, 1 for a sample and 0 for padding; None: no row is padding.
    key : ``int64`` scalar tensor. Draws of different keys are independent.
    """

    def __init__(self, weight: Tensor | None, key: Tensor):
        super().__init__()
        self.weight = weight
        self.key = key
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and self.weight is not None:
            return _batch_norm(self.weight, *args, **kwargs)
        if func is F.dropout:
            return _dropout(self._next_key, *args, **kwargs)
        if func is torch.rand_like and kwargs.keys() <= {"dtype"}:
            return _uniform(self._next_key(), *args, **kwargs)
        return func(*args, **kwargs)

    def _next_key(self) -> Tensor:
        self.calls += 1
        return scramble(self.key) + self.calls


def _batch_norm(
    row_weight: Tensor,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)

    axes = [0, *range(2, x.dim())]  # all but the channels
    channel_shape = [1, -1, *[1] * (x.dim() - 2)]
    weight_like_x = row_weight.reshape(-1, *[1] * (x.dim() - 1))
    pixels = x[0, 0].numel() if x.dim() > 2 else 1
    count = row_weight.sum() * pixels
    mean = (x * weight_like_x).sum(axes) / count
    var = ((x - mean.reshape(channel_shape)).square() * weight_like_x).sum(axes) / count

    if running_mean is not None and running_var is not None:
        # As in torch, the batch is normalised by its biased variance, and the statistics get the unbiased one.
        unbiased = var.detach() * count / (count - 1).clamp_min(1)
        running_mean.copy_(running_mean + momentum * (mean.detach() - running_mean))
        running_var.copy_(running_var + momentum * (unbiased - running_var))

    out = (x - mean.reshape(channel_shape)) * torch.rsqrt(var.reshape(channel_shape) + eps)
    if weight is not None:
        out = out * weight.reshape(channel_shape)
    return out if bias is None else out + bias.reshape(channel_shape)


def _dropout(
    key: Callable[[], Tensor], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0

    z = _hashes(key(), x)
    # The sign bit is flipped, since int64 compares as signed and the hashes are unsigned.
    keep = z.bitwise_xor_(_SMALLEST) >= (int(p * 2**24) << 40) + _SMALLEST
    return x * keep.reshape(x.shape).to(x.dtype).div_(1.0 - p)


def _uniform(key: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return draws like x, above 0 and below 1: the middles of 2^23 equal intervals, which are exact in fp32."""
    upper_bits = (_hashes(key, x) >> 41).bitwise_and_(0x7FFFFF)
    return ((upper_bits.to(dtype or x.dtype) + 0.5) / 2**23).reshape(x.shape)


def _hashes(key: Tensor, x: Tensor) -> Tensor:
    """Return a hash of the key and of each entry's position, ``int64[x.numel()]``, whose upper bits are random."""
    # In place: otherwise the draws of a large layer take longer than torch's own.
    z = index_hashes(x.numel(), x.device) + (key - GAMMA)
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(MIX_A)
    # The finalizer's last step does not change the upper bits, and only those are used.
    return z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(MIX_B)
