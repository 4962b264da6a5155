"""Torch's kinds of dropout, with masks that a key draws."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from raypfl.common.device_rng import position_hashes

_ENTRY_DROPOUTS = {F.dropout, F.alpha_dropout}
DROPOUTS = {*_ENTRY_DROPOUTS, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout}
_ALPHA_DROPOUTS = {F.alpha_dropout, F.feature_alpha_dropout}
_DIMS_OF_SINGLE_SAMPLE = {F.dropout1d: 2, F.dropout3d: 4}
"""Dimensions of an input that torch takes for a single sample, without a batch axis."""

_ALPHA = 1.7580993408473766
"""As in torch: -_ALPHA is the value to which SELU saturates."""
_SMALLEST = -(2**63)
"""The smallest ``int64``."""


def dropout(
    func: Callable[..., Tensor], key: Callable[[], Tensor], x: Tensor, p: float, training: bool, inplace: bool
) -> Tensor:
    """Return what `func`, one of ``DROPOUTS``, makes of x, by a mask that is drawn by `key`."""
    func(x, p=p, training=False)  # torch's errors and warnings about arguments; it draws nothing
    if not training or p == 0.0:
        return x
    if p == 1.0:
        return x.mul_(0.0) if inplace else x * 0.0

    shape = _mask_shape(func, x)
    z = position_hashes(key(), math.prod(shape), x.device)
    # The sign bit is flipped, since int64 compares as signed and the hashes are unsigned.
    is_kept = z.bitwise_xor_(_SMALLEST) >= (int(p * 2**24) << 40) + _SMALLEST
    mask = is_kept.reshape(shape).to(x.dtype)
    if func not in _ALPHA_DROPOUTS:
        factor = mask.div_(1.0 - p)
        return x.mul_(factor) if inplace else x * factor

    # Klambauer et al. 2017, section 3: entries are set to -ALPHA, then all are scaled and shifted.
    scale = 1.0 / math.sqrt((_ALPHA**2 * p + 1.0) * (1.0 - p))
    shift = (1.0 - mask).mul_(-_ALPHA * scale).add_(_ALPHA * scale * p)
    factor = mask.mul_(scale)
    return x.mul_(factor).add_(shift) if inplace else x * factor + shift


def _mask_shape(func: Callable[..., Tensor], x: Tensor) -> tuple[int, ...]:
    """Return the shape of a dropout's mask: that of x, or a number for each sample and channel."""
    if func in _ENTRY_DROPOUTS:
        return x.shape
    is_single_sample = x.dim() == _DIMS_OF_SINGLE_SAMPLE.get(func)
    axes = 1 if is_single_sample else 2
    return (*x.shape[:axes], *[1] * (x.dim() - axes))
