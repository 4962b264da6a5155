"""Settings of the clients' devices."""

from __future__ import annotations

from dataclasses import dataclass

from raypfl.devices.availability_models import AvailabilityModel
from raypfl.devices.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The clients' devices, in simulated time; see docs/devices.md.

    Attributes
    ----------
    hardware : speeds and bandwidths, from which durations follow; None: there is no simulated time.
    availability : when clients can be reached; None: always.
    dropout : probability that a drawn client receives the round's first message and then disappears.
    partial_work : probability that a client does only a part of its local steps in a round, a share that is drawn
        uniformly; at least one step of each training.
    """

    hardware: Hardware | None = None
    availability: AvailabilityModel | None = None
    dropout: float = 0.0
    partial_work: float = 0.0
