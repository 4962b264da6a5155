"""Ordinary tables: features, a target and a client column, from CSV and Parquet files."""

from __future__ import annotations

import io
import json
import shlex
import warnings
from pathlib import Path

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from rich.console import Console

import raypfl
from raypfl.common.errors import ConfigError, DataError
from raypfl.data import IID, ByColumn, summarised
from raypfl.data.datasets import DataSource
from raypfl.data.datasets.tables import read_csv
from raypfl.experiment import experiments
from raypfl.results import client_data
from raypfl.trained.models import TrainedModels
from raypfl.trained.samples import samples_in
from tests.support.pages import blocks
from tests.support.runs import experiment

ROWS = """city,age,income,level,smokes,region,bought
York,30,1000.5,low,true,1,yes
Bath,41,2000,high,false,2,no
York,52,3000,middle,false,2,no
Hull,63,4000,low,true,1,yes
Bath,74,5000,low,true,1,maybe
Hull,85,6000,high,false,2,no
"""
LEVELS = ["low", "middle", "high"]
OPTIONS = {"target": "bought", "group": "city", "ordinal": {"level": LEVELS}, "categorical": ["region"]}
NAMES = ["age", "income", "level", "smokes=false", "smokes=true", "region=1", "region=2"]


def written(folder: Path, text: str = ROWS, name: str = "people.csv") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def as_parquet(file: Path) -> None:
    """Put a Parquet file with text as a dictionary in place of a CSV file."""
    table = pa_csv.read_csv(file)
    city = table["city"].combine_chunks().dictionary_encode()
    pq.write_table(table.set_column(0, "city", city), file.with_suffix(".parquet"))
    file.unlink()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_table_becomes_numbers_categories_and_classes_by_client(tmp_path, opened, form):
    file = written(tmp_path / "data")
    if form == "parquet":
        as_parquet(file)
    data = opened("table", ByColumn(), test_fraction=0, **OPTIONS)
    expected = [
        [30, 1000.5, 0, 0, 1, 1, 0],
        [41, 2000.0, 2, 1, 0, 0, 1],
        [52, 3000.0, 1, 1, 0, 0, 1],
        [63, 4000.0, 0, 0, 1, 1, 0],
        [74, 5000.0, 0, 0, 1, 1, 0],
        [85, 6000.0, 2, 1, 0, 0, 1],
    ]

    assert data.feature_names == NAMES and np.array_equal(data.inputs, expected)
    assert (data.class_names, data.labels.tolist()) == (["maybe", "no", "yes"], [2, 1, 1, 2, 0, 1])
    assert [data.indices(client).tolist() for client in range(3)] == [[1, 4], [3, 5], [0, 2]]


def test_a_file_alone_is_read_as_its_folder_is_and_is_no_test_split_whatever_its_name(tmp_path, opened):
    in_folder = opened("table", target="bought", root=str(written(tmp_path / "data").parent))
    alone = opened("table", target="bought", root=str(written(tmp_path / "other", name="valid.csv")))
    assert np.array_equal(alone.inputs, in_folder.inputs) and alone.sizes("train").sum() < len(ROWS.splitlines()) - 1
    with pytest.raises(DataError, match=r"no file like notes\.csv .* in .*valid\.csv; see data\.files"):
        opened("table", target="bought", root=str(tmp_path / "other" / "valid.csv"), files="notes.csv")


