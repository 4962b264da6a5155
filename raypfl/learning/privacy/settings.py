"""Settings of differential privacy and of secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from raypfl.common.conditions import needs, needs_some


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Differential privacy of training, and secure aggregation; see docs/privacy.md.

    Attributes
    ----------
    noise : noise multiplier: the noise has a standard deviation of `noise` times `clip`. 0: clipping only; None: no
        privacy.
    clip : largest norm of one unit's contribution to a sum.
    delta : delta of the (epsilon, delta) guarantee that the run reports.
    unit : unit of protection: ``sample`` (one sample of a client, by DP-SGD in local training) or ``client`` (all that
        a client sends, by clipping its update and adding noise to the sum on the server).
    secure_aggregation : whether clients mask the fixed-point numbers that they send. The masks cancel in the sum over
        the cohort, so the server sees sums only. Methods that need more than sums are refused.
    """

    noise: float | None = None
    clip: Annotated[float, needs("noise")] = 1.0
    delta: Annotated[float, needs_some("noise")] = 1e-5
    unit: Annotated[Literal["sample", "client"], needs("noise")] = "sample"
    secure_aggregation: bool = False

    @property
    def protects_samples(self) -> bool:
        """Whether local training is DP-SGD."""
        return self.noise is not None and self.unit == "sample"

    @property
    def protects_clients(self) -> bool:
        """Whether clients' updates are clipped, and noise is added on the server."""
        return self.noise is not None and self.unit == "client"

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in a sum."""
        return self.noise * self.clip if self.noise else 0.0
