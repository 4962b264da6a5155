"""Batch norm that ignores padding, and dropout with keyed random draws.

Under ``vmap`` torch's own versions would include padding rows and draw from the global random stream. These give what
the network computes for each client alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_GAMMA, _MIX_A, _MIX_B = 7046029254386353131, -4658895280553007687, -7723592293110705685
_LEAST = -(2**63)


class RowWise(TorchFunctionMode):
    """Within: ``F.batch_norm`` in training mode ignores rows of weight 0, and ``F.dropout`` draws from `key`.

    Parameters
    ----------
    weight : ``Tensor[b]`` of ones and zeros; None: no row is padding.
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
        return func(*args, **kwargs)

    def _next_key(self) -> Tensor:
        self.calls += 1
        return _hash(self.key) + self.calls


def _batch_norm(
    rows: Tensor,
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
    over = [0, *range(2, x.dim())]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    real = rows.reshape(-1, *[1] * (x.dim() - 1))
    count = rows.sum() * (x[0, 0].numel() if x.dim() > 2 else 1)
    mean = (x * real).sum(over) / count
    var = ((x - mean.reshape(shape)).square() * real).sum(over) / count
    if running_mean is not None and running_var is not None:
        unbiased = var.detach() * count / (count - 1).clamp_min(1)
        running_mean.copy_(running_mean + momentum * (mean.detach() - running_mean))
        running_var.copy_(running_var + momentum * (unbiased - running_var))
    out = (x - mean.reshape(shape)) * torch.rsqrt(var.reshape(shape) + eps)
    if weight is not None:
        out = out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def _dropout(
    key: Callable[[], Tensor], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        return x
    # In place: otherwise the draws of a large layer take longer than torch's own.
    z = _places(x.numel(), x.device) + (key() - _GAMMA)
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX_A)
    z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX_B)
    # The finalizer's last step does not change the upper bits, and only those are compared.
    keep = z.bitwise_xor_(_LEAST) >= (int(p * 2**24) << 40) + _LEAST
    return x * keep.reshape(x.shape).to(x.dtype).div_(1.0 - p)


@lru_cache(maxsize=8)
def _places(count: int, device: torch.device) -> Tensor:
    """``int64[count]``: hashes of the indices of a layer's entries."""
    return _hash(torch.arange(count, dtype=torch.int64, device=device))


def _hash(z: Tensor) -> Tensor:
    """SplitMix64's finalizer on wrapping ``int64`` (Steele et al. 2014)."""
    z = z - _GAMMA
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX_A
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
