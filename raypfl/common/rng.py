"""Random draws keyed by their purpose, never by when they happen.

A key is 64 bits derived from (seed, purpose, round, client, ...). Two draws share a key only if they are the same
draw, so results do not depend on the order of execution, the number of actors, or a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_SHIFT_A = np.uint64(30)
_SHIFT_B = np.uint64(27)
_SHIFT_C = np.uint64(31)


def key(seed: int, purpose: str, *path: int) -> int:
    """Return a 64-bit key for one purpose, e.g. ``key(seed, "cohort", round)``."""
    text = "/".join([str(int(seed)), purpose, *(str(int(part)) for part in path)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def keys(seed: int, purpose: str, round: int, clients: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a key for each client, ``uint64[len(clients)]``, for one purpose in one round."""
    base = np.uint64(key(seed, purpose, round))
    return mix(base + mix(np.asarray(clients, dtype=np.uint64)))


def generator(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """Return a NumPy generator for a handful of draws for one purpose."""
    return generator_of(key(seed, purpose, *path))


def generator_of(key: int) -> np.random.Generator:
    """Return the NumPy generator of a key."""
    # NumPy accepts any ISeedSequence, but its types do not say so.
    seed = _KeyOfPhilox(key)
    return np.random.Generator(np.random.Philox(seed))  # type: ignore[arg-type]


class _KeyOfPhilox(ISeedSequence):
    """Passes a key to Philox. ``Philox(key=...)`` also draws a seed from the system first: five times as long."""

    def __init__(self, key: int):
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        words = np.zeros(n_words, dtype)
        words[0] = self._key
        return words


def mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers, elementwise (the finalizer of SplitMix64, Steele et al. 2014)."""
    z = np.asarray(values, dtype=np.uint64) + _GAMMA
    z = (z ^ (z >> _SHIFT_A)) * _MIX_A
    z = (z ^ (z >> _SHIFT_B)) * _MIX_B
    return z ^ (z >> _SHIFT_C)


def uniform(keys: np.ndarray) -> np.ndarray:
    """Return a draw from [0, 1) for each key: ``float64[n]`` for ``uint64[n]``."""
    # The upper 53 bits are all that a float64 can hold.
    return (mix(keys) >> np.uint64(11)) * 2.0**-53


def normal(seed: int, purpose: str, clients: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a standard normal draw for each client, ``float64[len(clients)]``, the same in all rounds.

    The transform is that of Box and Muller (1958).
    """
    radius = uniform(keys(seed, f"{purpose} radius", 0, clients))
    angle = uniform(keys(seed, f"{purpose} angle", 0, clients))
    return np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * np.pi * angle)


def permutations(keys: np.ndarray, width: int, sizes: np.ndarray | None = None) -> np.ndarray:
    """Return rows ``int64[K, width]`` that start with a permutation of ``range(sizes[i])``, drawn by ``keys[i]`` alone.

    Parameters
    ----------
    keys : ``uint64[K]``, one key for each row.
    sizes : ``int64[K]``, at most `width`; None: all of `width`. The rest of a longer row has no meaning.
    """
    positions = mix(np.arange(1, width + 1, dtype=np.uint64))
    scores = mix(mix(np.asarray(keys, dtype=np.uint64))[:, None] + positions[None, :])
    if sizes is not None:
        scores[np.arange(width)[None, :] >= np.asarray(sizes)[:, None]] = np.iinfo(np.uint64).max
    return scores.argsort(axis=1, kind="stable")
