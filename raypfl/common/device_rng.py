"""Keyed random draws made by integer arithmetic on a device, without copies between it and the host."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

# SplitMix64's constants, as in `raypfl.common.rng`, but signed, since torch has little arithmetic for uint64. GAMMA has
# the opposite sign: it is subtracted.
GAMMA = 7046029254386353131
MIX_A = -4658895280553007687
MIX_B = -7723592293110705685

_LOW_32 = 0xFFFFFFFF


def scramble(z: Tensor) -> Tensor:
    """Scramble integers by SplitMix64's finalizer on wrapping ``int64`` (Steele et al. 2014)."""
    z = z - GAMMA
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_A
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_B
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def index_hashes(count: int, device: torch.device) -> Tensor:
    """Return hashes of ``range(count)``, ``int64[count]``."""
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or _get_current_dispatch_mode() is not None:
        # Not from the cache: it might drop a tensor that a CUDA graph needs, or keep memory of the graph. And recorded
        # operations say where the hashes are from, which those on a cached tensor would not.
        return _index_hashes.__wrapped__(count, device)
    return _index_hashes(count, device)


@lru_cache(maxsize=8)
def _index_hashes(count: int, device: torch.device) -> Tensor:
    return scramble(torch.arange(count, dtype=torch.int64, device=device))


def normal(keys: Tensor, like: Tensor) -> Tensor:
    """Draw standard normal numbers like ``like[..., n]`` for ``keys[...]``; a key always gives the same numbers.

    Each number comes from 64 keyed bits, by Box and Muller's transform; none exceeds 6.8 in absolute value, as with
    cuRAND.
    """
    hashes = scramble(keys)
    # A scalar key may be in the host's memory, and must stay a scalar to be combined with the device's tensors.
    bits = scramble(index_hashes(like.shape[-1], like.device) + (hashes[..., None] if keys.dim() else hashes))
    # In (0, 1]; rounding to 1 gives a radius of 0.
    uniform = ((bits >> 32) & _LOW_32).to(like.dtype).add_(0.5).mul_(2.0**-32)
    radius = uniform.log_().mul_(-2.0).sqrt_()
    return (bits & _LOW_32).to(like.dtype).mul_(2 * math.pi * 2.0**-32).cos_().mul_(radius)


def uniform(key: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return draws like x, above 0 and below 1: the middles of 2^23 equal intervals, which are exact in fp32."""
    upper_bits = (position_hashes(key, x.numel(), x.device) >> 41).bitwise_and_(0x7FFFFF)
    return ((upper_bits.to(dtype or x.dtype) + 0.5) / 2**23).reshape(x.shape)


def position_hashes(key: Tensor, count: int, device: torch.device) -> Tensor:
    """Return a hash of the key and of each number below `count`, ``int64[count]``, whose upper bits are random."""
    # In place: otherwise the draws of a large layer take longer than torch's own.
    z = index_hashes(count, device) + (key - GAMMA)
    z.bitwise_xor_((z >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(MIX_A)
    # The finalizer's last step does not change the upper bits, and only those are used.
    return z.bitwise_xor_((z >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(MIX_B)
