"""Devices and spans from tables in CSV or Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.devices.availability import Availability, Spans
from raypfl.devices.availability_models import AVAILABILITY_MODELS, DAY, AvailabilityModel, Holdings
from raypfl.devices.devices import Devices
from raypfl.devices.hardware import HARDWARE, Hardware


@HARDWARE.register("table")
class HardwareTable(Hardware):
    """Measured devices, from a CSV or Parquet file with the columns ms_per_sample, down_kbps, up_kbps and watts.

    Attributes
    ----------
    file : the file, with a row for each device; without a column watts, energy is 0.
    assign : ``by_id``: the column id names the client of each row; ``drawn``: each client gets a row drawn at random,
        so that any number of rows will do.
    """

    file: str
    assign: Literal["by_id", "drawn"] = "by_id"

    def files(self) -> tuple[Path, ...]:
        return (Path(self.file),)

    def devices(self, num_clients: int, seed: int) -> Devices:
        needed = ("ms_per_sample", "down_kbps", "up_kbps")
        optional = ("watts",) if self.assign == "drawn" else ("id", "watts")
        columns = read_columns(self.file, needed, "devices.hardware.file", optional)
        num_rows = len(columns["ms_per_sample"])
        columns.setdefault("watts", np.zeros(num_rows))
        if self.assign == "drawn":
            fractions = rng.uniform(rng.keys(seed, "device row", 0, np.arange(num_clients)))
            row_of_client = np.minimum((fractions * num_rows).astype(np.int64), num_rows - 1)
        else:
            row_of_client = self._rows_by_id(columns, num_clients)

        names = ("ms_per_sample", "down_kbps", "up_kbps", "watts")
        return Devices(**{name: columns[name][row_of_client].astype(np.float64) for name in names})

    def _rows_by_id(self, columns: dict[str, np.ndarray], num_clients: int) -> np.ndarray:
        if "id" not in columns:
            raise ConfigError(
                f"{self.file} has no column id, so it names no clients; add it, or set devices.hardware.assign=drawn."
            )
        ids = columns["id"].astype(np.int64)
        known = (ids >= 0) & (ids < num_clients)
        clients, rows_of_client = np.unique(ids[known], return_counts=True)
        repeated = clients[rows_of_client > 1]
        if len(repeated):
            raise ConfigError(
                f"{self.file} has several devices for client {repeated[0]}. Leave one row, or set "
                "devices.hardware.assign=drawn."
            )
        row_of_client = np.full(num_clients, -1)
        row_of_client[ids[known]] = np.flatnonzero(known)
        missing = np.flatnonzero(row_of_client < 0)
        if len(missing):
            raise ConfigError(
                f"{self.file} has no device for client {missing[0]}: clients are numbered from 0 to {num_clients - 1}. "
                "Add a row, or set devices.hardware.assign=drawn."
            )
        return row_of_client


@AVAILABILITY_MODELS.register("spans")
class SpansTable(AvailabilityModel):
    """Recorded spans, from a CSV or Parquet file with the columns id, start_s and end_s.

    Attributes
    ----------
    file : the file, with a row for each span of a client; ids count from 0, and seconds from the start of the period.
    period_s : seconds after which the spans recur.
    """

    in_seconds: ClassVar[bool] = True

    file: str
    period_s: float = DAY

    def files(self) -> tuple[Path, ...]:
        return (Path(self.file),)

    def availability(self, holdings: Holdings, unit: float) -> Availability:
        columns = read_columns(self.file, ("id", "start_s", "end_s"), "devices.availability.file")
        ids = columns["id"].astype(np.int64)
        # A table may have spans of more clients than the federation.
        known = (ids >= 0) & (ids < holdings.num_clients)
        starts = columns["start_s"][known].astype(np.float64)
        ends = columns["end_s"][known].astype(np.float64)
        return Spans(ids[known], starts, ends, self.period_s, holdings.num_clients)


def read_columns(
    file: str, needed: tuple[str, ...], setting: str, optional: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Return the needed columns of a CSV or Parquet file, and those of the optional ones that it has.

    Raises
    ------
    ConfigError : if there is no such file, it lacks a column, rows or numbers, or an id is not a whole number.
    """
    table = _read(file, setting)
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise ConfigError(
            f"{file} has no column {missing[0]}; {setting} needs {', '.join(needed)}, but it has "
            f"{', '.join(table.column_names)}."
        )
    if not table.num_rows:
        raise ConfigError(f"{setting} is {file!r}, which has no rows; add one, or name another file.")

    columns = {name: table[name].to_numpy() for name in (*needed, *optional) if name in table.column_names}
    for name, column in columns.items():
        if column.dtype.kind not in "iuf" or np.isnan(column.astype(np.float64)).any():
            raise ConfigError(f"The column {name} of {file} has entries that are not numbers; correct the file.")
        if name == "id" and (column % 1 != 0).any():
            raise ConfigError(f"The column id of {file} has entries that are not whole numbers; correct the file.")
    return columns


def _read(file: str, setting: str) -> Any:
    # Imported only here: the core imports this module, and must work without PyArrow.
    import pyarrow as pa
    import pyarrow.csv as pa_csv
    import pyarrow.parquet as pq

    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{setting} is {file!r}, but there is no such file.")
    try:
        return pq.read_table(path) if path.suffix == ".parquet" else pa_csv.read_csv(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{setting} is {file!r}, which is not a table in CSV or Parquet: {error}") from None
