"""Devices and spans from files: tables, and FedScale's traces, which may run nothing."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypfl.common.errors import ConfigError
from raypfl.devices import FedScaleAvailability, FedScaleHardware, HardwareTable, Holdings, SpansTable


def holdings(num_clients: int) -> Holdings:
    return Holdings(0, np.ones(num_clients, int), lambda: np.ones((num_clients, 1), bool))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_each_client_gets_the_row_with_its_id(tmp_path: Path, kind):
    file = tmp_path / f"devices.{kind}"
    columns = {"id": [2, 0, 7, 1], "ms_per_sample": [30, 10, 80, 20], "down_kbps": [3.5] * 4, "up_kbps": [1, 2, 3, 4]}
    if kind == "parquet":
        pq.write_table(pa.table(columns), file)
    else:
        rows = zip(*columns.values(), strict=True)
        file.write_text("\n".join(",".join(map(str, row)) for row in (columns, *rows)))

    devices = HardwareTable(file=str(file)).devices(3, seed=0)
    assert devices.ms_per_sample.tolist() == [10, 20, 30] and devices.up_kbps.tolist() == [2, 4, 1]
    assert devices.watts.tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="has no device for client 3"):
        HardwareTable(file=str(file)).devices(4, seed=0)

    drawn = HardwareTable(file=str(file), assign="drawn").devices(4000, seed=0)
    counts = np.unique(drawn.ms_per_sample, return_counts=True)[1]
    assert len(counts) == 4 and (np.abs(counts - 1000) < 4 * np.sqrt(750)).all()


def test_a_client_with_two_devices_in_a_table_is_named(tmp_path: Path):
    file = tmp_path / "devices.csv"
    file.write_text("id,ms_per_sample,down_kbps,up_kbps\n0,1,8,8\n1,2,8,8\n1,3,8,8\n9,4,8,8\n9,5,8,8\n")
    with pytest.raises(ConfigError, match="has several devices for client 1"):
        HardwareTable(file=str(file)).devices(2, seed=0)
    assert len(HardwareTable(file=str(file)).devices(1, seed=0)) == 1


def test_a_table_that_lacks_a_column_or_numbers_is_refused_by_name(tmp_path: Path):
    file = tmp_path / "devices.csv"
    file.write_text("id,ms_per_sample,down_kbps\n0,1,1\n")
    with pytest.raises(ConfigError, match=r"devices.csv has no column up_kbps; devices\.hardware\.file needs"):
        HardwareTable(file=str(file)).devices(1, seed=0)
    file.write_text("id,ms_per_sample,down_kbps,up_kbps\n0,fast,1,1\n")
    with pytest.raises(ConfigError, match=r"The column ms_per_sample of .* has entries that are not numbers"):
        HardwareTable(file=str(file)).devices(1, seed=0)
    with pytest.raises(ConfigError, match="there is no such file"):
        HardwareTable(file=str(tmp_path / "other.csv")).devices(1, seed=0)


@pytest.mark.parametrize(
    "rows, complaint",
    [
        ("a,1,8,8,3\n", "column id of .* has entries that are not numbers"),
        ("0.5,1,8,8,3\n", "column id of .* has entries that are not whole numbers"),
        ("0,1,8,8,much\n", "column watts of .* has entries that are not numbers"),
        ("", "has no rows"),
    ],
)
def test_a_table_with_ids_or_watts_of_another_kind_or_without_rows_is_refused(tmp_path: Path, rows, complaint):
    file = tmp_path / "devices.csv"
    file.write_text(f"id,ms_per_sample,down_kbps,up_kbps,watts\n{rows}")
    with pytest.raises(ConfigError, match=complaint):
        HardwareTable(file=str(file)).devices(1, seed=0)


def test_names_in_place_of_ids_do_not_matter_where_rows_are_drawn(tmp_path: Path):
    file = tmp_path / "devices.csv"
    file.write_text("id,ms_per_sample,down_kbps,up_kbps\nphone,1,8,8\n")
    assert HardwareTable(file=str(file), assign="drawn").devices(2, seed=0).ms_per_sample.tolist() == [1, 1]


def test_spans_of_a_table_recur_after_their_period(tmp_path: Path):
    file = tmp_path / "spans.csv"
    file.write_text("id,start_s,end_s\n1,90,110\n0,10,20\n0,30,40.5\n5,0,1\n")
    spans = SpansTable(file=str(file), period_s=100.0).availability(holdings(2), unit=3600.0)
    available = [spans.is_available(np.arange(2), time).tolist() for time in (15, 35, 40.5, 105, 190, 215)]
    assert available == [[True, False], [True, False], [False, False], [False, True], [False, True], [True, False]]
    assert spans.next_available(np.arange(2), 241.0).tolist() == [310.0, 290.0]


def test_fedscales_traces_are_read_as_fedscale_reads_them_also_when_time_jumps(tmp_path: Path):
    capacity = tmp_path / "capacity"
    capacity.write_bytes(
        pickle.dumps({2: {"computation": 20.0, "communication": 800}, 1: {"computation": 5, "communication": 100}})
    )
    devices = FedScaleHardware(file=str(capacity), watts=2.0).devices(3, seed=0)
    assert devices.ms_per_sample.tolist() == [15, 60, 15]
    assert devices.down_kbps.tolist() == devices.up_kbps.tolist() == [100, 800, 100]
    # FedScale: 3 x batch x steps x ms, and (up + down) in kbit over the bandwidth.
    seconds = devices.turn_seconds(np.array([1]), 10 * 4, down_bytes=1e5, up_bytes=1e5)
    assert seconds[0] == pytest.approx(3 * 10 * 4 * 20 / 1000 + (8e5 + 8e5) / 1000 / 800)

    trace = tmp_path / "trace"
    entry = {"active": [0, 10, 20, 30, 38, 39], "inactive": [5, 15, 25, 35, 38, 45], "finish_time": 40, "model": "x"}
    trace.write_bytes(pickle.dumps({1: entry | {"duration": 9}}))
    availability = FedScaleAvailability(file=str(trace)).availability(holdings(2), unit=3600.0)
    assert [availability.is_available(np.array([1]), time)[0] for time in (32, 32, 7, 32 + 400, 39.5)] == [
        *(True, True, False, True, True)
    ]
    assert availability.next_available(np.arange(2), 36.0).tolist() == [39.0, 39.0]


@pytest.mark.parametrize(
    ("model", "trace"),
    [
        (FedScaleHardware, {1: {"computation": "fast", "communication": 1}}),
        (FedScaleHardware, {1: {"computation": 1, "communication": 1}, "two": {"computation": 1, "communication": 1}}),
        (FedScaleAvailability, {1: {"active": 5, "inactive": [9], "finish_time": 10}}),
        (FedScaleAvailability, {1: {"active": ["early"], "inactive": [9], "finish_time": 10}}),
    ],
)
def test_a_trace_with_other_values_than_numbers_is_refused(tmp_path: Path, model, trace):
    file = tmp_path / "trace"
    file.write_bytes(pickle.dumps(trace))
    with pytest.raises(ConfigError, match=r"for each id, all of them numbers"):
        if model is FedScaleHardware:
            model(file=str(file)).devices(1, seed=0)
        else:
            model(file=str(file)).availability(holdings(1), unit=3600.0)


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_a_trace_that_would_run_code_is_refused_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "capacity"
    file.write_bytes(pickle.dumps({1: {"computation": Harmful(), "communication": 1}}))
    with pytest.raises(ConfigError, match=r"not a pickle of plain dicts, lists and numbers.*it asks for .*mkdir"):
        FedScaleHardware(file=str(file)).devices(1, seed=0)
    assert not (tmp_path / "harmed").exists()

    file.write_bytes(pickle.dumps({1: {"computation": 1}}))
    with pytest.raises(ConfigError, match="does not have computation, communication for each id"):
        FedScaleHardware(file=str(file)).devices(1, seed=0)
