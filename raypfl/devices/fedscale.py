"""FedScale's two traces, which are pickles; they are read as plain data, and anything else in them is refused.

Lai et al., FedScale: Benchmarking Model and System Performance of Federated Learning at Scale (ICML 2022).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.common.limits import FROM_ZERO
from raypfl.devices.availability import SHORTEST_SPAN, Availability, Spans
from raypfl.devices.availability_models import AVAILABILITY_MODELS, AvailabilityModel, Holdings
from raypfl.devices.devices import Devices
from raypfl.devices.hardware import HARDWARE, Hardware

TRAINING_FACTOR = 3
"""A gradient step takes three times as long as the inference that the trace measures, as in FedScale."""


@HARDWARE.register("fedscale")
class FedScaleHardware(Hardware):
    """Devices of FedScale's ``client_device_capacity``; client i has the i-th device, from the first again at the end.

    Attributes
    ----------
    file : the pickle: id -> {computation: milliseconds of inference a sample, communication: kbit/s}.
    watts : electrical power during a turn, which the trace lacks.
    """

    file: str
    watts: Annotated[float, FROM_ZERO] = 0.0

    def files(self) -> tuple[Path, ...]:
        return (Path(self.file),)

    def devices(self, num_clients: int, seed: int) -> Devices:
        entries = _entries(self.file, "devices.hardware.file", numbers=("computation", "communication"))
        computation = np.array([entry["computation"] for entry in entries], dtype=np.float64)
        communication = np.array([entry["communication"] for entry in entries], dtype=np.float64)
        device = np.arange(num_clients) % len(entries)
        kbps = communication[device]
        return Devices(TRAINING_FACTOR * computation[device], kbps, kbps, np.full(num_clients, self.watts))


@AVAILABILITY_MODELS.register("fedscale")
class FedScaleAvailability(AvailabilityModel):
    """Spans of FedScale's ``client_behave_trace``; client i has the i-th entry, from the first again at the end.

    Attributes
    ----------
    file : the pickle: id -> {active: seconds, inactive: seconds, finish_time: the period}.
    """

    in_seconds: ClassVar[bool] = True

    file: str

    def files(self) -> tuple[Path, ...]:
        return (Path(self.file),)

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        entries = _entries(
            self.file, "devices.availability.file", numbers=("finish_time",), lists=("active", "inactive")
        )
        periods = np.array([entry["finish_time"] for entry in entries], dtype=np.float64)
        owners = []
        starts = []
        ends = []
        for number, entry in enumerate(entries):
            # Of unequal lists, the last span is open.
            for start, end in zip(entry["active"], entry["inactive"], strict=False):
                end = min(end, periods[number])
                if end - start >= SHORTEST_SPAN:
                    owners.append(number)
                    starts.append(start)
                    ends.append(end)

        spans = Spans(np.array(owners, dtype=np.int64), np.array(starts), np.array(ends), periods, len(entries))
        return spans.of(np.arange(holdings.num_clients) % len(entries))


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, numbers and texts alone: a pickle that names a class or function could run any code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")


def _entries(file: str, setting: str, numbers: tuple[str, ...], lists: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the entries of a trace, by ascending id; each has these numbers and lists of numbers."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting} is {file!r}, but there is no such file.")
    try:
        with path.open("rb") as pickled:
            trace = _PlainUnpickler(pickled).load()
    except Exception as error:
        raise ConfigError(
            f"{setting} is {file!r}, which is not a pickle of plain dicts, lists and numbers, as FedScale's traces "
            f"are: {error}."
        ) from None

    def is_entry(entry: Any) -> bool:
        if not isinstance(entry, dict):
            return False
        has_numbers = all(_is_number(entry.get(name)) for name in numbers)
        return has_numbers and all(_are_numbers(entry.get(name)) for name in lists)

    is_trace = isinstance(trace, dict) and trace and all(map(_is_number, trace))
    if not is_trace or not all(map(is_entry, trace.values())):
        needed = ", ".join((*lists, *numbers))
        raise ConfigError(f"{setting} is {file!r}, which does not have {needed} for each id, all of them numbers.")
    return [trace[number] for number in sorted(trace)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(map(_is_number, values))
