"""Tables as people have them: of other separators and encodings, with numbers, names and lines that mislead."""

from __future__ import annotations

import bz2
import gzip
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from raypfl.common.errors import ConfigError, DataError
from raypfl.data import IID, ByColumn, summarised
from raypfl.results import client_data
from raypfl.trained.new_rows import NewRows


@pytest.fixture
def written(tmp_path: Path):
    """A function that writes a file of the folder ``data``: text, bytes or a table."""
    (tmp_path / "data").mkdir()

    def write(content, name: str = "people.csv") -> Path:
        path = tmp_path / "data" / name
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("x;y\n1,5;a\n2,5;b\n", r"people\.csv separates its columns by ';', not by ','.*decimal=','"),
        ("x\ty\n1\ta\n", r"separates its columns by '\\t', not by ','.*sep='\\t'"),
        ("x,y\n1,ä\n".encode("utf-16"), r"is not UTF-8 .*iconv -f UTF-16"),
        ('c,y\n\n"b\nb",a\nc,\n', r"Line 5 of people\.csv has no 'y'"),
        ('c,y\n\n"b\nb",a\n\nc\n', r"Line 6 of people\.csv has 1 columns, but its header 2"),
        ('x,y\n"1,000",a\n"2,500",b\n', r"has '1,000' for 'x', but most .* write numbers as 1234\.5"),
        ("x,y\n5 %,a\n7 %,b\n", r"has '5 %' for 'x', but most of its values are numbers"),
        ("x,y\n1e300,a\n1,b\n", r"Line 2 of people\.csv has 1e\+300 for 'x', which is not finite in single precision"),
        (
            "x,y\n1,2020-01-01\n1,2020-01-02\n",
            r"'y' of people\.csv is of type date32.* write it as a number.*data\.task",
        ),
        ("x,y\n1,1e300\n1,1.5\n", r"Line 2 of people\.csv has 1e\+300 for 'y', which is not finite in single"),
    ],
)
def test_a_file_that_misleads_is_refused_with_what_to_do(written, opened, content, sentence):
    written(content)
    with pytest.raises(DataError, match=sentence):
        opened("table", target="y")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("x,y\n1700000000,a\n1700000001,b\n1700000003,a\n", r"'x' .* differ by little .* Subtract 1\.7e\+09"),
        ('x,y\n1,a\n2,"a "\n3,b\n4," a"\n', r"Line 3 of people\.csv has 'a ' for 'y', .*from 'a' \(also line 5"),
        ('x,y\ns,a\n" s",b\n', r"Line 3 of people\.csv has ' s' for 'x', with spaces at its ends, .* Remove the"),
        ("x,y\n1,1.0\n2,2.0\n3,1.0\n", r"'y' of people\.csv has only the numbers 1\.0, 2\.0\. .*data\.task=class"),
        ("x,s,y\n1,train,a\n2,Test,b\n3,train,a\n", r"'s' of people\.csv seems to say which rows are for tests"),
    ],
)
def test_columns_that_may_be_meant_otherwise_come_with_a_warning(written, opened, content, sentence):
    written(content)
    with pytest.warns(UserWarning, match=sentence):
        opened("table", target="y")


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (
            "x,y\n,a\n1,b\n\n,a\n,b\n,a\n,b\n",
            {},
            r"Line 2 of p\.csv has no 'x' \(also line 5 of p\.csv, line 6 of p\.csv, .* and 1 more",
        ),
        (
            "a,b,y\n1,2,u\n1,u\n3,u,u,v\n",
            {},
            r"Line 3 of p\.csv has 2 columns, but its header 3 \(also line 4 of p\.csv\)\.",
        ),
        (
            "a,b,y\n1,2,u\n",
            {"leave_out": ["c", "d"]},
            r"p\.csv has no column 'c', which .*, and no column 'd', which data\.",
        ),
        ("a,a,b,b,y\n1,2,3,4,u\n", {}, r"p\.csv has two columns called 'a', and two called 'b'; rename one"),
        (
            "day,a,b,y\n2020-01-01,,?,u\n2020-01-02,1,2,v\n2020-01-03,1,3,v\n",
            {},
            r"p\.csv has 3 mistakes:\n  - The column 'day' .*\n  - Line 2 of .* no 'a'.*\n  - Line 2 of .* '\?'",
        ),
        (
            "a,b,y,c\n,1,u,Rome\n1,,v,Rome\n1,2,,Rome\n2,2,u,\n",
            {"group": "c"},
            r"4 mistakes:\n  - Line 2 .* no 'a'.*\n  - Line 3 .* no 'b'.*\n  - Line 4 .* no 'y'.*\n  - Line 5 .* 'c'",
        ),
    ],
)
def test_all_columns_and_rows_with_mistakes_are_named_together(written, opened, content, options, sentence):
    written(content, "p.csv")
    with pytest.raises((ConfigError, DataError), match=sentence):
        opened("table", target="y", **options)


def test_a_folder_without_tables_says_what_it_has(written, opened):
    written(b"", "people.zip")
    with pytest.raises(
        DataError,
        match=r"There is no file with .* but people\.zip; see data\.files, unpack archives, and write .* as CSV",
    ):
        opened("table", target="y")


