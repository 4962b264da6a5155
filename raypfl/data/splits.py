"""Which client holds which sample, for training, validation or test."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.partitions import Partition, Traits
from raypfl.data.partitions.allocation import draw_owners, largest_remainders, rank_within

_TRAIN, _VAL, _TEST = range(3)
NOBODY = -1


@dataclass(frozen=True)
class Allocation:
    """The client and the split of every sample.

    Attributes
    ----------
    client : ``int64[N]``, or `NOBODY` for a sample in a pool.
    split : ``int16[N]``, an index into ``SPLITS + pools``.
    clients : number of clients.
    unseen : ``int64[U]``, clients that are never trained, ascending.
    """

    client: np.ndarray
    split: np.ndarray
    clients: int
    unseen: np.ndarray


def allocate(
    samples: Traits, published_test: np.ndarray, data: DataConfig, partition: Partition, seed: int
) -> Allocation:
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
    is_test = published_test if data.split == "auto" else np.zeros_like(published_test)
    if is_test.all():
        raise DataError("All samples are in the published test split; set data.split to merged to train on them too.")
    test_samples = np.flatnonzero(is_test)

    client = np.full(len(samples), NOBODY, dtype=np.int64)
    split = np.empty(len(samples), dtype=np.int16)

    remaining = rng.generator(seed, "auxiliary").permutation(np.flatnonzero(~is_test))
    total = len(remaining)
    for code, share in enumerate(data.shares().values(), start=len(SPLITS)):
        # Round the remainder down, not the pool, so that a tenth of CheXpert's 223,414 samples is 22,342.
        pool_samples, remaining = np.split(remaining, [total - int((1 - share) * total + 1e-9)])
        split[pool_samples] = code

    client_samples = np.sort(remaining)
    traits = replace(samples.at(client_samples), pooled=total - len(client_samples))
    owner = partition.checked_owners(traits, seed).astype(np.int64)
    clients = partition.count(traits)
    test_fraction = 0.0 if test_samples.size else data.test_fraction
    client[client_samples] = owner
    split[client_samples] = hold_out(traits, owner, test_fraction, data.val_fraction, seed)

    if test_samples.size:
        kind, kinds = partition.alike(samples)
        training_counts = _counts(kind[client_samples], owner, (kinds, clients))
        client[test_samples] = _draw_test_owners(kind[test_samples], training_counts, seed)
        split[test_samples] = _TEST
    return Allocation(client, split, clients, _draw_unseen(data.unseen_fraction, clients, seed))


def _draw_unseen(fraction: float, clients: int, seed: int) -> np.ndarray:
    """Draw the clients that are never trained: ``int64[U]``, ascending."""
    count = round(fraction * clients)
    if fraction and not 0 < count < clients:
        lacking = "left to train" if count else "unseen"
        raise ConfigError(
            f"data.unseen_fraction is {fraction}, but with {clients} clients none would be {lacking}; change it, or "
            f"partition.clients."
        )
    return np.sort(rng.generator(seed, "unseen").permutation(clients)[:count])


def hold_out(samples: Traits, owner: np.ndarray, test_fraction: float, val_fraction: float, seed: int) -> np.ndarray:
    """Divide each client's samples class by class: a split code for each, ``int16[N]``.

    Parameters
    ----------
    owner : ``int64[N]``, the client of each sample.
    """
    sizes = np.bincount(owner)
    test_sizes = _held_out_sizes(sizes, test_fraction, sizes - 1)
    val_sizes = _held_out_sizes(sizes, val_fraction, sizes - test_sizes - 1)

    draws = rng.generator(seed, "split")
    counts = _counts(owner, samples.labels, (len(sizes), samples.num_classes))
    test_counts = largest_remainders(test_sizes, counts, draws)
    val_counts = largest_remainders(val_sizes, counts - test_counts, draws)

    # A client's samples of a class come in random order: first those for test, then those for validation.
    cell = np.ravel_multi_index((owner, samples.labels), counts.shape)
    rank = rank_within(cell, draws)
    is_test = rank < test_counts.ravel()[cell]
    is_test_or_val = rank < (test_counts + val_counts).ravel()[cell]
    return np.select([is_test, is_test_or_val], [_TEST, _VAL], _TRAIN).astype(np.int16)


def _held_out_sizes(sizes: np.ndarray, fraction: float, limit: np.ndarray) -> np.ndarray:
    """Return how many samples each client holds out: at least one if the fraction is above 0 and the limit allows."""
    if not fraction:
        return np.zeros_like(sizes)
    rounded_down = np.floor(sizes * fraction + 1e-9).astype(np.int64)
    return np.minimum(np.maximum(rounded_down, 1), limit)


def _draw_test_owners(kind: np.ndarray, training_counts: np.ndarray, seed: int) -> np.ndarray:
    """Draw owners of published test samples, in the proportions of the clients' training samples.

    Parameters
    ----------
    kind : ``int64[N]``, each test sample's class or, for a partition by column, its group.
    training_counts : ``int64[kinds, clients]``, the clients' training samples of each kind.
    """
    draws = rng.generator(seed, "test")
    # Test samples of a kind that nobody trains on go to clients in proportion to their sizes.
    is_untrained = ~training_counts.any(axis=1, keepdims=True)
    weights = np.where(is_untrained, training_counts.sum(axis=0), training_counts)
    counts = largest_remainders(np.bincount(kind, minlength=len(training_counts)), weights, draws)
    return draw_owners(kind, counts, draws)


def _counts(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    cells = np.ravel_multi_index((row, column), shape)
    return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
