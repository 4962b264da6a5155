"""Who holds which sample, and for what: to train, validate or test on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypfl import rng
from raypfl.data.datasets import DataConfig
from raypfl.data.partitions import Partition, apportion, deal, rank_within
from raypfl.errors import DataError

# A client's splits come first; what follows are pools, which belong to nobody.
SPLITS = ("train", "val", "test")
POOLS = ("auxiliary",)
_TRAIN, _VAL, _TEST, _AUXILIARY = range(4)
NOBODY = -1


@dataclass(frozen=True)
class Holdings:
    """Every sample's place.

    Attributes
    ----------
    client : ``int64[N]``, or `NOBODY` for a sample in a pool.
    split : ``int8[N]``, an index into ``SPLITS + POOLS``.
    """

    client: np.ndarray
    split: np.ndarray


def hold(
    labels: np.ndarray,
    num_classes: int,
    published_test: np.ndarray,
    data: DataConfig,
    partition: Partition,
    seed: int,
) -> Holdings:
    """Deal the samples out to clients, and hold out what `data` asks for.

    A client with two samples or more keeps at least one to train on and, where clients hold out test samples of their
    own, at least one to test on.

    Parameters
    ----------
    labels : ``int64[N]``
    published_test : ``bool[N]``; all False where no test split was published.

    Raises
    ------
    ConfigError, DataError : if the partition cannot be met.
    """
    apart = published_test if data.split == "auto" else np.zeros_like(published_test)
    if apart.all():
        raise DataError("All samples are in the published test split; data.split: merged would train on them, too.")
    tests, rest = np.flatnonzero(apart), rng.generator(seed, "auxiliary").permutation(np.flatnonzero(~apart))
    own = np.sort(rest[round(data.auxiliary_fraction * len(rest)) :])

    client = np.full(len(labels), NOBODY, dtype=np.int64)
    client[own] = partition.checked_owners(labels[own], num_classes, seed)
    split = np.full(len(labels), _AUXILIARY, dtype=np.int8)
    split[own] = _hold_out(client[own], 0.0 if tests.size else data.test_fraction, data.val_fraction, seed)
    if tests.size:
        held = _class_counts(labels[own], client[own], (num_classes, partition.clients))
        client[tests] = _matched(labels[tests], held, seed)
        split[tests] = _TEST
    return Holdings(client, split)


def _hold_out(owner: np.ndarray, test_fraction: float, val_fraction: float, seed: int) -> np.ndarray:
    """Each client's own samples divided at random: split codes ``int8[N]`` for owners ``int64[N]``."""
    sizes = np.bincount(owner)
    tests = _share(sizes, test_fraction, sizes - 1)
    vals = _share(sizes, val_fraction, sizes - tests - 1)
    rank = rank_within(owner, rng.generator(seed, "split"))
    choices = [rank < tests[owner], rank < (tests + vals)[owner]]
    return np.select(choices, [_TEST, _VAL], _TRAIN).astype(np.int8)


def _share(sizes: np.ndarray, fraction: float, limit: np.ndarray) -> np.ndarray:
    """How many samples to hold out: at least one where something is asked for and the limit allows it."""
    if not fraction:
        return np.zeros_like(sizes)
    return np.minimum(np.maximum(np.rint(sizes * fraction).astype(np.int64), 1), limit)


def _matched(labels: np.ndarray, held: np.ndarray, seed: int) -> np.ndarray:
    """Owners for published test samples, so that a client is tested on classes in the proportions that it holds.

    Parameters
    ----------
    labels : ``int64[N]``, of the test samples.
    held : ``int64[num_classes, clients]``, of the samples that clients already hold.
    """
    never_held = ~held.any(axis=1, keepdims=True)
    weights = np.where(never_held, held.sum(axis=0), held)
    counts = apportion(np.bincount(labels, minlength=len(held)), weights)
    return deal(labels, counts, rng.generator(seed, "test"))


def _class_counts(labels: np.ndarray, client: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    cells = np.ravel_multi_index((labels, client), shape)
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