@pytest.mark.parametrize(
    ("name", "separator", "compress"),
    [
        ("people.csv.gz", ",", gzip.compress),
        ("people.CSV.bz2", ",", bz2.compress),
        ("people.tsv", "\t", bytes),
        ("people.tsv.gz", "\t", gzip.compress),
    ],
)
def test_compressed_tables_and_those_with_tabs_are_read_and_name_their_lines(
    written, opened, name, separator, compress
):
    rows = 'x,home,y\n\n1.5,"A\nB",a\n2.5,C,b\n'
    file = written(compress(rows.replace(",", separator).encode()), name)
    data = opened("table", ByColumn(), target="y", group="home", test_fraction=0)
    assert list(data.client_names) == ["A\nB", "C"] and data.inputs.tolist() == [[1.5], [2.5]]
    assert NewRows.read(file).texts["x"].to_pylist() == ["1.5", "2.5"]

    written(compress(rows.replace("2.5", "").replace(",", separator).encode()), name)
    with pytest.raises(DataError, match=rf"Line 5 of {name} has no 'x'"):
        opened("table", target="y")


def test_a_table_and_its_compressed_copy_are_not_read_as_one(written, opened):
    written("x,y\n1,a\n")
    written(gzip.compress(b"x,y\n1,a\n"), "people.csv.gz")
    with pytest.raises(DataError, match=r"people\.csv\.gz seems to be people\.csv, compressed.* by data\.files"):
        opened("table", target="y")


def test_a_damaged_compressed_table_is_refused_in_a_sentence(written, opened):
    written(gzip.compress(b"x,y\n1,a\n" * 99)[:-9], "people.csv.gz")
    with pytest.raises(DataError, match=r"people\.csv\.gz is not a readable CSV file: Truncated"):
        opened("table", target="y")


def test_lists_are_no_targets_and_no_clients_and_an_order_lists_each_category_once(written, opened):
    written(pa.table({"x": [1, 2], "lists": [[1], [2, 3]], "y": ["a", "b"]}), "people.parquet")
    for options in ({"target": "lists"}, {"target": "y", "group": "lists"}):
        with pytest.raises(DataError, match=r"'lists' of people\.parquet is of type list<.*one number or text in each"):
            opened("table", ByColumn(), **options)
    with pytest.raises(ConfigError, match=r"data\.ordinal\.x is \[1, 2, 1\]; it must list each category"):
        opened("table", target="y", ordinal={"x": [1, 2, 1]})


def test_types_of_other_libraries_are_numbers_and_text(written, opened):
    columns = {
        "big": pa.array([2**64 - 1, 2, 3], pa.uint64()),
        "text": pa.array(["a", None, "b"], pa.string_view()),
        "level": pa.array([1.0, 2.0, None]),
        "home": [True, False, True],
        "y": ["u", "v", "u"],
    }
    written(pa.table(columns), "people.parquet")
    options = {"target": "y", "group": "home", "ordinal": {"level": [1, 2]}, "missing": "fill"}
    data = opened("table", ByColumn(), test_fraction=0, **options)
    assert data.feature_names == ["big", "text=(missing)", "text=a", "text=b", "level"]
    assert data.inputs.tolist() == [[2.0**64, 0, 1, 0, 0], [2, 1, 0, 0, 1], [3, 0, 0, 1, 0.5]]
    assert list(data.client_names) == ["false", "true"]


def test_data_show_says_how_to_standardise_large_numbers_to_predict(written, opened):
    written("x,y\n" + "".join(f"{row},{300_000.5 + row % 2}\n" for row in range(40)))
    data = opened("table", IID(clients=4), target="y", unseen_fraction=0.25)
    trained = np.concatenate([data.labels[data.indices(client)] for client in range(4) if client not in data.unseen])
    summary = summarised(data)
    assert summary.numbers == [("y", trained.mean(), trained.std())]

    console = Console(file=io.StringIO(), width=100)
    client_data.show(console, summary)
    # YAML takes 3e+05 for text.
    setting = "'objective={name: regression, mean: 300000, std: 0.49"
    assert f"To standardise it: {setting}" in console.file.getvalue()


def test_a_data_frame_that_is_no_table_of_columns_is_refused_in_a_sentence():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match=r"cannot be converted to one of PyArrow: .*convert 'a' with type str"):
        NewRows.read(pandas.DataFrame({"x": [1, "a"]}))
    repeated = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataError, match="The table has two columns called 'x'; rename one"):
        NewRows.read(repeated)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_new_rows_name_integers_with_or_without_a_decimal_point(written, opened, form):
    # pandas made floats of the integers, since one is missing.
    written(pa.table({"region": [1.0, 2.0, None], "y": ["a", "b", "a"]}), "people.parquet")
    options = {"target": "y", "categorical": ["region"], "missing": "fill"}
    data = opened("table", IID(clients=1), test_fraction=0, **options)
    assert data.feature_names == ["region=(missing)", "region=1.0", "region=2.0"]

    new = pa.table({"region": [1, 2]})
    rows = NewRows.read(written("region\n1\n2\n", "new.csv") if form == "csv" else new)
    inputs = rows.inputs(data.feature_names, data._origin.data.reader, dict)
    assert np.argmax(inputs, axis=1).tolist() == [1, 2]
