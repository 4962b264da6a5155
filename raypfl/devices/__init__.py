"""Clients' devices: how long a turn takes on them, and when they can be reached; with NumPy alone."""

from raypfl.devices.availability import Always, Availability, Chances, Spans
from raypfl.devices.availability_models import AVAILABILITY_MODELS, AvailabilityModel, Holdings
from raypfl.devices.client_turns import ClientTurns
from raypfl.devices.devices import Devices
from raypfl.devices.fedscale import FedScaleAvailability, FedScaleHardware
from raypfl.devices.hardware import HARDWARE, DeviceClass, Hardware
from raypfl.devices.tables import HardwareTable, SpansTable
from raypfl.devices.turn import Exchange, Loads, RequestedTraining, Training, Turn

__all__ = [
    "AVAILABILITY_MODELS",
    "HARDWARE",
    "Always",
    "Availability",
    "AvailabilityModel",
    "Chances",
    "ClientTurns",
    "DeviceClass",
    "Devices",
    "Exchange",
    "FedScaleAvailability",
    "FedScaleHardware",
    "Hardware",
    "HardwareTable",
    "Holdings",
    "Loads",
    "RequestedTraining",
    "Spans",
    "SpansTable",
    "Training",
    "Turn",
]
