"""Settings of asynchronous rounds, and what a reply weighs that comes late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from raypfl.common.conditions import needs


@dataclass(frozen=True, kw_only=True)
class AsynchronousSettings:
    """Rounds in which nobody waits for the slowest client; a cohort is then the clients that train at a time.

    Attributes
    ----------
    buffer : number of replies that make a new model, which is a round (FedBuff, Nguyen et al. 2022; with 1, FedAsync,
        Xie et al. 2019). As soon as a client has replied, another one is drawn. None: rounds are synchronous.
    window : seconds after which a round ends with fewer replies, but one at least; None: it never does.
    staleness : weight of a reply whose model is tau models old: ``polynomial``, (1 + tau)^-exponent; ``hinge``, 1 up to
        `tolerance` and then 1 / (slope (tau - tolerance) + 1); or ``constant``, 1.
    exponent : exponent of ``polynomial``.
    tolerance, slope : parameters of ``hinge``.
    mixing : share of a client's model in the next one, alpha of FedAsync, before the weight of staleness; 0.6 in the
        paper. None: as in FedBuff, the model moves by how far each client got from the model that it was sent.
    """

    buffer: Annotated[int | None, needs("devices.hardware")] = None
    window: Annotated[float | None, needs("buffer")] = None
    staleness: Annotated[Literal["polynomial", "hinge", "constant"], needs("buffer")] = "polynomial"
    exponent: Annotated[float, needs("buffer"), needs("staleness", "polynomial")] = 0.5
    tolerance: Annotated[int, needs("buffer"), needs("staleness", "hinge")] = 4
    slope: Annotated[float, needs("buffer"), needs("staleness", "hinge")] = 10.0
    mixing: Annotated[float | None, needs("buffer")] = None

    @property
    def counts_whole(self) -> bool:
        """Whether every reply counts in full, however late it is."""
        return self.staleness == "constant" and self.mixing is None

    def weights(self, staleness: np.ndarray) -> np.ndarray:
        """Return the weight of replies by their staleness ``int64[n]``: ``float64[n]``, 1 for a fresh one."""
        tau = np.asarray(staleness, dtype=np.float64)
        if self.staleness == "polynomial":
            return (1 + tau) ** -self.exponent
        if self.staleness == "hinge":
            late = np.maximum(tau - self.tolerance, 0)
            return 1 / (self.slope * late + 1)
        return np.ones_like(tau)
