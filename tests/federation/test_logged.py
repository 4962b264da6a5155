"""What a method logs is in the tables, the report and MLflow, once, and changes nothing else."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import raypfl
from raypfl.common.errors import MethodError
from raypfl.engine.events import RoundFinished
from raypfl.federation.logged import png
from raypfl.integrations.tracking.listener import track
from raypfl.results.drawing import logged_picture
from raypfl.results.report import write
from tests.federation.test_cohort import SIZES, exchange, federation, ids_of
from tests.support.runs import Interrupt, experiment, same_tables
from tests.support.tracking import client_of, runs_of, with_database

LOGS = "tests.support.federated_methods:Logs"


def logging(tmp_path: Path, never_lost: bool = True, **changes) -> raypfl.Experiment:
    marks = tmp_path / f"marks-{len(list(tmp_path.iterdir()))}"
    marks.mkdir()
    for round in (4, 5) if never_lost else ():
        (marks / f"lost states {round}").touch()
    return experiment(tmp_path, method=LOGS, method__marks=marks, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logged")


@pytest.fixture(scope="module")
def whole(folder: Path) -> raypfl.Result:
    return raypfl.run(logging(folder))


@pytest.mark.parametrize("group_size", [None, 1, 2])
def test_logged_numbers_of_clients_become_their_cohort_mean_uncharged(group_size):
    def answer(clients):
        clients.log(id=ids_of(clients) + 9)
        clients.log(id=ids_of(clients), samples=clients.num_samples)
        clients.log(some=torch.where(ids_of(clients) > 0, ids_of(clients), torch.nan), none=ids_of(clients) / 0 * 0)

    fed = federation(answer, group_size=group_size)
    cohort = fed.cohort([0, 1, 4])
    cohort.run(fed.method.reply)
    assert cohort.logged.values == {
        "id": pytest.approx(5 / 3),
        "some": 2.5,
        "samples": pytest.approx(np.mean([SIZES[k] for k in (0, 1, 4)])),
    }
    assert fed.ledger.entries == []


def test_a_runs_tables_have_what_its_method_logged_by_round(whole):
    logged = {(row["round"], row["name"]): row["value"] for row in whole.logged.to_pylist()}
    assert set(logged) == {(r, n) for r in range(1, 7) for n in ("norm", "tenth", "samples", "seen")}
    assert [logged[r, "tenth"] for r in range(1, 7)] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert logged[6, "norm"] == pytest.approx(float(whole.global_model().norm()))
    assert whole.analysis["segments"].to_pydict() == {
        "round": [1, 1, 3, 3, 5, 5],
        "round_name": ["r1", "x", "r3", "x", "r5", "x"],
        "entries": [1, 2, 3, 2, 5, 2],
    }
    assert whole.images.select(["round", "name"]).to_pydict() == {"round": [1, 3, 5], "name": ["weights"] * 3}

    with Image.open(whole.images["file"][0].as_py()) as image:
        assert image.size == (8, 8)


def test_logging_changes_neither_weights_nor_ledger(folder, whole):
    silent = raypfl.run(experiment(folder))
    assert silent.weights_hash == whole.weights_hash and same_tables(silent, whole)
    assert silent.logged.num_rows == silent.images.num_rows == 0 and silent.analysis == {}


def same_log(a: raypfl.Result, b: raypfl.Result) -> bool:
    def seen(result):
        return [Path(file).read_bytes() for file in result.images["file"].to_pylist()]

    return a.logged.equals(b.logged) and a.analysis == b.analysis and seen(a) == seen(b)


def test_a_run_that_is_stopped_or_sent_back_logs_every_round_once(tmp_path, whole):
    stopped = raypfl.run(logging(tmp_path), listeners=[Interrupt(3)])
    assert stopped.analysis["segments"]["round"].to_pylist() == [1, 1, 3, 3]
    assert same_log(raypfl.resume(stopped.run_dir), whole)

    heard = []
    sent_back = raypfl.run(logging(tmp_path, never_lost=False, checkpoint__every=3), listeners=[heard.append])
    assert sent_back.weights_hash == whole.weights_hash and same_log(sent_back, whole)

    logged_rounds = [event.logged for event in heard if isinstance(event, RoundFinished)]
    assert [logged.values["tenth"] for logged in logged_rounds] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert [sorted(logged.images) for logged in logged_rounds] == [["weights"], []] * 3


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (lambda c: c.log(loss=torch.zeros(3)), "takes one number for 'loss', not a Tensor of shape [3]"),
        (lambda c: c.log(loss="high"), "takes one number for 'loss', not a str"),
        (lambda c: c.log(**{"a/b": 1}), "'a/b' cannot be logged under this name"),
        (
            lambda c: c.log_table("t", {"a": [1, 2], "b": [1]}),
            "columns of one length; the lengths are {'a': 2, 'b': 1}",
        ),
        (lambda c: c.log_table("t", {}), "needs at least one column, and columns of one length; the lengths are {}"),
        (lambda c: c.log_table("t", {"a": [[1]]}), "The column 'a' of the table 't' is a list of shape [1, 1]"),
        (lambda c: c.log_table("t", {"round": [1]}), "under any name but 'round'"),
        (lambda c: c.log_table("old", {"a": [1.5]}), "had the columns {'a': 'int64'} in earlier rounds"),
        (lambda c: c.log_table("words", {"a": [1]}), "had the columns {'a': 'text'} in earlier rounds"),
        (lambda c: c.log_table("t", {"a": [2**63]}), "has 9223372036854775808, but whole numbers must be from -2^63"),
        (lambda c: c.log_table("t", {"a": [1, 10**30]}), "has 1000000000000000000000000000000, but whole numbers"),
        (lambda c: c.log_table("t", [1, 2]), "takes columns by their names for 't', as in"),
        (lambda c: c.log_table("old", {"b": [1]}), "had the columns {'a': 'int64'} in earlier rounds"),
        (lambda c: c.log_image("i", torch.zeros(1, 2, 4, 4)), "not [1, 2, 4, 4]"),
        (lambda c: c.log_image("i", torch.zeros(3, 4, 4)), "not [3, 4, 4]"),
    ],
)
def test_values_that_cannot_be_logged_are_refused_in_a_sentence(log, sentence):
    cohort = federation(lambda clients: None).cohort()
    cohort._earlier_kinds = {"old": {"a": "int64"}, "words": {"a": "text"}}
    with pytest.raises(MethodError, match=re.escape(sentence)):
        log(cohort)


def test_each_client_logs_a_number():
    wanted = r"one number for each of the group's 5 clients for 'x', a tensor of shape \[5\], not "
    for value, given in [(torch.zeros(5, 2), r"\[5, 2\]"), (3.0, "a float"), ([1.0] * 5, "a list")]:
        with pytest.raises(MethodError, match=f"{wanted}{given}"):
            exchange(federation(lambda clients, value=value: clients.log(x=value)))


def test_integers_fit_a_column_of_floats():
    cohort = federation(lambda clients: None).cohort()
    cohort._earlier_kinds = {"t": {"a": "float64"}}
    cohort.log_table("t", {"a": [1, 2]})
    assert cohort.logged.tables["t"]["a"].dtype == float


def test_numbers_in_half_precision_are_logged_like_others():
    cohort = federation(lambda clients: None).cohort()
    cohort.log(loss=torch.tensor(0.75, dtype=torch.bfloat16))
    cohort.log_table("t", {"a": torch.tensor([0.5, 2], dtype=torch.bfloat16)})
    assert cohort.logged.values == {"loss": 0.75} and cohort.logged.tables["t"]["a"].tolist() == [0.5, 2]


def test_images_lie_in_a_grid_with_a_gap():
    images = torch.rand(3, 3, 4, 5)
    with Image.open(io.BytesIO(png("i", images))) as image:
        pixels = np.asarray(image)
    assert pixels.shape == (9, 11, 3)
    for i, (top, left) in enumerate([(0, 0), (0, 6), (5, 0)]):
        cut = pixels[top : top + 4, left : left + 5].transpose(2, 0, 1)
        assert np.array_equal(cut, (images[i] * 255).round().numpy().astype(np.uint8))
    assert (pixels[4] == 255).all() and (pixels[5:, 6:] == 255).all()


@pytest.mark.thorough
def test_the_report_shows_curves_tables_and_images(tmp_path, whole):
    page = write([whole], tmp_path / "report.html").read_text("utf-8")
    assert "What methods logged" in page and "Lines of norm by round" in page
    assert re.search(r"<td>r5</td><td>5</td>", page) and "data:image/png;base64," in page


@pytest.mark.usefixtures("without_figures")
def test_a_report_without_logged_values_has_no_section_for_them(tmp_path):
    silent = raypfl.run(experiment(tmp_path, rounds=1))
    assert "What methods logged" not in write([silent], tmp_path / "report.html").read_text("utf-8")


@pytest.mark.thorough
def test_mlflow_has_numbers_by_round_tables_and_images(tmp_path, monkeypatch, mlflow_database, whole):
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    home = with_database(tmp_path / "runs", mlflow_database)
    changes = ["tracking.system_metrics=false", "tracking.models_mb=0", "tracking.mlflow=true"]
    live = raypfl.run(logging(tmp_path).override(changes), listeners=[raypfl.MLflowListener()])
    (live.run_dir / "mlflow_run_id").unlink()
    track(live.run_dir)  # the same from the folder
    client = client_of(home)
    runs = runs_of(home)

    assert len(runs) == 2

    for run in runs:
        points = client.get_metric_history(run.info.run_id, "method/tenth")
        assert [(point.step, point.value) for point in points] == [(r, r / 10) for r in range(1, 7)]
        shown = client.download_artifacts(run.info.run_id, "analysis-segments.json", str(tmp_path))
        assert '"r5"' in Path(shown).read_text()
        assert "analysis-segments.json" in run.data.tags["mlflow.loggedArtifacts"]
        images = [file.path for file in client.list_artifacts(run.info.run_id, "images")]
        assert sorted({re.search(r"\Wstep\W(\d+)", path)[1] for path in images}) == ["1", "3", "5"]
        table = client.download_artifacts(run.info.run_id, "analysis-segments.parquet", str(tmp_path))
        assert pq.ParquetFile(table).read().equals(pa.table(whole.analysis["segments"]))


def test_a_picture_shows_the_logged_images_over_rounds(whole, tmp_path):
    (strip,) = logged_picture.strips_to_draw([whole])
    assert (strip.group.label, strip.name) == ("Logs", "weights")
    odd = whole.images["round"].to_pylist()
    assert strip.rounds[0] == odd[0] and strip.rounds[-1] == odd[-1] and set(strip.rounds) <= set(odd)
    path = logged_picture.draw([whole], tmp_path / "images.png")
    height, width = Image.open(path).size[::-1]
    assert height > len(strip.rounds) * width  # square images, one below the other
