"""The order in which clients visit their training samples: the same for a client in any group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raypfl.common import rng


@dataclass(frozen=True)
class SampleOrder:
    """The samples that a group's clients visit, step by step.

    Attributes
    ----------
    index : the positions of the samples in each client's own list, ``int64[K, S, b]``; padding repeats position 0.
    counts : the number of real samples in each batch, ``int64[K, S]``; 0 after a client's last step.
    steps : the number of steps of each client, ``int64[K]``.
    draws : random numbers in [0, 1) for the augmentation of each visited image, ``float64[K, S, b, D]``; None: no
        augmentation.
    """

    index: np.ndarray
    counts: np.ndarray
    steps: np.ndarray
    draws: np.ndarray | None = None

    @property
    def sizes_differ(self) -> bool:
        """Whether batches differ in size, so that stacking them takes padding."""
        return bool(((self.counts > 0) & (self.counts != self.counts.max(initial=0))).any())

    def limited(self, shares: np.ndarray) -> SampleOrder:
        """Return the first steps of each client, a share ``float64[K]`` of them; see :func:`share_of_steps`."""
        steps = share_of_steps(self.steps, shares)
        longest = int(steps.max(initial=0))
        counts = np.where(np.arange(longest) < steps[:, None], self.counts[:, :longest], 0)
        return replace(self, index=self.index[:, :longest], counts=counts, steps=steps)

    def with_draws(self, keys: np.ndarray, draws_per_visit: int) -> SampleOrder:
        """Add random numbers to each visit.

        They depend only on ``keys[k]``, ``uint64[K]``, the step and the position in the batch.
        """
        _, steps, size = self.index.shape
        with np.errstate(over="ignore"):
            step_keys = rng.mix(keys[:, None] + np.arange(steps, dtype=np.uint64))
        return replace(self, draws=augmentation_draws(step_keys, size, draws_per_visit))


def augmentation_draws(keys: np.ndarray, size: int, draws_per_visit: int) -> np.ndarray:
    """Draw numbers ``float64[..., size, draws_per_visit]`` in [0, 1) for batches with keys ``uint64[...]``."""
    with np.errstate(over="ignore"):
        position_keys = rng.mix(keys[..., None] + np.arange(size, dtype=np.uint64))
        return rng.uniform(position_keys[..., None] + np.arange(draws_per_visit, dtype=np.uint64))


def epoch_order(
    keys: np.ndarray,
    sizes: np.ndarray,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    smallest: int = 1,
) -> SampleOrder:
    """Draw batches of ``batch_size``, reshuffled every epoch; the last batch of an epoch may be smaller.

    Row k depends only on ``keys[k]`` and ``sizes[k]``, so a client's batches are the same in every group.

    Parameters
    ----------
    keys : the clients' keys, ``uint64[K]``.
    sizes : the clients' numbers of samples, ``int64[K]``, at least 1.
    epochs, steps : the number of passes; or the exact number of batches, if not None.
    smallest : the smallest last batch; one of fewer samples is left out, unless it is the client's only one.
    """
    per_epoch = num_steps(sizes, batch_size, smallest=smallest)
    totals = num_steps(sizes, batch_size, epochs, steps, smallest)
    step = np.arange(int(totals.max(initial=0)))
    epoch, batch_in_epoch = np.divmod(step, per_epoch[:, None])

    # Positions in the shuffled epoch; a batch may run over its end, or the client may have no more steps.
    position = batch_in_epoch[:, :, None] * batch_size + np.arange(batch_size)
    is_sample = (position < sizes[:, None, None]) & (step < totals[:, None])[:, :, None]

    num_epochs = -(-totals // per_epoch)
    index = np.empty(position.shape, dtype=np.int64)
    # All rows of a draw are as long as its largest client, so only clients within a factor of two are drawn together.
    exponents = np.frexp(sizes)[1]
    distinct_exponents = set(exponents.tolist())
    for exponent in distinct_exponents:
        clients: slice | np.ndarray = slice(None)
        if len(distinct_exponents) > 1:
            clients = np.flatnonzero(exponents == exponent)
        rows, first_row = _shuffled_epochs(keys[clients], num_epochs[clients], sizes[clients])
        row = np.where(is_sample[clients], (first_row[:, None] + epoch[clients])[:, :, None], 0)
        index[clients] = rows[row, np.where(is_sample[clients], position[clients], 0)]
    index[~is_sample] = 0
    return SampleOrder(index, is_sample.sum(2), totals)


def sampled_order(
    keys: np.ndarray,
    sizes: np.ndarray,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    smallest: int = 1,
) -> SampleOrder:
    """Draw as many batches as :func:`epoch_order`; each has each of n samples with probability ``batch_size / n``.

    This is the Poisson sampling that the accounting of DP-SGD assumes. A batch may be empty, or larger than
    `batch_size`. Row k depends only on ``keys[k]`` and ``sizes[k]``.
    """
    totals = num_steps(sizes, batch_size, epochs, steps, smallest)
    rates = sampling_rates(sizes, batch_size)

    chosen_of_clients = []
    for k, n in enumerate(sizes.tolist()):
        with np.errstate(over="ignore"):
            step_keys = rng.mix(keys[k] + np.arange(totals[k], dtype=np.uint64))
            uniform = rng.uniform(rng.mix(step_keys[:, None] + np.arange(n, dtype=np.uint64)))
        chosen_of_clients.append(uniform < rates[k])

    counts = np.zeros((len(sizes), int(totals.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(chosen_of_clients):
        counts[k, : totals[k]] = chosen.sum(1)

    index = np.zeros((*counts.shape, int(counts.max(initial=0))), dtype=np.int64)
    for k, chosen in enumerate(chosen_of_clients):
        step, sample = chosen.nonzero()
        first_of_step = np.cumsum(chosen.sum(1)) - chosen.sum(1)
        index[k, step, np.arange(len(step)) - first_of_step[step]] = sample
    return SampleOrder(index, counts, totals)


def sampling_rates(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the probability that a sample is in a batch of :func:`sampled_order`, ``float64[K]``."""
    return np.minimum(1.0, batch_size / sizes)


def num_steps(
    sizes: np.ndarray, batch_size: int, epochs: int = 1, steps: int | None = None, smallest: int = 1
) -> np.ndarray:
    """Return the number of batches that :func:`epoch_order` gives each client, ``int64[K]``."""
    last_batch = sizes % batch_size
    left_out = (last_batch > 0) & (last_batch < smallest) & (sizes > batch_size)
    per_epoch = -(-sizes // batch_size) - left_out
    return per_epoch * epochs if steps is None else np.full_like(per_epoch, steps)


def share_of_steps(steps: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return a share ``float64[K]`` of ``int64[K]`` steps, rounded down; at least one step of those that have any."""
    return np.minimum(np.maximum((shares * steps).astype(np.int64), 1), steps)


def _shuffled_epochs(keys: np.ndarray, epochs: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle each client's samples for each of its ``epochs[k]``.

    Returns
    -------
    A row for each epoch, client after client, which begins with its samples, ``int64[sum of epochs, largest size]``;
    and the number of each client's first row, ``int64[K]``.
    """
    first_row = epochs.cumsum() - epochs
    client = np.arange(len(keys)).repeat(epochs)
    epoch = np.arange(len(client)) - first_row[client]
    row_keys = rng.mix(keys[client] + epoch.astype(np.uint64))
    return rng.permutations(row_keys, int(sizes.max()), sizes[client]), first_row
