"""Which client holds which sample, for training, validation or test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.data.allocation import draw_owners, largest_remainders, rank_within
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.partitions import Partition, Traits

_TRAIN, _VAL, _TEST = range(3)
NOBODY = -1


@dataclass(frozen=True)
class Holdings:
    """The client and the split of every sample.

    Attributes
    ----------
    client : ``int64[N]``, or `NOBODY` for a sample in a pool.
    split : ``int16[N]``, an index into ``SPLITS + pools``.
    clients : how many there are.
    unseen : ``int64[U]``, clients that are never trained, ascending.
    """

    client: np.ndarray
    split: np.ndarray
    clients: int
    unseen: np.ndarray


def allocate(
    samples: Traits, published_test: np.ndarray, data: DataConfig, partition: Partition, seed: int
) -> Holdings:
    """Allocate samples to clients by the partition, and to splits and pools as `data` describes.

    A client's val and test samples have its classes in the proportions in which it holds them. Sizes are rounded down,
    but a client with two or more samples keeps at least one training sample and, if clients hold out their own test
    samples, at least one test sample.

    Parameters
    ----------
    published_test : ``bool[N]``; all False if no test split was published.

    Raises
    ------
    ConfigError, DataError : if the samples do not allow it.
    """
    apart = published_test if data.split == "auto" else np.zeros_like(published_test)
    if apart.all():
        raise DataError("All samples are in the published test split; set data.split to merged to train on them too.")
    tests, rest = np.flatnonzero(apart), rng.generator(seed, "auxiliary").permutation(np.flatnonzero(~apart))
    total = len(rest)
    client = np.full(len(samples), NOBODY, dtype=np.int64)
    split = np.empty(len(samples), dtype=np.int16)
    for code, share in enumerate(data.shares().values(), start=len(SPLITS)):
        # The rest, not the pool, is rounded down: so a tenth of CheXpert's 223,414 samples is 22,342.
        taken, rest = np.split(rest, [total - int((1 - share) * total + 1e-9)])
        split[taken] = code
    own = np.sort(rest)

    allocated = replace(samples.at(own), pooled=total - len(own))
    client[own] = partition.checked_owners(allocated, seed)
    clients = partition.count(allocated)
    split[own] = hold_out(allocated, client[own], 0.0 if tests.size else data.test_fraction, data.val_fraction, seed)
    if tests.size:
        kind, kinds = partition.alike(samples)
        client[tests] = _matched(kind[tests], _counts(kind[own], client[own], (kinds, clients)), seed)
        split[tests] = _TEST
    return Holdings(client, split, clients, _unseen(data.unseen_fraction, clients, seed))


def _unseen(fraction: float, clients: int, seed: int) -> np.ndarray:
    count = round(fraction * clients)
    if fraction and not 0 < count < clients:
        what = "left to train" if count else "unseen"
        raise ConfigError(
            f"data.unseen_fraction is {fraction}, but with {clients} clients none would be {what}; change it, or "
            f"partition.clients."
        )
    return np.sort(rng.generator(seed, "unseen").permutation(clients)[:count])


def hold_out(samples: Traits, owner: np.ndarray, test_fraction: float, val_fraction: float, seed: int) -> np.ndarray:
    """Split codes ``int16[N]`` that divide each client's own samples class by class, for owners ``int64[N]``."""
    sizes = np.bincount(owner)
    tests = _share(sizes, test_fraction, sizes - 1)
    vals = _share(sizes, val_fraction, sizes - tests - 1)
    draws = rng.generator(seed, "split")
    held = _counts(owner, samples.labels, (len(sizes), samples.num_classes))
    of_test = largest_remainders(tests, held, draws)
    of_val = largest_remainders(vals, held - of_test, draws)
    cell = np.ravel_multi_index((owner, samples.labels), held.shape)
    rank = rank_within(cell, draws)
    choices = [rank < of_test.ravel()[cell], rank < (of_test + of_val).ravel()[cell]]
    return np.select(choices, [_TEST, _VAL], _TRAIN).astype(np.int16)


def _share(sizes: np.ndarray, fraction: float, limit: np.ndarray) -> np.ndarray:
    """How many samples to hold out: at least one if the fraction is above 0 and the limit allows it."""
    if not fraction:
        return np.zeros_like(sizes)
    return np.minimum(np.maximum(np.floor(sizes * fraction + 1e-9).astype(np.int64), 1), limit)


def _matched(kind: np.ndarray, held: np.ndarray, seed: int) -> np.ndarray:
    """Owners of published test samples, so that a client's test samples have the proportions of its training samples.

    Parameters
    ----------
    kind : ``int64[N]``, of each test sample: its class or, for a partition by column, its group.
    held : ``int64[kinds, clients]``, counts of the samples that clients already hold.
    """
    draws = rng.generator(seed, "test")
    never_held = ~held.any(axis=1, keepdims=True)
    weights = np.where(never_held, held.sum(axis=0), held)
    return draw_owners(kind, largest_remainders(np.bincount(kind, minlength=len(held)), weights, draws), draws)


def _counts(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    cells = np.ravel_multi_index((row, column), shape)
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
