"""A run's tables: a few bytes a value in memory, and files that hold the rows since the last checkpoint."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.fs as pafs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypfl.storage import tables
from raypfl.storage.columns import Columns
from raypfl.storage.tables import RunTable, to_arrow

ROOT = Path(__file__).parents[2]
KINDS = {"round": "int32", "bytes": "int64", "loss": "float64", "name": "text", "cohort": "int32 list"}
FILES = pafs.LocalFileSystem()


def rows(first: int, count: int) -> dict[str, list]:
    numbers = range(first, first + count)
    return {
        "round": list(numbers),
        "bytes": [n << 40 for n in numbers],
        "loss": [0.1 * n for n in numbers],
        "name": ["thêta" if n % 3 else "" for n in numbers],
        "cohort": [list(range(n % 4)) for n in numbers],
    }


def grown(folder: Path, counts: list[int]) -> RunTable:
    """A table to which each of these numbers of rows was added and written."""
    table = RunTable(Columns(KINDS))
    for count in counts:
        table.waiting.extend(rows(sum(part.rows for part in table.parts), count))
        table.flush(FILES, str(folder), "rounds")
    return table


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 12))
def test_rows_come_back_as_they_went_in_and_can_be_cut(steps, length):
    columns = Columns(KINDS)
    for step in steps:
        columns.extend(rows(len(columns), step))

    columns.cut(length)
    columns.append(round=7, bytes=-1, loss=float("inf"), name="x", cohort=np.array([5, 6]))
    expected = {name: values[:length] for name, values in rows(0, sum(steps)).items()}
    for name, value in (("round", 7), ("bytes", -1), ("loss", float("inf")), ("name", "x"), ("cohort", [5, 6])):
        expected[name].append(value)

    assert to_arrow(columns).to_pydict() == expected and len(columns) == len(expected["round"])


@pytest.mark.parametrize("wrong", [{"round": [1]}, rows(0, 2) | {"loss": [0.5]}])
def test_rows_that_do_not_fit_are_refused_and_leave_no_trace(wrong):
    columns = Columns(KINDS)
    columns.extend(rows(0, 3))
    with pytest.raises(ValueError, match="rows"):
        columns.extend(wrong)
    assert to_arrow(columns).to_pydict() == rows(0, 3)


def test_a_row_takes_a_few_bytes():
    tracemalloc.start()
    try:
        columns = Columns(KINDS)
        for n in range(5000):
            columns.extend(rows(n, 1))
        bytes_used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(columns) == 5000 and bytes_used / 5000 < 60


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_a_table_in_files_has_the_same_rows_whatever_was_merged(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("tables")
    table = grown(folder, steps)
    assert table.load(FILES, str(folder)).to_pydict() == rows(0, sum(steps)) and not len(table.waiting)

    # Nor do the files depend on whether rows to merge are still in memory.
    with patch.object(tables, "KEPT", 0):
        read_again = grown(folder, steps)
    assert [part.sha256 for part in table.parts] == [part.sha256 for part in read_again.parts]


def test_a_checkpoint_writes_what_is_new_and_files_stay_few(tmp_path):
    table = RunTable(Columns(KINDS))
    known_files = set()
    written_rows = []
    for step in range(100):
        table.waiting.extend(rows(3 * step, 3))
        table.flush(FILES, str(tmp_path), "rounds")
        written_rows += [part.rows for part in table.parts if part.file not in known_files]
        known_files |= {part.file for part in table.parts}

    assert len(table.parts) <= 7  # binary digits of 100
    assert sum(written_rows) <= 300 * 7 and written_rows.count(3) == 50


def test_files_that_are_full_are_not_merged_any_more(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FULL", 8)
    assert [part.rows for part in grown(tmp_path, [3] * 7).parts] == [6, 6, 6, 3]


def test_a_table_whose_file_has_changed_is_refused_and_waiting_rows_stay(tmp_path):
    parts = grown(tmp_path, [3]).parts
    table = RunTable(Columns(KINDS), parts)
    file = tmp_path / parts[0].file
    file.write_bytes(file.read_bytes()[:-1])
    table.waiting.extend(rows(3, 3))
    with pytest.raises(OSError, match="has changed"):
        table.flush(FILES, str(tmp_path), "rounds")
    assert to_arrow(table.waiting).to_pydict() == rows(3, 3)


def test_tables_are_written_and_read_without_pandas_which_takes_seconds_to_import(tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from raypfl.storage.tables import read_parquet\n"
        "from tests.storage.test_tables import FILES, grown\n"
        "folder = Path(sys.argv[1])\n"
        "table = grown(folder, [3, 3, 1])\n"
        "assert table.load(FILES, str(folder)).num_rows == 7\n"
        "assert read_parquet(str(folder / table.parts[0].file)).num_rows == 6\n"
        "assert 'pandas' not in sys.modules\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert process.returncode == 0, process.stderr
