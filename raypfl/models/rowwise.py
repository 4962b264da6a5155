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

from raypfl.common.device_rng import scramble, uniform
from raypfl.common.keyed_dropout import DROPOUTS, dropout


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
        if func in DROPOUTS:
            return dropout(func, self._next_key, *args, **kwargs)
        if func is torch.rand_like and kwargs.keys() <= {"dtype"}:
            return uniform(self._next_key(), *args, **kwargs)
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