def test_numbers_are_standardised_by_training_samples_alone_and_categories_are_not(tmp_path, opened):
    written(tmp_path / "data")
    written(tmp_path / "data", ROWS.replace("000", "999999"), name="test.csv")
    data = opened("table", **OPTIONS)
    trained = np.concatenate([data.indices(client) for client in range(2)])

    assert sorted(trained) == [0, 1, 2, 3, 4, 5] and len(data.labels) == 12

    numbers = data.inputs[:6, :3].astype(np.float64)
    np.testing.assert_allclose(data.mean, [*numbers.mean(0), 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(data.std, [*numbers.std(0), 1, 1, 1, 1], rtol=1e-6)


def test_a_class_of_one_row_among_many_is_said_with_its_line_since_it_may_be_misspelt(tmp_path, opened):
    rows = "".join(f"0.{number},{'yes' if number % 2 else 'no'}\n" for number in range(100))
    root = str(written(tmp_path, f"x,y\n{rows}0.5,ys\n"))
    with pytest.warns(UserWarning, match=r"'y': 'ys' \(Line 102 of people\.csv\)\. .* misspelt"):
        opened("table", IID(clients=2), target="y", root=root)

    with warnings.catch_warnings(action="error"):
        opened("table", IID(clients=2), target="y", root=str(written(tmp_path / "small", f"x,y\n{rows[:60]}0.5,ys\n")))


@pytest.mark.parametrize(
    ("target", "task", "kind", "labels"),
    [
        ("income", "auto", "numbers", [1000.5, 2000, 3000, 4000, 5000, 6000]),
        ("age", "auto", "classes", [0, 1, 2, 3, 4, 5]),
        ("age", "regression", "numbers", [30, 41, 52, 63, 74, 85]),
        ("smokes", "auto", "classes", [1, 0, 0, 1, 1, 0]),
    ],
)
def test_text_and_integers_are_classes_and_other_numbers_are_predicted(tmp_path, opened, target, task, kind, labels):
    written(tmp_path / "data")
    data = opened("table", target=target, task=task, ordinal={"level": LEVELS}, test_fraction=0)
    assert (data.kind, data.labels.tolist()) == (kind, labels)


def test_missing_values_are_filled_as_the_page_says_without_a_look_at_test_files(tmp_path, opened):
    text = ROWS.replace("York,30", ",").replace("York,52,3000,middle", "York,,3000,")
    written(tmp_path / "data", text)
    written(tmp_path / "data", ROWS.replace("0,", "0000,"), name="test.csv")
    data = opened("table", target="bought", ordinal={"level": LEVELS}, missing="fill")
    named = dict(zip(data.feature_names, data.inputs[:6].T, strict=True))

    assert named["age"].tolist() == [68.5, 41, 68.5, 63, 74, 85]
    assert named["level"].tolist() == [0, 2, 0, 0, 0, 2]
    assert named["city=(missing)"].tolist() == [1, 0, 0, 0, 0, 0]


def test_columns_of_an_index_that_pandas_wrote_and_those_left_out_are_no_features(tmp_path, opened):
    lines = [f"{number},{line}" for number, line in enumerate(ROWS.splitlines())]
    written(tmp_path / "data", "\n".join([lines[0][1:], *lines[1:]]))
    data = opened("table", target="bought", leave_out=["level", "city", "smokes"])
    assert data.feature_names == ["age", "income", "region"]


def test_a_type_that_shows_only_late_in_a_large_file_is_seen(tmp_path, opened):
    lines = ["a,b,y"] + [f"{i},{i % 5},{i % 2}" for i in range(200_000)] + ["0.5,1,1"]
    written(tmp_path / "data", "\n".join(lines))
    data = opened("table", target="y")
    assert data.inputs[-1].tolist() == [0.5, 1.0]


def test_integers_of_many_digits_are_features_to_the_precision_of_a_float(tmp_path, opened):
    written(tmp_path / "data", f"a,y\n{2**60 + 1},0\n-5,1\n")
    written(tmp_path / "data", "a,y\n0.5,0\n1,1\n", name="more.csv")
    assert opened("table", target="y", test_fraction=0).inputs[:, 0].tolist() == [0.5, 1, 2.0**60, -5]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        (ROWS, {"target": None}, r"data\.target is missing"),
        (ROWS, {"target": "bougt"}, r"people\.csv has no column 'bougt', which data\.target .*: city, age, .*bought\."),
        (ROWS, {"group": "town"}, r"people\.csv has no column 'town', which data\.group names; its columns"),
        (ROWS, {"leave_out": ["agee"]}, r"no column 'agee', which data\.leave_out names \(did you mean 'age'\?\); its"),
        (ROWS, {"leave_out": ["bought"]}, r"'bought' is in data\.target and in data\.leave_out"),
        (ROWS, {"ordinal": {"level": ["low", "high"]}}, r"Line 4 of people\.csv has 'middle' for 'level', .*low, high"),
        (ROWS, {"leave_out": ["age", "income", "level", "smokes", "region"], "ordinal": None}, r"no features"),
        (ROWS.replace("York,52", "York,"), {}, r"Line 4 of people\.csv has no 'age'.*data\.missing=fill"),
        (ROWS.replace("York,52", ",52"), {}, r"no 'city'\. .* targets and groups must be given"),
        (ROWS.replace("low,true,1,yes", "low,true,1,"), {"missing": "fill"}, r"Line 2 of people\.csv has no 'bought'"),
        (ROWS.replace(",52,", ",?,"), {}, r"Line 4 of people\.csv has .\?. for .age., but most of its val"),
        (ROWS.replace("2000", "inf"), {}, r"Line 3 of people\.csv has inf for 'income'"),
        (ROWS.replace("age", "income"), {}, r"people\.csv has two columns called 'income'"),
        (ROWS, {"task": "regression"}, r"'bought' .* is text, .*data\.task is regression"),
        (
            ROWS,
            {"target": "income", "task": "classification"},
            r"Line 2 of people\.csv has 1000\.5 for 'income', .* class",
        ),
        (
            ROWS.replace("1000.5", "2020-01-01").replace("000,", "000-01-01,"),
            {},
            r"'income' .* date32.*data\.leave_out",
        ),
        ("a,y\n" + "".join(f"x{i},1\n" for i in range(101)), {"target": "y"}, r"'a' .* 101 categories"),
        (
            "a,y\n" + "".join(f"{i},{i}\n" for i in range(101)),
            {"target": "y"},
            r"'y' .* 101 different integers.*data\.task",
        ),
        ("a,y\n,1\n,2\n", {"target": "y", "missing": "fill"}, r"'a' .* no values"),
        ("a,y\n", {"target": "y"}, r"no samples|no rows"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_its_row_and_a_remedy(tmp_path, opened, text, options, sentence):
    written(tmp_path / "data", text)
    defaults = {}
    if text.startswith("city"):
        defaults = {"target": "bought", "group": "city", "ordinal": {"level": LEVELS}}

    with pytest.raises((ConfigError, DataError), match=sentence):
        opened("table", **{**defaults, **options})


def test_files_with_other_columns_or_other_types_are_named(tmp_path, opened):
    written(tmp_path / "data")
    other = written(tmp_path / "data", ROWS.replace("income", "salary"), name="more.csv")
    with pytest.raises(DataError, match=r"more\.csv has the column 'salary', but people\.csv does not"):
        opened("table", **OPTIONS)

    other.write_text(ROWS.replace("1000.5", "much"))
    with pytest.raises(
        DataError, match=r"Line 2 of more\.csv has 'much' for 'income', but most of its values are numbers"
    ):
        opened("table", **OPTIONS)


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_the_readers_of_images_say_which_one_reads_a_table(tmp_path, opened, name):
    file = written(tmp_path / "data")
    if name == "parquet":
        as_parquet(file)
    with pytest.raises(ConfigError, match=r"no column '(image|label)', .*data\.name=table reads tables of features"):
        opened(name)


def test_new_clients_and_pools_have_the_features_of_the_clients_by_name(tmp_path):
    file = written(tmp_path / "data", ROWS.replace("Bath", "York"))
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, evaluation__every=0, cohort__size=2)
    options = {"name": "table", "root": str(file.parent), **OPTIONS, "group": None}
    described = described.override([f"data={json.dumps(options)}", "partition={name: iid, clients: 2}"])
    models = TrainedModels.of_run(raypfl.run(described).run_dir)
    assert models.outline.data.feature_names[:2] == ["city=Hull", "city=York"]

    written(tmp_path / "new", "\n".join(ROWS.splitlines()[i] for i in (0, 1, 3)))  # nobody of Hull, and no high level
    x, y = samples_in(tmp_path / "new", models)
    assert np.array_equal(x, models.outline.data.inputs[[0, 2]]) and y.tolist() == [2, 1]
    alone, _ = samples_in(tmp_path / "new" / "people.csv", models)
    assert np.array_equal(alone, x)

    written(tmp_path / "new", ROWS)
    with pytest.raises(DataError, match=r"Line 3 of people\.csv has 'Bath' for 'city', .* only these categories: Hull"):
        samples_in(tmp_path / "new", models)


def test_a_models_file_and_plain_torch_suffice_to_predict_a_row_of_a_table(tmp_path):
    file = written(tmp_path / "data")
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, evaluation__every=0, cohort__size=2)
    options = {"name": "table", "root": str(file.parent), **OPTIONS}
    described = described.override([f"data={json.dumps(options)}", "partition=by_column"])
    models = TrainedModels.of_run(raypfl.run(described).run_dir)
    data = models.outline.data
    made = models.personalize(data.inputs[:4], data.labels[:4], held_out=0)
    model_file = made.save(tmp_path / "mine.safetensors")

    with safetensors.safe_open(model_file, "pt") as opened_file:
        about = opened_file.metadata()
    names = json.loads(about["data"])
    page: dict = {}
    (code,) = [code for code in blocks("docs/new_clients.md", "python") if "def values_of" in code]
    exec(code, page)
    row = {"age": 41, "income": 2000, "level": LEVELS.index("high"), "smokes": "false", "region": "2"}
    values = page["values_of"](row, names["feature_names"])
    network = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(len(NAMES), 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
    )
    network.load_state_dict(safetensors.torch.load_file(model_file))
    gain, offset = (torch.tensor(json.loads(about[name])) for name in ("gain", "offset"))
    logits = network(torch.tensor([values]) * gain + offset)

    np.testing.assert_allclose(logits.detach(), made.model(torch.tensor(data.inputs[1:2])).detach(), atol=1e-5)
    np.testing.assert_allclose(1 / gain, data.std, rtol=1e-5)
    np.testing.assert_allclose(-offset / gain, data.mean, rtol=1e-5)

    models.export(tmp_path / "export")
    exported = TrainedModels.of_export(tmp_path / "export")
    for model in (made.model, raypfl.load_model(model_file), models.global_model(), exported.personal_model("Bath")):
        assert (model.feature_names, model.class_names) == (NAMES, ["maybe", "no", "yes"])


def test_data_show_has_the_networks_inputs_and_outputs_in_order(tmp_path, opened):
    written(tmp_path / "data")
    data = opened("table", ByColumn(), **OPTIONS)
    summary = summarised(data)
    console = Console(file=io.StringIO(), width=100)
    client_data.show(console, summary)
    table = console.file.getvalue()

    features = client_data.as_json(summary)["features"]
    assert [feature["name"] for feature in features] == NAMES
    assert [feature["mean"] for feature in features] == data.mean.tolist()
    assert [feature["deviation"] for feature in features] == data.std.tolist()
    lines = [line.split() for line in table.splitlines()]
    assert ["0", "age", f"{data.mean[0]:.4g}", f"{data.std[0]:.4g}"] in lines
    assert ["6", "region=2", "as", "it", "is"] in lines
    assert "outputs: 0 maybe, 1 no, 2 yes" in table


def of_columns(**columns) -> str:
    """A table with these columns, and two classes to predict."""
    count = len(next(iter(columns.values())))
    rows = zip(*columns.values(), (row % 2 for row in range(count)), strict=True)
    return "\n".join(",".join(map(str, row)) for row in [(*columns, "y"), *rows])


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("number", range(1, 21)),
        ("number", np.random.default_rng(0).permutation(50)),
        ("number", [row for row in range(100, 160) if row % 3]),  # a third of the rows was dropped
        ("first name", [f"n{row}x" for row in range(20)]),
        ("PassengerId", [row**3 for row in range(20)]),
        ("customer_id", [-(row**3) for row in range(20)]),
    ],
    ids=["counted", "shuffled", "dropped", "text", "Id", "_id"],
)
def test_a_feature_that_numbers_or_names_the_rows_comes_with_a_warning_that_mends_it(tmp_path, opened, column, values):
    written(tmp_path / "data", of_columns(**{"z": [1, 2] * (len(values) // 2), column: values}))
    with pytest.warns(UserWarning, match="Every row of people.csv has a different value for") as caught:
        opened("table", IID(clients=2), target="y", leave_out=["z"])
    (setting,) = shlex.split(str(caught[0].message).rpartition(" set ")[2].removesuffix("."))
    assert setting == f'data.leave_out=["z", "{column}"]'
    options = {"target": "y", "leave_out": json.loads(setting.partition("=")[2])[1:]}
    assert opened("table", IID(clients=2), **options).feature_names == ["z"]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("income", [1000.5 + 7 * row for row in range(40)]),
        ("id", [float(row) + 0.25 for row in range(40)]),
        ("price", [row**3 for row in range(40)]),  # all differ, but far from each other
        ("age", [18 + 7 * row % 37 for row in range(40)]),  # integers, of which some are equal
        ("customer_id", [row // 2 for row in range(40)]),
        ("paid", [row**2 for row in range(40)]),
        ("number", range(19)),
    ],
    ids=["floats", "floats-called-id", "sparse", "ages", "customers", "not-id", "few-rows"],
)
def test_other_features_come_without_a_warning(tmp_path, opened, recwarn, column, values):
    written(tmp_path / "data", of_columns(**{column: values}))
    assert opened("table", IID(clients=2), target="y").feature_names == [column]
    assert not recwarn.list


def test_an_id_that_counts_each_file_or_all_files_comes_with_a_warning_and_a_declared_one_does_not(tmp_path, opened):
    for folder, second in (("each", range(30)), ("all", range(30, 60))):
        written(tmp_path / folder, of_columns(number=range(30)))
        written(tmp_path / folder, of_columns(number=second), name="test.csv")
        with pytest.warns(UserWarning, match="a different value for 'number', as for an id"):
            DataSource(name="table", root=str(tmp_path / folder), options={"target": "y"}).read()

    declared = {"target": "y", "categorical": ["number"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DataSource(name="table", root=str(tmp_path / "each"), options=declared).read()


def test_the_page_of_data_trains_on_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "people")
    (text,) = [code for code in blocks("docs/data.md", "yaml") if "name: table" in code]
    (described,) = experiments(text)
    changes = ["rounds=1", "engine.backend=inline", "tracking.mlflow=false"]
    result = raypfl.run(described.override(changes))
    assert result.evaluations.num_rows


def test_a_new_client_may_have_negative_numbers_to_predict(tmp_path):
    file = written(tmp_path / "data", ROWS.replace("2000", "-2000"))
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, evaluation__every=0, cohort__size=2)
    options = {"name": "table", "root": str(file.parent), "target": "income", "leave_out": ["level", "bought"]}
    described = described.override([f"data={json.dumps(options)}", "partition={name: iid, clients: 2}"])
    described = described.override(["objective={name: regression, mean: 3000, std: 2000}"])
    models = TrainedModels.of_run(raypfl.run(described).run_dir)
    x, y = samples_in(file.parent, models)

    assert np.array_equal(x, models.outline.data.inputs) and y.tolist() == [1000.5, -2000, 3000, 4000, 5000, 6000]
    assert np.isfinite(models.personalize(x, y).metrics["mse"])


def test_a_table_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "people.csv").write_bytes("city,age\nKöln,3\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"people.csv is not UTF-8 .*iconv"):
        read_csv(tmp_path / "people.csv", "people.csv")
