"""Named models of availability: days and nights, and those of FLGo, which may depend on what clients hold.

A model of FLGo gives each client a chance p of being reachable. FLGo 0.4 documents SLN, MDF and LDF otherwise than it
computes them; the formulas stated here are meant, which follow its code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from raypfl.common import rng
from raypfl.common.component import Component
from raypfl.common.errors import ConfigError, IncompleteError
from raypfl.common.limits import BELOW_ONE, CHANCE, COUNT, FROM_ZERO, INSIDE, Limit
from raypfl.common.registry import Registry
from raypfl.devices.availability import Always, Availability, Chances, Spans

AVAILABILITY_MODELS = Registry("availability model", plural="availability")

HOUR = 3600.0
DAY = 24 * HOUR

HOURS = Limit("above 0 and at most 24", lambda v: 0 < v <= 24)


@dataclass(frozen=True)
class Holdings:
    """What an availability model may know of the clients.

    Attributes
    ----------
    num_samples : the training samples of each client, ``int64[num_clients]``.
    labels_held : a function that returns which labels each client's training samples have, ``bool[num_clients, Y]``.
    """

    seed: int
    num_samples: np.ndarray
    labels_held: Callable[[], np.ndarray]

    @property
    def num_clients(self) -> int:
        return len(self.num_samples)


class AvailabilityModel(Component):
    """Base class of models of availability. Its fields are options of ``devices.availability``.

    Attributes
    ----------
    in_seconds : whether its times are seconds, so that it needs ``devices.hardware``.
    """

    section: ClassVar[str] = "devices.availability."
    in_seconds: ClassVar[bool] = False

    def files(self) -> tuple[Path, ...]:
        """Return the files that it depends on."""
        return ()

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        """Return when each client can be reached.

        Parameters
        ----------
        unit : the seconds of an hour or, if rounds are all the time there is, 1 for a round.
        """
        raise IncompleteError(f"{type(self).__name__} is not a model yet: define availability(self, holdings, unit).")


class ChanceModel(AvailabilityModel):
    """A model that gives each client a chance, drawn anew every hour, or every round if devices have no hardware."""

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        return Chances(self.chances(holdings), unit, holdings.seed)

    def chances(self, holdings: Holdings) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """Return ``chances(clients, draws) -> float64[n]``: the chance of each client in the draw of that number."""
        constant = self.constant(holdings)
        return lambda clients, draws: constant[clients]

    def constant(self, holdings: Holdings) -> np.ndarray:
        """Return a chance for each client that stays the same, ``float64[num_clients]``."""
        raise IncompleteError(f"{type(self).__name__} gives no chances: define constant(self, holdings).")


@AVAILABILITY_MODELS.register("uniform")
class UniformChances(ChanceModel):
    """Each client has a fixed chance between `low` and `high`.

    Attributes
    ----------
    low, high : the bounds of the chances, which are drawn uniformly.
    """

    low: Annotated[float, CHANCE]
    high: Annotated[float, CHANCE]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"devices.availability.low is {self.low}, above high, {self.high}; give low <= high.")

    def chances(self, holdings: Holdings) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        seed = holdings.seed

        # Drawn for the given clients only: of a million clients, a run looks at a cohort.
        def of_clients(clients: np.ndarray, draws: np.ndarray) -> np.ndarray:
            fractions = rng.uniform(rng.keys(seed, "availability", 0, clients))
            return self.low + (self.high - self.low) * fractions

        return of_clients


@AVAILABILITY_MODELS.register("diurnal")
class Diurnal(AvailabilityModel):
    """Each client can be reached at the same hours of every day, such as those when it is charged at night.

    Time begins at midnight.

    Attributes
    ----------
    hours : the hours of a day for which a client can be reached.
    start : the hour at which they begin, on average.
    spread : standard deviation of that hour between clients; 12 or more spreads them over the day.
    """

    in_seconds: ClassVar[bool] = True

    hours: Annotated[float, HOURS] = 8.0
    start: Annotated[float, FROM_ZERO] = 22.0
    spread: Annotated[float, FROM_ZERO] = 3.0

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        clients = np.arange(holdings.num_clients)
        starts = np.mod(self.start + self.spread * rng.normal(holdings.seed, "day", clients), 24) * HOUR
        # A start a moment before midnight may round to 24 hours.
        starts[starts >= DAY] = 0.0
        return Spans(clients, starts, starts + self.hours * HOUR, DAY, holdings.num_clients)


@AVAILABILITY_MODELS.register("idl")
class Ideal(AvailabilityModel):
    """Every client can always be reached (IDL of FLGo)."""

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        return Always()


@AVAILABILITY_MODELS.register("homo")
class Homogeneous(ChanceModel):
    """p = 1 - beta for every client (HOMO of FLGo).

    Attributes
    ----------
    beta : the chance of not being reachable.
    """

    beta: Annotated[float, BELOW_ONE] = 0.2

    def constant(self, holdings: Holdings) -> np.ndarray:
        return np.full(holdings.num_clients, 1 - self.beta)


@AVAILABILITY_MODELS.register("ymf")
class SmallestLabelFirst(ChanceModel):
    """p = beta * min(Y_i) / max(Y) + 1 - beta, with Y_i the labels that client i holds (YMF of FLGo).

    Attributes
    ----------
    beta : how much the chance depends on the smallest label.
    """

    beta: Annotated[float, CHANCE] = 0.1

    def constant(self, holdings: Holdings) -> np.ndarray:
        held = holdings.labels_held()
        smallest = np.argmax(held, axis=1)
        largest_of_all = np.flatnonzero(held.any(axis=0))[-1]
        return self.beta * smallest / max(largest_of_all, 1) + 1 - self.beta


@AVAILABILITY_MODELS.register("yff")
class ManyLabelsFirst(ChanceModel):
    """p = beta * |Y_i| / |Y| + 1 - beta, with Y_i the labels that client i holds (YFF of FLGo).

    Attributes
    ----------
    beta : how much the chance depends on the number of labels.
    """

    beta: Annotated[float, CHANCE] = 0.2

    def constant(self, holdings: Holdings) -> np.ndarray:
        held = holdings.labels_held()
        return self.beta * held.sum(axis=1) / held.any(axis=0).sum() + 1 - self.beta


@AVAILABILITY_MODELS.register("mdf")
class MoreDataFirst(ChanceModel):
    """p = n_i^beta / max n^beta, with n_i the samples of client i (MDF of FLGo).

    Attributes
    ----------
    beta : the exponent; at FLGo's default, all chances are nearly 1.
    """

    beta: Annotated[float, FROM_ZERO] = 1e-4

    def constant(self, holdings: Holdings) -> np.ndarray:
        sizes = np.maximum(holdings.num_samples, 1)
        return (sizes / sizes.max()) ** self.beta


@AVAILABILITY_MODELS.register("ldf")
class LessDataFirst(ChanceModel):
    """p = n_i^-beta / max n^-beta, with n_i the samples of client i (LDF of FLGo).

    Attributes
    ----------
    beta : the exponent.
    """

    beta: Annotated[float, FROM_ZERO] = 0.5

    def constant(self, holdings: Holdings) -> np.ndarray:
        sizes = np.maximum(holdings.num_samples, 1)
        return (sizes.min() / sizes) ** self.beta


@AVAILABILITY_MODELS.register("ln")
class LogNormalChances(ChanceModel):
    """p = c_i / max c, with c_i log-normal of deviation -ln(1 - beta) (LN of FLGo).

    Attributes
    ----------
    beta : how much chances differ.
    """

    beta: Annotated[float, INSIDE] = 0.1

    def constant(self, holdings: Holdings) -> np.ndarray:
        clients = np.arange(holdings.num_clients)
        weights = np.exp(-np.log(1 - self.beta) * rng.normal(holdings.seed, "chances", clients))
        return weights / weights.max()


@AVAILABILITY_MODELS.register("sln")
class SinusoidalChances(LogNormalChances):
    """p_i(t) = (0.4 sin(2 pi t / period) + 0.5) p_i, with p_i of ``ln`` and t the number of the draw (SLN of FLGo).

    Attributes
    ----------
    beta : how much chances differ.
    period : draws, each of an hour or a round, after which the sine begins again.
    """

    period: Annotated[int, COUNT] = 24

    def chances(self, holdings: Holdings) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        constant = self.constant(holdings)

        def at_draw(clients: np.ndarray, draws: np.ndarray) -> np.ndarray:
            wave = 0.4 * np.sin(2 * np.pi * (draws % self.period) / self.period) + 0.5
            return wave * constant[clients]

        return at_draw


@AVAILABILITY_MODELS.register("yc")
class CyclingLabels(ChanceModel):
    """p_i(t) = beta [client i holds the label of the hour] + 1 - beta (YC of FLGo).

    The label of draw t is the one whose part of the period has come: of Y labels, y with y <= Y t / period < y + 1.

    Attributes
    ----------
    beta : how much the chance depends on the label of the hour.
    period : draws, each of an hour or a round, in which every label has its turn.
    """

    beta: Annotated[float, CHANCE] = 0.5
    period: Annotated[int, COUNT] = 24

    def chances(self, holdings: Holdings) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        held = holdings.labels_held()
        num_labels = held.shape[1]

        def at_draw(clients: np.ndarray, draws: np.ndarray) -> np.ndarray:
            label = (draws % self.period) * num_labels // self.period
            return self.beta * held[clients, label] + 1 - self.beta

        return at_draw
