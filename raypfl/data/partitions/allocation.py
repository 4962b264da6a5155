"""The arithmetic of allocation: cut totals into whole parts, fit counts to margins, draw owners."""

from __future__ import annotations

import numpy as np

# Replaces a weight of zero, so that counts with the given margins always exist.
_TINY = 1e-30
# Most iterations of Sinkhorn's fit, which ends earlier once no class is off by a hundredth of a sample.
_MAX_FITS = 200
# A share this close to a whole number counts as one.
_CLOSE = 1e-9


def apportion(total: np.ndarray | int, weights: np.ndarray) -> np.ndarray:
    """Cut totals into whole parts in proportion to weights; each part is rounded up or down.

    Parameters
    ----------
    total : ``int[...]``
    weights : ``float[..., K]``, not negative, and not all zero along the last axis.

    Returns
    -------
    ``int64[..., K]``, which adds up to `total` along the last axis.
    """
    # Whole parts first: rounding the edges 0.5 and 1.5 to even numbers would turn the share of 1 between them into 2.
    parts, remainder, missing = _whole_parts(total, weights)
    edges = np.cumsum(np.where(remainder > _CLOSE, remainder, 0), axis=-1)
    cuts = np.rint(_ratio(edges, edges[..., -1:]) * missing[..., None]).astype(np.int64)
    return parts + np.diff(cuts, axis=-1, prepend=0)


def largest_remainders(total: np.ndarray, weights: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Cut totals as `apportion` does, but round up the parts with the largest remainders (Hamilton 1792).

    Ties are broken at random. Shares near 1 become 1 each, while `apportion` may turn them into 2 and 0.

    Parameters
    ----------
    total : ``int[R]``
    weights : ``float[R, K]``, not negative, and not all zero along the last axis.

    Returns
    -------
    ``int64[R, K]``
    """
    parts, remainder, missing = _whole_parts(total, weights)
    closeness = remainder + _CLOSE * draws.random(remainder.shape)
    rank = np.empty(remainder.shape, dtype=np.int64)
    np.put_along_axis(rank, np.argsort(-closeness, axis=1), np.arange(remainder.shape[1])[None], axis=1)
    return parts + (rank < missing[:, None])


def fit_margins(weights: np.ndarray, totals: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return counts with the given row and column sums, as close to `weights` as these allow.

    The real-valued table is the one nearest to `weights` in relative entropy (Sinkhorn 1967; Deming and Stephan 1940).
    It is rounded class by class; what a client's rounded parts lack or exceed is carried over to its next class.

    Parameters
    ----------
    weights : ``float[num_classes, clients]``, not negative.
    totals : ``int64[num_classes]``, the sums of the rows.
    sizes : ``int64[clients]``, the sums of the columns; both have the same total.

    Returns
    -------
    ``int64[num_classes, clients]``
    """
    table = np.maximum(weights, _TINY)
    for _ in range(_MAX_FITS):
        table *= _ratio(totals, table.sum(axis=1))[:, None]
        table *= _ratio(sizes, table.sum(axis=0))
        if np.abs(table.sum(axis=1) - totals).max() < 0.01:
            break

    counts = np.zeros(table.shape, dtype=np.int64)
    # What each client should have had of all classes so far; `allocated` is what it got.
    expected = np.zeros(len(sizes))
    allocated = np.zeros(len(sizes), dtype=np.int64)
    for label, total in enumerate(totals):
        expected += table[label]
        room = sizes - allocated
        shares = np.clip(expected - allocated, 0, room)

        # Clients that are full cannot take their shares, so that those with room take the remainder.
        if shares.sum() < total:
            shares += (room - shares) * (total - shares.sum()) / (room - shares).sum()
        if total:
            counts[label] = apportion(total, shares)
        allocated += counts[label]
    return counts


def equal_sizes(samples: int, clients: int) -> np.ndarray:
    """Return sizes of the clients, ``int64[clients]``, that add up to `samples` and differ by at most one."""
    return samples // clients + (np.arange(clients) < samples % clients)


def draw_owners(labels: np.ndarray, counts: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Draw owners such that client k gets ``counts[c, k]`` of the samples of class c.

    Parameters
    ----------
    labels : ``int64[N]``
    counts : ``int64[num_classes, clients]``; row c adds up to the number of samples of class c.

    Returns
    -------
    ``int64[N]``
    """
    shuffled = draws.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]

    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_class] = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
    return owner


def raise_to_minimum(owner: np.ndarray, clients: int, minimum: int, draws: np.random.Generator) -> np.ndarray:
    """Move random samples from the largest clients to those with fewer than `minimum`.

    Parameters
    ----------
    owner : ``int64[N]``, with N at least ``clients * minimum``.

    Returns
    -------
    ``int64[N]``; `owner` itself if no client has too few.
    """
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return owner

    rank = rank_within(owner, draws)
    moved = np.flatnonzero(rank >= _highest_level(sizes, missing.sum()))[: missing.sum()]
    raised = owner.copy()
    raised[moved] = np.repeat(np.arange(clients), missing)
    return raised


def rank_within(group: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Number the members of each group 0, 1, 2, ... in random order: ``int64[N]`` for ``int64[N]`` group ids."""
    shuffled = draws.permutation(len(group))
    order = shuffled[np.argsort(group[shuffled], kind="stable")]

    sizes = np.bincount(group)
    group_starts = np.cumsum(sizes) - sizes
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - np.repeat(group_starts, sizes)
    return rank


def _whole_parts(total: np.ndarray | int, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the whole parts of the shares of `total`, each share's remainder, and what the parts lack of `total`."""
    shares = weights / weights.sum(axis=-1, keepdims=True, dtype=np.float64) * np.asarray(total)[..., None]
    parts = np.floor(shares + _CLOSE).astype(np.int64)
    missing = np.asarray(total) - parts.sum(axis=-1)
    return parts, shares - parts, missing


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return ``numerator / denominator``; 0 where the denominator is 0."""
    zeros = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape))
    return np.divide(numerator, denominator, out=zeros, where=denominator > 0)


def _highest_level(sizes: np.ndarray, needed: int) -> int:
    """Return the highest level such that clients hold at least `needed` samples above it, by bisection."""
    low = 0
    high = int(sizes.max())
    while low < high:
        middle = (low + high + 1) // 2
        above = np.maximum(sizes - middle, 0).sum()
        if above >= needed:
            low = middle
        else:
            high = middle - 1
    return low
