"""Partitions whose clients differ in how much they hold, and in nothing else."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from raypfl.common import rng
from raypfl.data.allocation import apportion, top_up
from raypfl.data.partitions import PARTITIONS, Partition, Traits, require, require_enough


@dataclass(frozen=True, kw_only=True)
class QuantitySkew(Partition):
    """Samples at random, in numbers in proportion to weights that a subclass draws.

    Attributes
    ----------
    min_samples : of every client; the largest clients give samples to those short.
    """

    min_samples: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require("min_samples", self.min_samples, self.min_samples >= 1, "at least 1")

    @abstractmethod
    def weights(self, draws: np.random.Generator) -> np.ndarray:
        """``float[clients]``, not negative, to which sizes are in proportion."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        require_enough(len(samples), self.clients, self.min_samples)
        draws = rng.generator(seed, "partition")
        sizes = apportion(len(samples), self.weights(draws))
        owner = draws.permutation(np.repeat(np.arange(self.clients), sizes))
        return top_up(owner, self.clients, self.min_samples, draws)


@PARTITIONS.register("lognormal")
@dataclass(frozen=True, kw_only=True)
class LogNormal(QuantitySkew):
    """Samples at random, in numbers drawn from a log-normal distribution.

    Attributes
    ----------
    sigma : standard deviation of the logarithm of a client's number of samples; 0: all equal.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("sigma", self.sigma, self.sigma >= 0, "at least 0")

    def weights(self, draws: np.random.Generator) -> np.ndarray:
        return draws.lognormal(0.0, self.sigma, size=self.clients)


@PARTITIONS.register("power_law")
@dataclass(frozen=True, kw_only=True)
class PowerLaw(QuantitySkew):
    """Samples at random, the r-th largest client's number in proportion to ``r ** -exponent`` (cf. Li et al. 2020).

    Attributes
    ----------
    exponent : of the law; 0: all equal.
    """

    exponent: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require("exponent", self.exponent, self.exponent >= 0, "at least 0")

    def weights(self, draws: np.random.Generator) -> np.ndarray:
        return (1.0 + draws.permutation(self.clients)) ** -self.exponent
