"""Predictions for rows of a table are those of the run's models, and what does not fit is refused with its row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import raypfl as library
from raypfl.common.errors import ConfigError, DataError
from raypfl.trained.new_rows import NewRows
from raypfl.trained.samples import samples_in
from tests.support.command import raypfl
from tests.support.runs import experiment

LEVELS = ["low", "middle", "high"]
OPTIONS = {
    "target": "bought",
    "group": "city",
    "ordinal": {"level": LEVELS},
    "categorical": ["region"],
    "missing": "fill",
}


def lines_of_people(count: int = 120) -> list[str]:
    """A header, and rows with numbers, categories of all kinds, and some values that are missing."""
    draws = np.random.default_rng(0)
    lines = ["city,age,income,level,smokes,zip,region,bought"]
    for row in range(count):
        age = "" if row % 17 == 3 else draws.integers(18, 80)
        income = round(draws.normal(3000, 900), 1)
        smokes = ["True", "False", "unknown", ""][row % 4]
        place = ["007", "7b", "8c"][row % 3]
        level = "" if row % 13 == 5 else LEVELS[draws.integers(3)]
        bought = "yes" if income > 3000 else "no"
        lines.append(f"{['Bath', 'Hull', 'York'][row % 3]},{age},{income},{level},{smokes},{place},0{row % 2},{bought}")
    return lines


def written(file: Path, lines: list[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    return file


def result_of(folder: Path, method: str = "ditto", options: dict | None = None, **changes) -> library.Result:
    """A run of two rounds on the table of people, whose clients are cities."""
    root = written(folder / "people.csv", lines_of_people())
    data = {"name": "table", "root": str(root), **OPTIONS} | (options or {})
    small = {"rounds": 2, "evaluation__every": 2, "cohort__size": 3, "evaluation__protocols": "[local]"}
    return library.run(
        experiment(folder, method=method, data=json.dumps(data), partition="by_column", **small | changes)
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> library.Result:
    return result_of(tmp_path_factory.mktemp("people"))


def lines_of_tests(result: library.Result) -> dict[int, list[str]]:
    """Client -> its test rows, as lines."""
    lines = lines_of_people()[1:]
    data = library.trained_models(result.run_dir).outline.data
    return {client: [lines[row] for row in data.indices(client, "test")] for client in range(data.num_clients)}


def recorded(result: library.Result, model: str, metric: str) -> dict[int, float]:
    """Client -> a metric of the last evaluation."""
    rows = result.evaluations.to_pylist()
    return {row["client"]: row[metric] for row in rows if row["round"] == result.round and row["model"] == model}


@pytest.mark.parametrize("use_global", [False, True], ids=["personal", "global"])
def test_predictions_for_the_test_rows_are_as_right_as_the_evaluation_counted(result, tmp_path, use_global):
    expected = recorded(result, "global" if use_global else "personal", "accuracy")
    lines_of_client = lines_of_tests(result)
    assert sorted(expected) == sorted(lines_of_client) == [0, 1, 2]
    for client, lines in lines_of_client.items():
        file = written(tmp_path / "rows.csv", [lines_of_people()[0], *lines])
        predictions = library.predict(result.run_dir, file, use_global=use_global)
        assert predictions.metrics["accuracy"] == pytest.approx(expected[client], abs=1e-9)
        assert (predictions.tested, predictions.clients) == (len(lines), None if use_global else [client])


def test_the_inputs_are_those_of_training_also_where_values_are_missing_and_a_row_is_alone(result, tmp_path):
    models = library.trained_models(result.run_dir)
    header, *lines = lines_of_people()
    inputs = np.array(models.outline.data.inputs)
    reader = models.experiment.data.reader
    for row in range(40):
        rows = NewRows.read(written(tmp_path / "rows.csv", [header, lines[row]]))
        assert np.array_equal(rows.inputs(models.outline.feature_names, reader, reader.medians), inputs[row : row + 1])


def test_a_new_clients_rows_need_no_column_of_clients_and_are_filled_as_in_training(result, tmp_path):
    models = library.trained_models(result.run_dir)
    header, *lines = lines_of_people(30)
    chosen = [3, 0, 20, 9]  # two ages are missing, and the others have another median than all people
    rows = [line.partition(",")[2] for line in [header, *(lines[row] for row in chosen)]]
    x, y = samples_in(written(tmp_path / "new" / "rows.csv", rows), models)

    assert np.array_equal(x, models.outline.data.inputs[chosen])
    assert np.array_equal(y, models.outline.data.labels[chosen])
    folder_x, folder_y = samples_in(tmp_path / "new", models)
    assert np.array_equal(folder_x, x) and np.array_equal(folder_y, y)

    for change, sentence in [
        (("yes", "perhaps"), r"Line \d of rows\.csv has 'perhaps' for 'bought', but .* only these categories: no, yes"),
        (("yes", ""), r"Line \d of rows\.csv has no 'bought'"),
        (("bought", "sold"), r"rows\.csv has no column 'bought', the target of the run; its columns are: age, "),
    ]:
        file = written(tmp_path / "rows.csv", [row.replace(*change) for row in rows])
        with pytest.raises(DataError, match=sentence):
            samples_in(file, models)


def test_numbers_are_predicted_in_the_units_of_the_table(tmp_path):
    options = {"target": "income", "leave_out": ["bought"]}
    objective = {"objective": "{name: regression, mean: 3000, std: 900}"}
    result = result_of(tmp_path, "fedavg", options, **objective)
    expected = recorded(result, "global", "mse")
    for client, lines in lines_of_tests(result).items():
        file = written(tmp_path / "rows.csv", [lines_of_people()[0], *lines])
        predictions = library.predict(result.run_dir, file)
        assert predictions.columns == ["predicted"] and predictions.clients is None
        assert predictions.metrics["mse"] == pytest.approx(expected[client], rel=1e-5)


def test_rows_of_all_clients_are_predicted_each_by_its_own_model(result, tmp_path):
    header, *lines = lines_of_people(30)
    without_target = [line.rpartition(",")[0] for line in (header, *lines)]
    together = library.predict(result.run_dir, written(tmp_path / "rows.csv", without_target))
    assert together.clients == [0, 1, 2] and not together.metrics
    probabilities = np.stack([together.table[f"probability_{name}"].to_numpy() for name in ("no", "yes")])
    np.testing.assert_allclose(probabilities.sum(0), 1, rtol=1e-6)
    assert together.table["predicted"].to_pylist() == np.array(["no", "yes"])[probabilities.argmax(0)].tolist()

    for client, city in enumerate(["Bath", "Hull", "York"]):
        of_city = library.predict(result.run_dir, together.table.select(range(7)), client=city)
        assert of_city.clients == [client]
        np.testing.assert_allclose(
            of_city.table["probability_yes"].to_numpy()[client::3], probabilities[1, client::3], rtol=1e-5
        )


def test_a_new_clients_model_predicts_from_its_file(tmp_path):
    result = result_of(tmp_path, "fedavg-ft")
    file = written(tmp_path / "rows.csv", lines_of_people(40))
    made = library.trained_models(result.run_dir).personalize(*samples_in(file, library.trained_models(result.run_dir)))
    model_file = made.save(tmp_path / "mine.safetensors")

    predictions = library.predict(model_file, file)
    inputs = np.array(library.trained_models(result.run_dir).outline.data.inputs[:40])
    logits = made.model(torch.from_numpy(inputs)).detach()
    np.testing.assert_allclose(predictions.table["probability_yes"], logits.softmax(1)[:, 1], atol=1e-6)
    with pytest.raises(ConfigError, match=r"is one model, .* leave --client and --global out"):
        library.predict(model_file, file, client="Bath")
    words = [str(model_file), str(file), "--out", str(tmp_path / "out.csv")]
    assert f"predicted by the model in {model_file}." in raypfl("predict", *words).stdout


def test_the_command_writes_the_rows_as_they_were_and_prints_what_it_did(result, tmp_path):
    lines = lines_of_people(6)
    file = written(tmp_path / "rows.csv", lines)
    out = tmp_path / "out.csv"
    done = raypfl("predict", str(result.run_dir), str(file), "--out", str(out))
    assert done.exit_code == 0, done.output
    for part in ("6 rows of rows.csv, predicted by the personal models of 3 clients, Bath, Hull, York.", "accuracy"):
        assert part in done.stdout
    columns = "predicted, probability_no and probability_yes"
    assert done.stdout.endswith(f"\n{out} has these rows and the new columns {columns}.\n")

    rows = [line.rsplit(",", 3) for line in out.read_text().splitlines()]
    assert [row[0] for row in rows] == lines
    assert rows[0][1:] == ["predicted", "probability_no", "probability_yes"]

    words = ["--client", "1", "--out", str(tmp_path / "out.parquet"), "--json"]
    facts = json.loads(raypfl("predict", str(result.run_dir), str(file), *words).stdout)
    assert (facts["rows"], facts["clients"]) == (6, [1])
    assert pq.read_table(tmp_path / "out.parquet").column_names == [*lines[0].split(","), *facts["columns"]]


def test_rows_of_the_runs_own_table_are_said_to_be_trained_on(result, tmp_path, recwarn):
    root = Path(result.experiment.data.root)
    copied = written(tmp_path / "new.csv", lines_of_people(6))
    assert library.predict(result, copied).metrics and not recwarn
    with pytest.warns(UserWarning, match=r"^The run trained on rows of people\.csv, so its models do better on them"):
        library.predict(result, root)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("income", "salary"), r"rows\.csv has no column 'income', which the run was trained with; .*: city, age, sal"),
        (
            ("Bath", "Leeds"),
            r"Line 2 of rows\.csv has 'Leeds' for 'city'\. There is no client called .*--global\) \(also line",
        ),
        (("Bath", ""), r"Line 2 of rows\.csv has nothing for 'city'\. It names the row's client"),
        (("city", "town"), r"no column 'city', which names the client of a row: add it; or name one client"),
        (
            ("7b", "9z"),
            r"Line 3 of rows\.csv has '9z' for 'zip', but .* only these categories: 007, 7b, 8c \(also line",
        ),
        (("7b", ""), r"Line 3 of rows\.csv has no 'zip', but .* only these categories"),
        (("middle", "mid"), r"has 'mid' for 'level', which is not in data\.ordinal: low, middle, high"),
        (("Hull,", "Hull,?"), r"Line 3 of rows\.csv has '\?\d\d' for 'age', but the run was trained with numbers"),
        (("bought", "predicted"), r"rows\.csv has a column 'predicted', as the predictions would; rename it"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_their_place(result, tmp_path, change, sentence):
    lines = [line.replace(*change) for line in lines_of_people(30)]
    with pytest.raises((ConfigError, DataError), match=sentence):
        library.predict(result.run_dir, written(tmp_path / "rows.csv", lines))


def test_what_cannot_be_predicted_is_a_sentence(result, tmp_path):
    def refusal(*words: str, run: Path = result.run_dir) -> str:
        done = raypfl("predict", str(run), *words)
        assert done.exit_code == 2 and "Traceback" not in done.output, done.output
        return " ".join(done.stderr.split())

    file = str(written(tmp_path / "rows.csv", lines_of_people(3)))
    assert "There is no file" in refusal(str(tmp_path / "no.csv"))
    assert "is a folder; name the CSV or Parquet file" in refusal(str(tmp_path))
    assert "it must end in .csv or .parquet" in refusal(file, "--out", "predictions.xlsx")
    assert "name another file for the predictions" in refusal(file, "--out", file)
    assert "keep one of them" in refusal(file, "--client", "Bath", "--global")
    assert "There is no client called 'Leeds'" in refusal(file, "--client", "Leeds")
    assert "rows.csv has no rows" in refusal(str(written(tmp_path / "rows.csv", lines_of_people(0))))

    digits = library.run(experiment(tmp_path, method="fedavg-ft", rounds=1, evaluation__every=0))
    of_run = refusal(file, run=digits.run_dir)
    assert "trained on 'digits', and predictions are for rows of tables" in of_run
    assert "raypfl.trained_models(RUN).global_model()(x)." in of_run

    pixels = np.zeros((4, *library.trained_models(digits).outline.input_shape), dtype=np.uint8)
    made = library.trained_models(digits).personalize(pixels, np.zeros(4, dtype=np.int64))
    assert "in Python: raypfl.load_model(FILE)(x)." in refusal(file, run=made.save(tmp_path / "mine.safetensors"))
