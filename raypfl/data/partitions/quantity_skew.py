"""Partitions whose clients differ only in how many samples they hold."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from raypfl.common import rng
from raypfl.data.partitions.allocation import apportion, raise_to_minimum
from raypfl.data.partitions.partition import PARTITIONS, Partition, Traits, require, require_enough


class QuantitySkew(Partition):
    """Random samples; sizes are proportional to weights that a subclass draws.

    Attributes
    ----------
    min_samples : smallest size of a client; the largest clients give samples to those with fewer.
    """

    least: ClassVar = {"clients": 1, "min_samples": 1}

    min_samples: int = 10

    @abstractmethod
    def weights(self, draws: np.random.Generator) -> np.ndarray:
        """Draw the weights ``float[clients]``, not negative, to which sizes are proportional."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        require_enough(len(samples), self.clients, self.min_samples)
        draws = rng.generator(seed, "partition")
        sizes = apportion(len(samples), self.weights(draws))
        owner = draws.permutation(np.repeat(np.arange(self.clients), sizes))
        return raise_to_minimum(owner, self.clients, self.min_samples, draws)


@PARTITIONS.register("lognormal")
class LogNormal(QuantitySkew):
    """Random samples; sizes are drawn from a log-normal distribution.

    Attributes
    ----------
    sigma : standard deviation of the logarithm of a client's number of samples; 0: all equal.
    """

    least: ClassVar = {"clients": 1, "min_samples": 1, "sigma": 0}

    sigma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Sizes in larger proportions are no floating-point numbers.
        require("sigma", self.sigma, self.sigma <= 100, "at most 100")

    def weights(self, draws: np.random.Generator) -> np.ndarray:
        return draws.lognormal(0.0, self.sigma, size=self.clients)


@PARTITIONS.register("power_law")
class PowerLaw(QuantitySkew):
    """Random samples; the r-th largest client's size is proportional to ``r ** -exponent`` (cf. Li et al. 2020).

    Attributes
    ----------
    exponent : exponent of the law; 0: all equal.
    """

    least: ClassVar = {"clients": 1, "min_samples": 1, "exponent": 0}

    exponent: float = 1.0

    def weights(self, draws: np.random.Generator) -> np.ndarray:
        return (1.0 + draws.permutation(self.clients)) ** -self.exponent
