"""The devices of all clients, and how long a client's turn takes on its device: a formula, never a clock."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from raypfl.common.errors import ConfigError

BITS_PER_BYTE = 8


@dataclass(frozen=True)
class Devices:
    """What each client computes and communicates with; ``float64[num_clients]`` each.

    Attributes
    ----------
    ms_per_sample : milliseconds of a gradient step for each sample in its batch, above 0.
    down_kbps, up_kbps : bandwidth to and from the client, in 1000 bits a second, above 0.
    watts : electrical power during a turn, 0 or more.

    Raises
    ------
    ConfigError : if a number is not finite, or out of its range.
    """

    ms_per_sample: np.ndarray
    down_kbps: np.ndarray
    up_kbps: np.ndarray
    watts: np.ndarray

    def __post_init__(self) -> None:
        for field in fields(self):
            column = getattr(self, field.name)
            smallest = 0.0 if field.name == "watts" else np.nextafter(0.0, 1.0)
            wrong = np.flatnonzero(~(np.isfinite(column) & (column >= smallest)))
            if len(wrong):
                limit = "0 or more" if field.name == "watts" else "above 0"
                raise ConfigError(
                    f"The device of client {wrong[0]} has a {field.name} of {column[wrong[0]]}; it must be {limit}."
                )

    def __len__(self) -> int:
        return len(self.ms_per_sample)

    def download_seconds(self, clients: np.ndarray, down_bytes: float | np.ndarray) -> np.ndarray:
        """Return how long each client receives `down_bytes`: ``float64[len(clients)]``."""
        return down_bytes * (BITS_PER_BYTE / 1000) / self.down_kbps[clients]

    def turn_seconds(
        self,
        clients: np.ndarray,
        samples: float | np.ndarray,
        down_bytes: float | np.ndarray,
        up_bytes: float | np.ndarray,
    ) -> np.ndarray:
        """Return how long each client's turn takes, ``float64[n]``: it receives, computes, and sends.

        Parameters
        ----------
        samples : the samples of all gradient steps of a turn, each counted as often as a step sees it: with one
            training, epochs times the client's samples; see :meth:`Turn.samples`.
        down_bytes, up_bytes : what a client receives and sends.
        """
        receiving = self.download_seconds(clients, down_bytes)
        computing = samples * self.ms_per_sample[clients] / 1000
        sending = up_bytes * (BITS_PER_BYTE / 1000) / self.up_kbps[clients]
        return receiving + computing + sending
