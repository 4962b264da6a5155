"""What malicious clients do: they train on wrong labels, or send something else than what they trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.component import Component
from raypfl.common.errors import ConfigError
from raypfl.common.limits import FINITE, INSIDE, POSITIVE
from raypfl.common.registry import Registry
from raypfl.common.user_code import refuse_result
from raypfl.federation.robustness.rules import squared_distances
from raypfl.learning.objectives import Metric

ATTACKS = Registry("attack")


@dataclass(frozen=True)
class Updates:
    """One message of a round's clients, as changes of what they were sent under its name.

    Attributes
    ----------
    honest : ``[h, P]``, those of the honest clients; h may be 0.
    malicious : ``[f, P]``, those that the malicious clients would send if they were honest.
    generator : a generator on the CPU for the attack's draws.
    """

    honest: Tensor
    malicious: Tensor
    generator: torch.Generator

    @property
    def num_clients(self) -> int:
        """The number of clients, honest and malicious."""
        return len(self.honest) + len(self.malicious)


class Attack(Component, ABC):
    """Base class of attacks. Its fields are options of ``attack``.

    Attributes
    ----------
    fraction : the share of the trained clients that are malicious, in all rounds; rounded, at least one.
    """

    section: ClassVar[str] = "attack."

    fraction: Annotated[float, INSIDE] = 0.2

    def malicious(self, clients: np.ndarray, seed: int) -> np.ndarray:
        """Return which of the clients that are trained, ``int64[n]``, are malicious: their numbers, ascending.

        Raises
        ------
        ConfigError : if no client would be honest.
        """
        count = max(1, round(self.fraction * len(clients)))
        if count >= len(clients):
            raise ConfigError(
                f"attack.fraction is {self.fraction}, with which all of the {len(clients)} trained clients would be "
                "malicious; choose a smaller one."
            )
        order = np.argsort(rng.keys(seed, "malicious", 0, clients), kind="stable")
        return np.sort(clients[order[:count]])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The metrics of the attack's success."""
        return ()

    @property
    def on_messages(self) -> UpdateAttack | None:
        """What malicious clients do to their messages; None: they send what they trained."""
        return None


