"""Bootstrap draws of several methods at once, over seeds and their clients; see :mod:`.pairing.bootstrap`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypfl.common import rng
from raypfl.results.pairing.bootstrap import DRAWS


def joint_draws(values: Sequence[np.ndarray], weights: Sequence[np.ndarray], same_clients: bool) -> np.ndarray:
    """Return resampled means of several methods, ``float64[DRAWS, methods]``, with the same draws for all methods.

    Parameters
    ----------
    values, weights : ``float64[clients, methods]`` for each seed; a draw's mean over clients is a weighted one.
    same_clients : whether the clients are the same in every seed; all seeds then have as many.
    """
    generator = rng.generator(0, "bootstrap")
    num_seeds = len(values)
    times = generator.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=DRAWS)
    terms = []
    for seed_values, seed_weights in zip(values, weights, strict=True):
        terms.append((_in_groups(seed_values * seed_weights), _in_groups(seed_weights)))
    total = np.zeros((DRAWS, values[0].shape[1]))

    # If a client's loss is infinite, draws without the client are 0 * inf = NaN, which ranks last, too.
    with np.errstate(invalid="ignore"):
        if same_clients:
            counts = _drawn_counts(len(terms[0][0]), DRAWS, generator)
            for seed, (sums, sizes) in enumerate(terms):
                total += times[:, [seed]] * (counts @ sums) / (counts @ sizes)
        else:
            for seed, (sums, sizes) in enumerate(terms):
                # A seed that is drawn twice gets two draws of its clients.
                for repeat in range(times[:, seed].max()):
                    has_seed = times[:, seed] > repeat
                    counts = _drawn_counts(len(sums), int(has_seed.sum()), generator)
                    total[has_seed] += (counts @ sums) / (counts @ sizes)
    return total / num_seeds


_MOST_GROUPS = 500
"""More clients than this are resampled in as many groups of every 500th client, whose means vary as they do."""


def _in_groups(rows: np.ndarray) -> np.ndarray:
    """Return sums ``[groups, methods]`` over groups of the rows ``[clients, methods]``."""
    if len(rows) <= _MOST_GROUPS:
        return rows
    sums = np.zeros((_MOST_GROUPS, rows.shape[1]))
    np.add.at(sums, np.arange(len(rows)) % _MOST_GROUPS, rows)
    return sums


def _drawn_counts(clients: int, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return how often each client is in each draw of as many clients, ``float64[draws, clients]``."""
    return generator.multinomial(clients, np.full(clients, 1 / clients), size=draws).astype(float)
