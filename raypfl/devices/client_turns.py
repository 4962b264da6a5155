"""The turns of a run's clients: how long each takes, what it costs, and which of them fail."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raypfl.common import rng
from raypfl.devices.availability import Always, Availability
from raypfl.devices.devices import Devices
from raypfl.devices.turn import Turn


@dataclass(frozen=True)
class ClientTurns:
    """All clients' turns as far as they are known before training; a plan and its run have the same.

    Attributes
    ----------
    availability : when clients can be reached.
    dropout : probability that a drawn client receives a round's first message and then disappears.
    partial_work : probability that a client does only a part of its local steps.
    devices : the clients' devices; None: there is no clock, and a round is a unit of time.
    turn : what the method asks of a client in a round; None: there is no clock.
    num_samples : the training samples of each client, ``int64[num_clients]``; None: there is no clock.
    """

    seed: int = 0
    availability: Availability = field(default_factory=Always)
    dropout: float = 0.0
    partial_work: float = 0.0
    devices: Devices | None = None
    turn: Turn | None = None
    num_samples: np.ndarray | None = None

    @property
    def has_clock(self) -> bool:
        return self.devices is not None

    def is_dropped(self, round: int, clients: np.ndarray) -> np.ndarray:
        """Return which clients drop out of a round, ``bool[n]``."""
        return rng.uniform(rng.keys(self.seed, "dropout", round, clients)) < self.dropout

    def work_shares(self, round: int, clients: np.ndarray) -> np.ndarray:
        """Return the share of its local steps that each client does in a round, ``float64[n]`` in [0, 1]."""
        if not self.partial_work:
            return np.ones(len(clients))
        is_partial = rng.uniform(rng.keys(self.seed, "partial work", round, clients)) < self.partial_work
        shares = rng.uniform(rng.keys(self.seed, "share of work", round, clients))
        return np.where(is_partial, shares, 1.0)

    def exchange_seconds(self, clients: np.ndarray, shares: float | np.ndarray = 1.0) -> np.ndarray:
        """Return how long each exchange of a round takes each client, ``float64[exchanges, n]``.

        Parameters
        ----------
        clients : the clients' numbers, ``int64[n]``.
        shares : the share of its local steps that each client does, ``float64[n]``.
        """
        assert self.devices is not None and self.turn is not None and self.num_samples is not None
        sizes = self.num_samples[clients]
        work = self.turn.work(clients)
        messages = self.turn.message_sizes(clients)
        rows = []
        for exchange in self.turn.exchanges:
            samples = shares * work * exchange.samples(sizes)
            down_bytes = messages * exchange.down_bytes
            rows.append(self.devices.turn_seconds(clients, samples, down_bytes, messages * exchange.up_bytes))
        return np.stack(rows)

    def turn_seconds(self, clients: np.ndarray, shares: float | np.ndarray = 1.0) -> np.ndarray:
        """Return how long each client's whole turn takes, ``float64[n]``; parameters as in :meth:`exchange_seconds`."""
        return self.exchange_seconds(clients, shares).sum(axis=0)

    def shares_within(self, clients: np.ndarray, seconds: float) -> np.ndarray:
        """Return the share of its local steps that each client can do if its turn is to take so long, ``float64[n]``.

        At most 1; 0 or less if not even the messages are sent in time.
        """
        without_work = self.turn_seconds(clients, 0.0)
        work = np.maximum(self.turn_seconds(clients) - without_work, np.finfo(float).tiny)
        return np.minimum((seconds - without_work) / work, 1.0)

    def download_seconds(self, clients: np.ndarray) -> np.ndarray:
        """Return how long each client receives the first message of a round, ``float64[n]``."""
        assert self.devices is not None and self.turn is not None
        down_bytes = self.turn.message_sizes(clients) * self.turn.exchanges[0].down_bytes
        return self.devices.download_seconds(clients, down_bytes)