class LabelAttack(Attack):
    """Base class of attacks on the labels of malicious clients' training samples, from 0 to ``num_classes - 1``."""

    @abstractmethod
    def poison(self, labels: np.ndarray, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        """Return the labels ``int64[n]`` on which malicious clients train, in place of the true ones."""


class UpdateAttack(Attack):
    """Base class of attacks on messages: malicious clients train as honest ones do, and then send something else.

    Every message of floating-point numbers is attacked, each by itself, before the server makes a mean of it.
    """

    @property
    def on_messages(self) -> UpdateAttack:
        return self

    @abstractmethod
    def forge(self, updates: Updates) -> Tensor:
        """Return the updates that the malicious clients send, ``[f, P]``."""


@ATTACKS.register("label_flip")
class LabelFlip(LabelAttack):
    """Class y becomes the class ``C - 1 - y`` of C classes."""

    def poison(self, labels: np.ndarray, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        return num_classes - 1 - labels


@ATTACKS.register("random_labels")
class RandomLabels(LabelAttack):
    """Every label becomes one of all classes, drawn uniformly once."""

    def poison(self, labels: np.ndarray, num_classes: int, generator: np.random.Generator) -> np.ndarray:
        return generator.integers(num_classes, size=labels.shape, dtype=labels.dtype)


@ATTACKS.register("sign_flip")
class SignFlip(UpdateAttack):
    """A client sends the negative of its update.

    Attributes
    ----------
    scale : the factor of the negative.
    """

    scale: Annotated[float, POSITIVE] = 1.0

    def forge(self, updates: Updates) -> Tensor:
        return -self.scale * updates.malicious


@ATTACKS.register("gaussian")
class Gaussian(UpdateAttack):
    """A client sends independent normal numbers in place of its update.

    Attributes
    ----------
    std : their standard deviation; None: that of the entries of the update that it replaces.
    """

    std: Annotated[float | None, POSITIVE] = None

    def forge(self, updates: Updates) -> Tensor:
        normal = torch.randn(updates.malicious.shape, generator=updates.generator, dtype=updates.malicious.dtype)
        std = updates.malicious.std(1, unbiased=False, keepdim=True) if self.std is None else self.std
        return normal.to(updates.malicious.device) * std


@ATTACKS.register("boost")
class Boost(UpdateAttack):
    """A client multiplies its update, so that it decides the mean (Bagdasaryan et al. 2020, model replacement).

    Attributes
    ----------
    factor : the factor; None: the number of clients in the round.
    """

    factor: Annotated[float | None, FINITE] = None

    def forge(self, updates: Updates) -> Tensor:
        factor = updates.num_clients if self.factor is None else self.factor
        return factor * updates.malicious


@ATTACKS.register("ipm")
class InnerProduct(UpdateAttack):
    """All malicious clients send the negative of the honest clients' mean update (Xie et al. 2020).

    This is inner product manipulation. They know all updates; in a round without honest clients, they send their own.

    Attributes
    ----------
    scale : the factor of the negative.
    """

    scale: Annotated[float, POSITIVE] = 0.5

    def forge(self, updates: Updates) -> Tensor:
        if not len(updates.honest):
            return updates.malicious
        return (-self.scale * updates.honest.mean(0)).expand_as(updates.malicious)


@ATTACKS.register("alie")
class LittleIsEnough(UpdateAttack):
    """All malicious clients send the honest mean plus `z` standard deviations in each coordinate (Baruch et al. 2019).

    They know all updates; in a round without honest clients, they send their own.

    Attributes
    ----------
    z : the number of standard deviations over the honest clients (those of the population, not of a sample).
    """

    z: Annotated[float, FINITE] = 1.5

    def forge(self, updates: Updates) -> Tensor:
        if not len(updates.honest):
            return updates.malicious
        forged = updates.honest.mean(0) + self.z * updates.honest.std(0, unbiased=False)
        return forged.expand_as(updates.malicious)


@ATTACKS.register("min_max")
class MinMax(UpdateAttack):
    """All malicious clients go as far from the honest mean as honest clients are apart (Shejwalkar, Houmansadr 2021).

    They send the mean less a multiple of the standard deviation in each coordinate: the largest with which they are no
    farther from any honest update than two honest ones are from each other. They know all updates; in a round without
    honest clients, they send their own.
    """

    def forge(self, updates: Updates) -> Tensor:
        if not len(updates.honest):
            return updates.malicious

        # All in float64, in which the two sides of the bound are compared.
        honest = updates.honest.double()
        mean = honest.mean(0)
        std = honest.std(0, unbiased=False)
        bound = squared_distances(honest).max()

        # |mean - gamma std - x|^2 <= bound for every x: the smallest of the quadratic equations' larger roots.
        to_mean = mean - honest
        a = std.square().sum()
        if a == 0:
            return mean.to(updates.malicious.dtype).expand_as(updates.malicious)
        half_b = to_mean @ std
        c = to_mean.square().sum(1) - bound
        roots = (half_b + (half_b.square() - a * c).clamp_min(0).sqrt()) / a
        forged = mean - roots.min() * std
        return forged.to(updates.malicious.dtype).expand_as(updates.malicious)


def poisoned_labels(
    attack: LabelAttack, labels: np.ndarray, samples: np.ndarray, num_classes: int, seed: int
) -> np.ndarray:
    """Return a copy of the labels ``int64[N]`` of a data set with those of the malicious clients' `samples` changed."""
    poisoned = np.array(labels)
    result = attack.poison(poisoned[samples], num_classes, rng.generator(seed, "poisoned labels"))
    if np.shape(result) != samples.shape:
        refuse_result(attack.poison, result, f"a label for each sample of the malicious clients: {list(samples.shape)}")
    poisoned[samples] = result
    return poisoned
