"""Robust aggregation: what the server makes of the clients' messages in place of their weighted mean."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common.component import Component
from raypfl.common.errors import ConfigError
from raypfl.common.limits import CHANCE, COUNT, POSITIVE, Limit
from raypfl.common.registry import Registry

AGGREGATIONS = Registry("aggregation")

BELOW_HALF = Limit("at least 0 and below 0.5", lambda v: 0 <= v < 0.5)

_COLUMNS = 2**12
"""Columns of messages that are computed at once: copies of those of 100 clients fit the cache."""


class Aggregation(Component, ABC):
    """Base class of rules in place of the mean. Its fields are options of ``aggregation``.

    All clients count equally: a weight is what a client says of itself.

    Attributes
    ----------
    bounds_updates : whether the rule looks at `before`, and not at the differences between messages alone.
    """

    section: ClassVar[str] = "aggregation."
    bounds_updates: ClassVar[bool] = False

    @abstractmethod
    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        """Return the aggregate, in place of the mean, ``[P]``.

        Parameters
        ----------
        rows : ``[n, P]``, the messages of the round's clients, at least one.
        before : ``[P]``, what all clients were sent under the message's name; zeros if nothing.
        """

    def check(self, clients: int) -> None:
        """Raise a ConfigError if the rule makes no sense for cohorts of so many clients; called before the run."""


@AGGREGATIONS.register("median")
class Median(Aggregation):
    """The median of each coordinate (Yin et al. 2018); for an even number of clients, the mean of the middle two."""

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        return _mean_of_middle(rows, (len(rows) - 1) // 2)


@AGGREGATIONS.register("trimmed_mean")
class TrimmedMean(Aggregation):
    """The mean of each coordinate without the largest and the smallest values (Yin et al. 2018).

    Attributes
    ----------
    fraction : the share of values that is left out at either end, rounded down.
    """

    fraction: Annotated[float, BELOW_HALF] = 0.2

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        return _mean_of_middle(rows, _share(self.fraction, len(rows)))


@AGGREGATIONS.register("krum")
class Krum(Aggregation):
    """The message that is nearest to its nearest neighbours, or the mean of several such (Blanchard et al. 2017).

    The score of a message is the sum of the squared distances to its ``n - f - 2`` nearest others, at least one, where
    f of the n clients are taken to be malicious.

    Attributes
    ----------
    fraction : the share of malicious clients that is expected; f is rounded down.
    select : how many messages with the lowest scores are averaged. 1: Krum; more: Multi-Krum.
    """

    fraction: Annotated[float, BELOW_HALF] = 0.2
    select: Annotated[int, COUNT] = 1

    def check(self, clients: int) -> None:
        if self.select > clients:
            raise ConfigError(
                f"aggregation.select is {self.select}, but a cohort has {clients} clients; average fewer, since "
                "all of them would be the mean."
            )

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        if len(rows) == 1:
            return rows[0]

        distances = squared_distances(rows)
        distances.fill_diagonal_(math.inf)
        neighbours = max(1, len(rows) - _share(self.fraction, len(rows)) - 2)
        scores = distances.sort(1).values[:, :neighbours].sum(1)
        # Of equal scores, the client with the lower number is first.
        best = scores.sort(stable=True).indices[: self.select]
        return rows[best.sort().values].mean(0)


@AGGREGATIONS.register("geometric_median")
class GeometricMedian(Aggregation):
    """The point with the smallest sum of distances to the messages (RFA, Pillutla et al. 2022).

    The smoothed Weiszfeld algorithm approaches it, beginning at the messages' mean.

    Attributes
    ----------
    steps : number of steps.
    smoothing : smallest distance that counts, so that none is divided by zero.
    """

    steps: Annotated[int, COUNT] = 3
    smoothing: Annotated[float, POSITIVE] = 1e-6

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        centre = rows.mean(0)
        for _ in range(self.steps):
            inverse = 1.0 / distances_to(centre, rows).clamp_min(self.smoothing)
            weights = inverse / inverse.sum()
            centre = weights.to(rows.dtype) @ rows
        return centre


@AGGREGATIONS.register("clipping")
class Clipping(Aggregation):
    """The mean of updates of bounded norm (Sun et al. 2019) or, in several steps, centred clipping.

    One step moves the centre v, which begins at what the clients were sent, by the mean of
    ``(x - v) min(1, radius / ‖x - v‖)`` over their messages x (Karimireddy et al. 2021).

    Attributes
    ----------
    radius : largest norm of an update that counts in full.
    steps : number of steps.
    """

    bounds_updates: ClassVar[bool] = True

    radius: Annotated[float, POSITIVE] = 1.0
    steps: Annotated[int, COUNT] = 1

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        centre = before
        for _ in range(self.steps):
            factors = (self.radius / distances_to(centre, rows)).clamp_max(1.0).to(rows.dtype)
            centre = centre + factors @ (rows - centre) / len(rows)
        return centre


@AGGREGATIONS.register("rlr")
class RobustLearningRate(Aggregation):
    """The mean update, negated in coordinates in which too few clients agree on its sign (Özdayi et al. 2021).

    Attributes
    ----------
    threshold : the smallest ``|sum of the signs|`` with which a coordinate's mean counts as it is, as a share of the
        clients. It should be above the share of malicious clients.
    """

    bounds_updates: ClassVar[bool] = True

    threshold: Annotated[float, CHANCE] = 0.2

    def combine(self, rows: Tensor, before: Tensor) -> Tensor:
        # Rounding may put the share just above a whole number, and the sum of signs is one.
        fewest = self.threshold * len(rows) - 1e-9
        parts = []
        for columns, start in zip(rows.split(_COLUMNS, dim=1), before.split(_COLUMNS), strict=True):
            updates = columns - start
            agrees = updates.sign().sum(0).abs() >= fewest
            update = updates.mean(0)
            parts.append(start + torch.where(agrees, update, -update))
        return torch.cat(parts)


def squared_distances(rows: Tensor) -> Tensor:
    """Return the squared Euclidean distances between all rows, ``float64[n, n]``."""
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for columns in rows.split(_COLUMNS, dim=1):
        # Without centring, rounding of what the rows have in common would hide small differences.
        centred = columns.double() - columns.double().mean(0)
        products += centred @ centred.T

    norms = products.diagonal()
    return (norms[:, None] + norms - 2 * products).clamp_min(0)


def distances_to(centre: Tensor, rows: Tensor) -> Tensor:
    """Return the Euclidean distances of rows ``[n, P]`` to a centre ``[P]``, ``float64[n]``."""
    squared = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for columns, part in zip(rows.split(_COLUMNS, dim=1), centre.split(_COLUMNS), strict=True):
        squared += (columns.double() - part.double()).square().sum(1)
    return squared.sqrt()


def _share(fraction: float, clients: int) -> int:
    """Return a share of the clients, rounded down; 0.3 of 10 are 3, although the product is a little less."""
    return math.floor(fraction * clients + 1e-9)


def _mean_of_middle(rows: Tensor, left_out: int) -> Tensor:
    """Return the mean of each coordinate ``[P]`` without its `left_out` smallest and largest values."""
    means = []
    for columns in rows.split(_COLUMNS, dim=1):
        means.append(_sorted(columns)[left_out : len(rows) - left_out].mean(0))
    return torch.cat(means)


def _sorted(rows: Tensor) -> Tensor:
    """Return each column's values in ascending order."""
    if rows.device.type != "cpu":
        return rows.sort(0).values
    # torch takes eight times as long.
    return torch.from_numpy(np.sort(rows.numpy(), axis=0))
