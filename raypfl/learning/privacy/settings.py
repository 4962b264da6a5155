"""Settings of differential privacy and of secure aggregation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from raypfl.common.conditions import needs


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """Differential privacy of training, and secure aggregation; see docs/privacy.md.

    Attributes
    ----------
    noise : noise multiplier: the standard deviation of the noise is this times `clip`. 0 clips only; None: no privacy.
    clip : largest norm of what one unit adds to a sum.
    delta : of the epsilons that the run reports.
    unit : what is protected: one ``sample`` of a client, by DP-SGD in local training; or all that a ``client`` sends,
        by clipping its update and adding noise to the sum on the server.
    secure_aggregation : whether clients send fixed-point numbers under masks that cancel in the sum over the cohort,
        so that the server sees sums only. Methods that need more than sums are refused.
    """

    noise: float | None = None
    clip: Annotated[float, needs("noise")] = 1.0
    delta: Annotated[float, needs("noise")] = 1e-5
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
