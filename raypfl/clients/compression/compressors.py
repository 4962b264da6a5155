"""Compressors: how a client's update becomes bytes, and how the server reads them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import numpy as np

from raypfl.clients.compression.bits import packed, packed_size, unpacked
from raypfl.common import rng
from raypfl.common.component import Component
from raypfl.common.limits import COUNT, SHARE, Limit
from raypfl.common.registry import Registry

COMPRESSORS = Registry("compression")

UP_TO_16 = Limit("between 1 and 16", lambda v: 1 <= v <= 16)
FROM_2_TO_16 = Limit("between 2 and 16", lambda v: 2 <= v <= 16)

_FLOAT = "<f4"
_KEY = "<u8"
_LARGEST_HALF = 65504.0


class Compressor(Component, ABC):
    """Base class of compressors. Its fields are options of ``compression``.

    A client's message is what `encode` returns, and the ledger counts its length.

    Attributes
    ----------
    error_feedback : whether a client adds what its last messages lost to its next update (Seide et al. 2014).
    """

    section: ClassVar[str] = "compression."

    error_feedback: bool = False

    @abstractmethod
    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        """Return the message with which a client sends its update ``float32[P]``, P at least 1.

        `generator` is for draws; it is the client's own in each round.
        """

    @abstractmethod
    def decode(self, message: bytes, size: int) -> np.ndarray:
        """Return the update as the server reads it from a message, ``float32[size]``."""


@COMPRESSORS.register("half")
class Half(Compressor):
    """Numbers of 16 bits (IEEE half precision) in place of 32; those beyond its range become its largest."""

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        return update.clip(-_LARGEST_HALF, _LARGEST_HALF).astype("<f2").tobytes()

    def decode(self, message: bytes, size: int) -> np.ndarray:
        return np.frombuffer(message, "<f2").astype(np.float32)


@COMPRESSORS.register("uniform")
class Uniform(Compressor):
    """Levels at equal distances from the smallest to the largest number, rounded at random (Suresh et al. 2017).

    Unbiased. A message has `bits` for each number, and the two limits.

    Attributes
    ----------
    bits : bits of a number: there are 2^bits levels.
    """

    bits: Annotated[int, UP_TO_16] = 8

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        limits = np.array([update.min(), update.max()], _FLOAT)
        low, step = self._scale(limits)
        heights = (update.astype(np.float64) - low) / step if step > 0 else np.zeros_like(update)
        levels = _rounded_at_random(heights, 2**self.bits - 1, generator)
        return limits.tobytes() + packed(levels, self.bits)

    def decode(self, message: bytes, size: int) -> np.ndarray:
        limits = np.frombuffer(message, _FLOAT, count=2)
        low, step = self._scale(limits)
        levels = unpacked(message[limits.nbytes :], self.bits, size)
        return (low + levels * step).astype(np.float32)

    def _scale(self, limits: np.ndarray) -> tuple[float, float]:
        """Return the lowest level, and the distance between two."""
        low, high = limits.tolist()
        return low, (high - low) / (2**self.bits - 1)


@COMPRESSORS.register("qsgd")
class QSGD(Compressor):
    """QSGD: levels at equal distances from 0 to a norm of the update, rounded at random (Alistarh et al. 2017).

    Unbiased. A message has `bits` for each number, and one norm for each bucket. The defaults are those of the paper's
    experiments; its theorem is on the norm `l2`. Two bits give TernGrad (Wen et al. 2017) without its clipping.

    Attributes
    ----------
    bits : bits of a number, its sign included: there are 2^(bits - 1) - 1 levels above 0.
    bucket : how many numbers share a norm.
    norm : largest absolute value, or Euclidean norm.
    """

    bits: Annotated[int, FROM_2_TO_16] = 4
    bucket: Annotated[int, COUNT] = 512
    norm: Literal["max", "l2"] = "max"

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        buckets = _padded(update, self._buckets(len(update)) * self.bucket).reshape(-1, self.bucket)
        norms = self._norms(buckets).astype(_FLOAT)

        highest = self._highest_level
        divisors = np.where(norms > 0, norms, 1).astype(np.float64)
        heights = np.abs(buckets) * (highest / divisors[:, None])
        levels = _rounded_at_random(heights.ravel()[: len(update)], highest, generator)
        codes = levels + np.signbit(update) * (highest + 1)
        return norms.tobytes() + packed(codes, self.bits)

    def decode(self, message: bytes, size: int) -> np.ndarray:
        norms = np.frombuffer(message, _FLOAT, count=self._buckets(size))
        codes = unpacked(message[norms.nbytes :], self.bits, size)
        highest = self._highest_level
        signed = np.where(codes > highest, highest + 1 - codes, codes)
        norm_of_each = np.repeat(norms.astype(np.float64), self.bucket)[:size]
        return (signed * norm_of_each / highest).astype(np.float32)

    @property
    def _highest_level(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def _buckets(self, size: int) -> int:
        return -(-size // self.bucket)

    def _norms(self, buckets: np.ndarray) -> np.ndarray:
        if self.norm == "max":
            return np.abs(buckets).max(1)
        return np.sqrt(np.square(buckets).sum(1))


@COMPRESSORS.register("sign")
class Sign(Compressor):
    """The signs alone, scaled by the mean absolute value (Karimireddy et al. 2019): one bit for each number."""

    error_feedback: bool = True

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        scale = np.abs(update).mean(dtype=np.float64)
        return np.array(scale, _FLOAT).tobytes() + packed(~np.signbit(update), 1)

    def decode(self, message: bytes, size: int) -> np.ndarray:
        scale = np.frombuffer(message, _FLOAT, count=1)
        return scale * _signs(message[scale.nbytes :], size)


@COMPRESSORS.register("drive")
class Drive(Compressor):
    """DRIVE: the signs alone, after a random rotation, with the scale that is unbiased (Vargaftik et al. 2021).

    The rotation is a Hadamard transform after random signs. A message has one bit for each number, up to the next power
    of two, the scale, and the key of the rotation.
    """

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        key = generator.integers(2**64, dtype=_KEY)
        rotated = _hadamard(_padded(update, _next_power(len(update))) * self._flips(key, len(update)))
        total = np.abs(rotated).sum()
        scale = np.square(update, dtype=np.float64).sum() / total if total > 0 else 0.0
        return key.tobytes() + np.array(scale, _FLOAT).tobytes() + packed(~np.signbit(rotated), 1)

    def decode(self, message: bytes, size: int) -> np.ndarray:
        key = np.frombuffer(message, _KEY, count=1)[0]
        scale = np.frombuffer(message, _FLOAT, count=1, offset=key.nbytes)
        signs = _signs(message[key.nbytes + scale.nbytes :], _next_power(size))
        restored = _hadamard(signs.astype(np.float64)) * self._flips(key, size)
        return (scale * restored[:size]).astype(np.float32)

    def _flips(self, key: np.uint64, size: int) -> np.ndarray:
        """Return the signs before the rotation, 1 or -1."""
        draws = rng.generator_of(int(key)).bytes(packed_size(_next_power(size), 1))
        return _signs(draws, _next_power(size))


@COMPRESSORS.register("top_k")
class TopK(Compressor):
    """The numbers of the largest absolute value, with their places; all others are read as 0.

    Places take the fewer bytes of two forms: one bit for each number of the update, or a number for each place.

    Attributes
    ----------
    fraction : the share of numbers that is sent, rounded up.
    """

    error_feedback: bool = True

    fraction: Annotated[float, SHARE] = 0.01

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        size = len(update)
        num_kept = _share(self.fraction, size)
        places = np.sort(np.argpartition(np.abs(update), size - num_kept)[size - num_kept :])
        values = update[places].astype(_FLOAT)
        if self._has_bit_for_each(num_kept, size):
            is_kept = np.zeros(size, np.uint8)
            is_kept[places] = 1
            return values.tobytes() + packed(is_kept, 1)
        return values.tobytes() + packed(places, _width(size))

    def decode(self, message: bytes, size: int) -> np.ndarray:
        num_kept = _share(self.fraction, size)
        values = np.frombuffer(message, _FLOAT, count=num_kept)
        rest = message[values.nbytes :]
        if self._has_bit_for_each(num_kept, size):
            places = np.flatnonzero(unpacked(rest, 1, size))
        else:
            places = unpacked(rest, _width(size), num_kept)
        update = np.zeros(size, np.float32)
        update[places] = values
        return update

    def _has_bit_for_each(self, num_kept: int, size: int) -> bool:
        return packed_size(size, 1) <= packed_size(num_kept, _width(size))


@COMPRESSORS.register("random_k")
class RandomK(Compressor):
    """Numbers at random places, which the server knows from a key in the message; all others are read as 0.

    Values are multiplied by P / k, so that the mean is unbiased; not with error feedback, which sends the rest later.

    Attributes
    ----------
    fraction : the share of numbers that is sent, rounded up.
    """

    fraction: Annotated[float, SHARE] = 0.1

    def encode(self, update: np.ndarray, generator: np.random.Generator) -> bytes:
        key = generator.integers(2**64, dtype=_KEY)
        return key.tobytes() + update[self._places(key, len(update))].astype(_FLOAT).tobytes()

    def decode(self, message: bytes, size: int) -> np.ndarray:
        key = np.frombuffer(message, _KEY, count=1)[0]
        values = np.frombuffer(message, _FLOAT, offset=key.nbytes)
        update = np.zeros(size, np.float32)
        update[self._places(key, size)] = values if self.error_feedback else values * (size / len(values))
        return update

    def _places(self, key: np.uint64, size: int) -> np.ndarray:
        return rng.generator_of(int(key)).choice(size, _share(self.fraction, size), replace=False, shuffle=False)


def _padded(update: np.ndarray, length: int) -> np.ndarray:
    """Return an update with zeros after it, ``float64[length]``."""
    padded = np.zeros(length)
    padded[: len(update)] = update
    return padded


def _rounded_at_random(heights: np.ndarray, highest: int, generator: np.random.Generator) -> np.ndarray:
    """Return ``int64``: numbers from 0 to `highest`, rounded up with a chance equal to their fractional part."""
    levels = np.floor(heights + generator.random(len(heights)))
    return levels.clip(0, highest).astype(np.int64)


def _signs(message: bytes, count: int) -> np.ndarray:
    """Return ``float32[count]``: 1 for each bit that is set, and -1 for others."""
    return unpacked(message, 1, count).astype(np.float32) * 2 - 1


def _hadamard(vector: np.ndarray) -> np.ndarray:
    """Return the product of the orthonormal Hadamard matrix with a vector ``[n]``, n a power of two."""
    result = vector
    done = 1
    while done < len(vector):
        # The matrix is a Kronecker product of small ones, and each is a product that BLAS is fast at.
        order = min(64, len(vector) // done)
        small = _hadamard_matrix(order)
        result = result.reshape(-1, order) @ small if done == 1 else small @ result.reshape(-1, order, done)
        done *= order
    return result.ravel() / math.sqrt(len(vector))


@lru_cache
def _hadamard_matrix(order: int) -> np.ndarray:
    """Return Sylvester's matrix ``[order, order]`` of 1 and -1, for an order that is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _next_power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _share(fraction: float, size: int) -> int:
    """Return a share of `size` numbers, rounded up; 0.07 of 100 are 7, although the product is a little more."""
    return min(size, math.ceil(fraction * size - 1e-9))


def _width(size: int) -> int:
    """Return the bits of a place in an update of `size` numbers."""
    return max(1, (size - 1).bit_length())
