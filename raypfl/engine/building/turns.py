"""The turns of a run's clients, built from its settings and data."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.data import ClientData
from raypfl.data.datasets import DescribedData
from raypfl.devices import Always, Availability, ClientTurns, Holdings, Turn
from raypfl.devices.availability_models import HOUR
from raypfl.devices.settings import DeviceSettings
from raypfl.engine.building.data_outline import DataOutline

if TYPE_CHECKING:
    from raypfl.experiment import Experiment


def turns_for(
    experiment: Experiment, data: ClientData | DataOutline, turn: Turn | None, num_clients: int | None = None
) -> ClientTurns:
    """Return the turns of all clients.

    Parameters
    ----------
    turn : what the method asks of a client in a round; None: there is no simulated time.
    num_clients : how many clients there are, which hold in turn what those of the data hold; None: those of the data.
    """
    settings = experiment.devices
    holders = np.arange(num_clients or data.num_clients) % data.num_clients
    sizes = data.sizes("train")[holders]
    holdings = Holdings(experiment.seed, sizes, lambda: _labels_held(data)[holders])

    devices = None
    if settings.hardware is not None:
        devices = settings.hardware.devices(len(holders), experiment.seed)
    return ClientTurns(
        seed=experiment.seed,
        availability=_availability(settings, holdings),
        dropout=settings.dropout,
        partial_work=settings.partial_work,
        devices=devices,
        turn=turn,
        num_samples=sizes,
    )


def digest_of_files(settings: DeviceSettings) -> str:
    """Return the SHA-256 of the files that describe the devices; empty if there are none."""
    files: list[Path] = []
    for part in (settings.hardware, settings.availability):
        if part is not None:
            files += part.files()
    if not files:
        return ""

    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.expanduser().read_bytes()).digest())
    return digest.hexdigest()


def _availability(settings: DeviceSettings, holdings: Holdings) -> Availability:
    if settings.availability is None:
        return Always()
    unit = 1.0 if settings.hardware is None else HOUR
    return settings.availability.availability(holdings, unit)


def _labels_held(data: ClientData | DataOutline) -> np.ndarray:
    opened = data.data if isinstance(data, DataOutline) else data
    if isinstance(opened, DescribedData):
        raise ConfigError(
            f"devices.availability depends on clients' labels, which {opened.name!r} generates only where a client "
            "works; choose another model, such as uniform or diurnal."
        )
    return opened.label_counts("train") > 0
