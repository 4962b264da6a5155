"""A bootstrap over two levels: seeds, and the clients of each seed.

Resampling seeds and then clients within each drawn seed is the two-stage bootstrap of nested data (Davison and Hinkley
1997, section 3.8). Where the clients are the same in every seed, such as writers, seeds and clients cross: one draw of
clients then counts for all seeds (Owen 2007, "The pigeonhole bootstrap"). Libraries resample one level only
(``scipy.stats.bootstrap``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypfl.common import rng

DRAWS = 4000

_MANY_CLIENTS = 100
"""With more clients than this, their resampled mean is drawn from its limit, a normal distribution, at no cost."""


def draws(values: Sequence[np.ndarray], same_clients: bool) -> np.ndarray:
    """Return resampled means over seeds of means over clients, ``float64[DRAWS]``; equal values give equal draws.

    Parameters
    ----------
    values : ``float64[clients]`` for each seed; a single value is not resampled.
    same_clients : whether the clients are the same in every seed; all seeds then have as many.
    """
    generator = rng.generator(0, "bootstrap")
    seeds = generator.integers(len(values), size=(DRAWS, len(values)))
    if same_clients:
        return _crossed(np.stack(values), seeds, generator)

    means = np.empty(seeds.shape)
    for seed, clients in enumerate(values):
        places = seeds == seed
        means[places] = _resampled_means(clients, places.sum(), generator)
    return means.mean(axis=1)


def _resampled_means(clients: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` means of clients that are drawn with replacement."""
    if len(clients) > _MANY_CLIENTS:
        deviation = clients.std() / np.sqrt(len(clients))
        return clients.mean() + deviation * generator.standard_normal(count)

    resampled = clients[generator.integers(len(clients), size=(count, len(clients)))]
    return resampled.mean(axis=1)


def _crossed(values: np.ndarray, drawn_seeds: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draws of seeds crossed with draws of clients.

    `values` : ``[seeds, clients]``. `drawn_seeds` : the seeds of each draw, ``[DRAWS, seeds]``.
    """
    seeds, clients = values.shape
    # The share of each seed in each draw: [DRAWS, seeds].
    weights = (drawn_seeds[:, :, None] == np.arange(seeds)).mean(axis=1)

    if clients > _MANY_CLIENTS:
        covariance = np.cov(values, bias=True).reshape(seeds, seeds)
        deviation = np.sqrt(np.einsum("ds,st,dt->d", weights, covariance, weights).clip(0) / clients)
        return weights @ values.mean(axis=1) + deviation * generator.standard_normal(DRAWS)

    drawn_clients = generator.integers(clients, size=(DRAWS, clients))
    means = np.stack([seed[drawn_clients].mean(axis=1) for seed in values], axis=1)
    return (weights * means).sum(axis=1)
