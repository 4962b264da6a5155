"""Pack whole numbers of a few bits each into bytes, and unpack them."""

from __future__ import annotations

import numpy as np


def packed(codes: np.ndarray, width: int) -> bytes:
    """Return whole numbers ``[n]`` below ``2**width`` as ``ceil(n * width / 8)`` bytes, lowest bit first."""
    bits = np.empty((len(codes), width), np.uint8)
    for place in range(width):
        bits[:, place] = (codes >> place) & 1
    return np.packbits(bits.ravel(), bitorder="little").tobytes()


def unpacked(message: bytes, width: int, count: int) -> np.ndarray:
    """Return the `count` numbers that `packed` put into a message, ``int64[count]``."""
    octets = np.frombuffer(message, np.uint8)
    bits = np.unpackbits(octets, count=count * width, bitorder="little").reshape(count, width)
    codes = np.zeros(count, np.int64)
    for place in range(width):
        codes |= bits[:, place].astype(np.int64) << place
    return codes


def packed_size(count: int, width: int) -> int:
    """Return the bytes of `count` numbers of `width` bits."""
    return -(-count * width // 8)
