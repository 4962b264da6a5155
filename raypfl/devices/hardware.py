"""Hardware: where the devices of a federation come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from raypfl.common import rng
from raypfl.common.component import Component
from raypfl.common.errors import ConfigError, IncompleteError
from raypfl.common.limits import FROM_ZERO, POSITIVE, limit_violations
from raypfl.common.registry import Registry
from raypfl.devices.devices import Devices

HARDWARE = Registry("hardware", plural="hardware")


class Hardware(Component):
    """Base class of hardware: gives every client a device. Its fields are options of ``devices.hardware``."""

    section: ClassVar[str] = "devices.hardware."

    def files(self) -> tuple[Path, ...]:
        """Return the files that it depends on."""
        return ()

    def devices(self, num_clients: int, seed: int) -> Devices:
        """Return the devices of clients 0 to ``num_clients - 1``; the same for every process, order and resume."""
        raise IncompleteError(f"{type(self).__name__} gives no devices: define devices(self, num_clients, seed).")


@dataclass(frozen=True, kw_only=True)
class LogNormalDevices:
    """Devices of one kind, such as phones; their speeds and bandwidths are log-normal.

    Attributes
    ----------
    ms_per_sample : median of the milliseconds of a gradient step for each sample in its batch.
    down_kbps, up_kbps : medians of the bandwidths to and from a client, in 1000 bits a second. A client's two are the
        same multiple of them.
    speed_spread, bandwidth_spread : standard deviations of the logarithms; 0: all devices are equal.
    watts : electrical power during a turn.
    """

    ms_per_sample: Annotated[float, POSITIVE] = 10.0
    down_kbps: Annotated[float, POSITIVE] = 20000.0
    up_kbps: Annotated[float, POSITIVE] = 5000.0
    speed_spread: Annotated[float, FROM_ZERO] = 0.6
    bandwidth_spread: Annotated[float, FROM_ZERO] = 0.6
    watts: Annotated[float, FROM_ZERO] = 3.0


@dataclass(frozen=True, kw_only=True)
class DeviceClass(LogNormalDevices):
    """One of several kinds of devices; it has the options of ``lognormal``, too.

    Attributes
    ----------
    share : this class's part of all devices, in proportion to the other classes' shares.
    """

    share: Annotated[float, POSITIVE] = 1.0


@HARDWARE.register("lognormal")
class LogNormalHardware(LogNormalDevices, Hardware):
    """Log-normal speeds and bandwidths.

    The defaults are made up, in the range of phones; give those of your devices.
    """

    def devices(self, num_clients: int, seed: int) -> Devices:
        only_class = DeviceClass(**vars(self))
        return _drawn((only_class,), num_clients, seed)


@HARDWARE.register("classes")
class HardwareClasses(Hardware):
    """Classes of devices, such as phones and silos, each with log-normal speeds and bandwidths.

    Attributes
    ----------
    classes : the classes, each with the options of ``lognormal`` and a ``share``. A client's class is drawn.
    """

    classes: tuple[DeviceClass, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.classes:
            raise ConfigError("devices.hardware.classes is empty; give at least one class.")
        for number, device_class in enumerate(self.classes):
            violations = limit_violations(device_class)
            if violations:
                raise ConfigError(f"devices.hardware.classes[{number}].{violations[0]}.")

    def devices(self, num_clients: int, seed: int) -> Devices:
        return _drawn(self.classes, num_clients, seed)


def _drawn(classes: tuple[DeviceClass, ...], num_clients: int, seed: int) -> Devices:
    """Draw each client's class and, within it, its speed and bandwidth."""
    clients = np.arange(num_clients, dtype=np.uint64)
    shares = np.cumsum([device_class.share for device_class in classes])
    places = rng.uniform(rng.keys(seed, "device class", 0, clients)) * shares[-1]
    # A product may round up to the sum of all shares.
    class_of_client = np.minimum(np.searchsorted(shares, places, side="right"), len(classes) - 1)

    def of_client(name: str) -> np.ndarray:
        return np.array([getattr(device_class, name) for device_class in classes])[class_of_client]

    speed_factor = np.exp(of_client("speed_spread") * rng.normal(seed, "device speed", clients))
    bandwidth_factor = np.exp(of_client("bandwidth_spread") * rng.normal(seed, "device bandwidth", clients))
    return Devices(
        ms_per_sample=of_client("ms_per_sample") * speed_factor,
        down_kbps=of_client("down_kbps") * bandwidth_factor,
        up_kbps=of_client("up_kbps") * bandwidth_factor,
        watts=of_client("watts"),
    )
