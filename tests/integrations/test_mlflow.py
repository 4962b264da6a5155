"""MLflow records what a run tells its listeners, and its failures do not reach the run."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import raypfl
from raypfl.common.files import locked
from raypfl.engine.events import RunFinished
from raypfl.integrations.tracking.connection import how_to_view, opening_database, quiet_mlflow
from raypfl.integrations.tracking.listener import MLflowListener
from raypfl.integrations.tracking.run import RunRecord
from raypfl.integrations.tracking.run_ids import is_recorded
from tests.analysis.test_flntk import two_layer
from tests.support.processes import call
from tests.support.tracking import client_of, events, forget_mlflow_settings, record, runs_of, with_database


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep these tests from an MLflow that the environment or the working folder names."""
    forget_mlflow_settings(monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def folder(tmp_path: Path, mlflow_database: Path) -> Path:
    return with_database(tmp_path / "runs", mlflow_database)


def test_a_run_is_recorded_with_parameters_metrics_tags_and_tables(folder: Path) -> None:
    assert record(events(folder)) == []

    (run,) = runs_of(folder)
    client = client_of(folder)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "experiment: ditto 50.0 % s0")
    assert run.info.start_time <= run.info.end_time  # however long MLflow took to start

    assert run.data.params["method.lam"] == "0.75"
    assert run.data.metrics["accuracy/local/personal"] == 0.5
    assert run.data.metrics["worst_decile/local/personal"] == 0.2
    assert run.data.metrics["bytes_up_total"] == 30
    assert [point.value for point in client.get_metric_history(run.info.run_id, "loss")] == [1.0, 1 / 2, 1 / 3]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "bytes_down_total")] == [1, 2, 3]

    tags = {"method": "ditto", "data": "digits", "seed": "0", "metadata.actors": "2", "metadata.versions.raypfl": "1"}
    assert tags.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.note.content"] == "digits · 20 clients · dirichlet(alpha=0.3) · mlp\n"
    (dataset_input,) = run.inputs.dataset_inputs
    assert (dataset_input.dataset.name, dataset_input.dataset.digest) == ("digits", "f" * 36)

    assert run.data.tags["checkpoint"].endswith("000001-round-3")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"experiment.yaml", "rounds.parquet"}
    assert (folder / "mlartifacts" / run.info.run_id).is_dir()


@pytest.mark.thorough
def test_an_analysis_is_recorded_with_its_numbers_tables_figures_and_arrays(folder: Path) -> None:
    tracked = {"tracking__mlflow": "true", "tracking__models_mb": 0, "tracking__system_metrics": "false"}
    described = two_layer(folder.parent, rounds=2, output=folder, **tracked)
    result = raypfl.run(described, listeners=[MLflowListener(warn=pytest.fail)])

    (run,) = runs_of(folder)
    client = client_of(folder)
    history = client.get_metric_history(run.info.run_id, "method/flntk_error")
    logged = [row["value"] for row in result.logged.to_pylist() if row["name"] == "flntk_error"]
    assert [point.step for point in history] == [0, 1, 2] and [point.value for point in history] == logged
    assert run.data.metrics["method/flntk_lambda"] > 0

    artifacts = Path(client.download_artifacts(run.info.run_id, ""))
    assert len(pq.read_table(artifacts / "analysis-flntk_spectra.parquet")) == 2 * 24
    in_mlflow, in_folder = (
        load_file(folder / "analyses/flntk/kernels.safetensors")["finite"] for folder in (artifacts, result.run_dir)
    )
    assert torch.equal(in_mlflow, in_folder) and in_mlflow.shape == (24, 24)
    assert (artifacts / "analyses/flntk/diagnosis.json").exists() and not list(artifacts.rglob("client-*"))
    assert list(artifacts.glob("images/flntk*.png"))


@pytest.mark.parametrize(("status", "recorded"), [("stopped", "KILLED"), ("failed", "FAILED")])
def test_an_unfinished_run_is_recorded_as_such(folder: Path, status: str, recorded: str) -> None:
    record(events(folder, status=status))
    (run,) = runs_of(folder)
    assert run.info.status == recorded
    assert run.data.tags["error"] == "a client's loss is NaN"


def test_a_resumed_run_goes_on_in_its_mlflow_run(folder: Path) -> None:
    record(events(folder, range(1, 4), status="stopped"))
    assert record(events(folder, range(3, 6))) == []

    (run,) = runs_of(folder)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["bytes_up_total"] == 50  # round 3, done twice, is counted once
    for metric in ("loss", "seconds", "bytes_down_total"):
        history = client_of(folder).get_metric_history(run.info.run_id, metric)
        assert [point.step for point in history] == [1, 2, 3, 4, 5]
    evaluated = client_of(folder).get_metric_history(run.info.run_id, "accuracy/local/personal")
    assert [point.step for point in evaluated] == [3, 5]
    assert (run.data.params["rounds"], run.data.tags["resumed.rounds"]) == ("3", "5")
    assert "error" not in run.data.tags  # with which it was stopped


def test_a_run_that_goes_on_in_a_folder_of_another_machine_goes_on_in_its_mlflow_run(folder: Path) -> None:
    place = "s3://key:secret@it's/runs?scheme=http"
    for location in (place, "s3://it-s/runs"):
        record(events(folder, range(1, 4), status="stopped", location=location))
        (folder / "digits-ditto" / "mlflow_run_id").unlink()
    assert record(events(folder, range(4, 6), location=place)) == []

    first, second = runs_of(folder)
    assert (first.info.status, second.info.status) == ("FINISHED", "KILLED")
    assert (folder / "digits-ditto" / "mlflow_run_id").read_text() == first.info.run_id
    assert first.data.tags["checkpoint"] == "s3://it's/runs/digits-ditto/000001-round-3?scheme=http"

    (folder / "digits-ditto" / "mlflow_run_id").unlink()
    record(events(folder, location=place))  # begins again, so it is another run
    assert len(runs_of(folder)) == 3


def test_a_comparison_that_goes_on_in_a_folder_of_another_machine_goes_on_below_its_parent(folder: Path) -> None:
    for begin, end, status in ((1, 4, "stopped"), (4, 6, "finished")):
        machine = folder / f"machine-{begin}"
        with MLflowListener("kept", warn=pytest.fail, kept_in=machine) as listener:
            listener.describe("Two runs.")
            for name in ("a", "b"):
                for event in events(folder, range(begin, end), status, name, location=f"s3://runs/{name}"):
                    listener(event)
                (folder / name / "mlflow_run_id").unlink()

    (parent,) = runs_of(folder, "tags.kind = 'comparison'")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs_of(folder, "tags.kind = 'run'")} == {parent.info.run_id}
    assert (parent.info.status, (machine / "mlflow_run_id").read_text()) == ("FINISHED", parent.info.run_id)


def test_a_difference_that_a_continued_comparison_no_longer_has_loses_its_number(folder: Path) -> None:
    for best, other in (("a", "b"), ("b", "a")):
        with MLflowListener("kept", warn=pytest.fail, kept_in=folder) as listener:
            listener.describe(f"{best} is best.", {f"difference/local/{other}": -1.0})
            for event in events(folder, name="a"):
                listener(event)

    (parent,) = runs_of(folder, "tags.kind = 'comparison'")
    assert parent.data.metrics == pytest.approx(
        {"difference/local/a": -1.0, "difference/local/b": math.nan}, nan_ok=True
    )


def test_a_resumed_run_whose_mlflow_run_is_gone_gets_a_new_one(folder: Path) -> None:
    happened = events(folder)
    (folder / "digits-ditto" / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef")
    assert record(happened) == []
    assert len(runs_of(folder)) == 1


def test_a_run_that_two_servers_record_continues_on_each_and_keeps_the_id_on_the_first(folder: Path) -> None:
    other = with_database(folder / "other", folder / "mlflow.db")
    for uri in (None, f"sqlite:///{other}/mlflow.db", None, f"sqlite:///{other}/mlflow.db"):
        assert record(events(folder, uri=uri)) == []

    (first,) = runs_of(folder)
    assert len(runs_of(other)) == 1
    assert (folder / "digits-ditto" / "mlflow_run_id").read_text() == first.info.run_id


def test_one_listener_records_several_runs_and_attaches_a_file_to_each(folder: Path) -> None:
    listener = MLflowListener()
    for name in ("a", "b"):
        for event in events(folder, name=name):
            listener(event)
    (folder / "picture.png").write_bytes(b"png")
    listener.attach(folder / "picture.png")
    assert len(list(folder.rglob("mlartifacts/*/artifacts/picture.png"))) == 2


def test_a_comparison_with_a_run_that_was_stopped_before_it_wrote_its_results_is_recorded(folder: Path) -> None:
    warnings: list[str] = []
    with MLflowListener("sweep", warn=warnings.append, kept_in=folder) as tracked:
        for event in events(folder, status="stopped"):
            tracked(event)
    assert warnings == []
    assert {run.info.status for run in runs_of(folder)} == {"KILLED"} and len(runs_of(folder)) == 2


def test_the_link_opens_the_page_of_the_runs_among_experiments_of_models(folder: Path) -> None:
    listener = MLflowListener()
    happened = events(folder)
    for event in happened:
        listener(event)
    home = client_of(folder).get_experiment_by_name("raypfl")
    assert home.tags["mlflow.experimentKind"] == "custom_model_development"

    experiment = happened[0].experiment
    command = f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db"
    assert how_to_view(experiment) == command
    page = f"/#/experiments/{home.experiment_id}/runs"
    assert how_to_view(experiment, listener.experiment_id) == f"{command}  then http://127.0.0.1:5000{page}"

    apart = experiment.override(["tracking.uri=sqlite:////my runs/mlflow.db"])
    assert how_to_view(apart) == "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'"

    remote = experiment.override(["tracking.uri=https://me:secret@mlflow.example.org/"])
    assert how_to_view(remote, listener.experiment_id) == f"https://mlflow.example.org{page}"


def test_a_database_that_cannot_be_opened_has_recorded_nothing(tmp_path: Path) -> None:
    assert not is_recorded(raypfl.Experiment(tracking={"uri": "sqlite:////dev/null/mlflow.db"}), tmp_path)


def test_without_tracking_nothing_is_recorded(tmp_path: Path) -> None:
    assert record(events(tmp_path, mlflow=False)) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["digits-ditto", "elsewhere"]


def test_a_server_that_refuses_is_reported_once_without_its_password(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        warnings = record(events(folder, uri=f"http://me:secret@{address}"))

    assert len(warnings) == 1
    assert f"MLflow at http://{address} does not record the run" in warnings[0]
    assert f"`raypfl track {folder / 'digits-ditto'}` records them later" in warnings[0]
    assert "secret" not in warnings[0] and "continues" not in warnings[0]  # `raypfl track` says it of finished runs


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns"])
def test_a_store_of_files_is_refused_with_what_to_name_instead(folder: Path, uri: str) -> None:
    (warning,) = record(events(folder, uri=uri))
    assert f"MLflow at {uri} does not record the run: It is a folder" in warning
    assert "tracking.uri=sqlite:///" in warning and not (folder.parent / "elsewhere" / "mlruns").exists()


def test_a_run_that_mlflow_refuses_at_first_is_recorded_when_it_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    create_run = mlflow.MlflowClient.create_run
    refusals = iter([True])

    def refuse_once(self: Any, *args: Any, **options: Any) -> Any:
        if next(refusals, False):
            raise ConnectionError("come back later")
        return create_run(self, *args, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", refuse_once)
    assert len(record(events(folder))) == 1
    (run,) = runs_of(folder)
    assert (run.info.status, run.data.metrics["bytes_up_total"]) == ("FINISHED", 30)


def imports_of_tracking() -> tuple[bool, bool]:
    """Return whether importing the listener imports MLflow, and whether MLflow sends nothing after that."""
    # By these variables MLflow recognises tests and continuous integration, where it sends nothing anyway.
    for name in ("CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "MLFLOW_DISABLE_TELEMETRY"):
        os.environ.pop(name, None)
    imports_mlflow = "mlflow" in sys.modules  # this file imports the listener

    quiet_mlflow()
    from mlflow.telemetry.utils import is_telemetry_disabled

    return imports_mlflow, is_telemetry_disabled()


def test_importing_the_listener_imports_no_mlflow_and_recording_sends_no_telemetry() -> None:
    assert call(imports_of_tracking) == (False, True)


def test_a_client_of_a_server_writes_nothing_into_the_output_of_a_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = quiet_mlflow().MlflowClient("http://127.0.0.1:1")
    from mlflow.store.tracking.rest_store import RestStore

    answer = SimpleNamespace(
        data=SimpleNamespace(tags={}), info=SimpleNamespace(experiment_id="1", run_name="digits: ditto s0")
    )
    monkeypatch.setattr(RestStore, "update_run_info", lambda *arguments, **changes: None)
    monkeypatch.setattr(RestStore, "get_run", lambda *arguments: answer)
    client.set_terminated("0")
    assert capsys.readouterr().out == ""  # raypfl run --json prints its result there


def test_metrics_that_mlflow_stored_before_it_failed_are_not_recorded_twice(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    log_batch = mlflow.MlflowClient.log_batch
    failures = iter([True])

    def store_and_fail_once(self: Any, run_id: str, metrics: Any = (), **options: Any) -> None:
        log_batch(self, run_id, metrics=metrics, **options)
        if metrics and next(failures, False):
            raise ConnectionError("the answer was lost")

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", store_and_fail_once)
    assert len(record(events(folder))) == 1

    (run,) = runs_of(folder)
    history = client_of(folder).get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == [1, 2, 3]


def test_runs_can_be_searched_by_tags_parameters_data_and_metrics(folder: Path) -> None:
    listener = MLflowListener("lambdas", tags={"paper": "ours"})
    for name in ("a", "b"):
        for event in events(folder, name=name):
            listener(event)

    for filter in (
        "tags.method = 'ditto' and tags.partition = 'dirichlet' and tags.seed = '0'",
        "tags.kind = 'run' and tags.comparison = 'lambdas' and tags.paper = 'ours'",
        "tags.model = 'mlp' and params.`training.lr` = '0.1'",
        "datasets.name = 'digits' and attributes.status = 'FINISHED'",
        "tags.seed = '0' and metrics.`accuracy/local/personal` > 0.4",
    ):
        assert len(runs_of(folder, filter)) == 2, filter
    assert len(runs_of(folder, "tags.kind = 'comparison' and tags.paper = 'ours'")) == 1


def test_concurrent_runs_are_recorded_separately(folder: Path) -> None:
    with MLflowListener("together", warn=pytest.fail) as comparison:
        listeners = [comparison.beside() for _ in range(3)]
        events_of_runs = [events(folder, name=name) for name in ("a", "b", "c")]
        for simultaneous in zip(*events_of_runs, strict=True):
            for listener, event in zip(listeners, simultaneous, strict=True):
                if isinstance(event, RunFinished):
                    event = replace(event, status="failed")
                listener(event)

    (parent,) = runs_of(folder, "tags.kind = 'comparison'")
    children = runs_of(folder, "tags.kind = 'run'")
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert [run.data.metrics["bytes_up_total"] for run in children] == [30, 30, 30]
    assert parent.info.status == "FAILED"


def test_system_metrics_are_recorded_during_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.05")
    started, *rest = events(folder, system_metrics=True)
    listener = MLflowListener(warn=pytest.fail)
    listener(started)

    measured: dict[str, float] = {}
    deadline = time.monotonic() + 60
    while "system/cpu_utilization_percentage" not in measured and time.monotonic() < deadline:
        time.sleep(0.1)
        runs = runs_of(folder) if client_of(folder).get_experiment_by_name("raypfl") else []
        measured = runs[0].data.metrics if runs else {}

    for event in rest:
        listener(event)
    assert measured["system/system_memory_usage_percentage"] > 0
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]


def test_a_database_that_another_process_opens_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    open_record = RunRecord._open

    def noting_the_order(record: RunRecord) -> Any:
        order.append("opened")
        return open_record(record)

    monkeypatch.setattr(RunRecord, "_open", noting_the_order)
    listener = MLflowListener(warn=pytest.fail)
    started, *rest = events(folder)
    with locked(folder / "mlflow.db"):
        listener(started)
        time.sleep(0.2)
        order.append("released")
    for event in rest:
        listener(event)
    assert order == ["released", "opened"]


def test_a_database_exists_only_with_all_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.db import utils

    database = tmp_path / "mlflow.db"
    existed = []

    def interrupt(engine: Any) -> None:
        existed.append(database.exists())
        raise KeyboardInterrupt

    monkeypatch.setattr(utils, "_upgrade_db", interrupt)
    with pytest.raises(KeyboardInterrupt), opening_database(f"sqlite:///{database}"):
        pass
    assert existed == [False]
    assert [file.name for file in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.slow
def test_runs_that_make_the_database_at_the_same_time_are_all_recorded(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.support.tracking import events, record
folder = Path(sys.argv[1])
happened = events(folder, name=sys.argv[2])
sys.stdin.readline()
print(record(happened), end="")
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    root = str(Path(__file__).parents[2])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([*command, name], cwd=root, **pipes) for name in ("a", "b", "c")]  # type: ignore[call-overload]
    for run in runs:
        run.stdin.write("now\n")
        run.stdin.flush()
    assert [run.communicate()[0] for run in runs] == ["[]"] * 3
    assert len(runs_of(tmp_path)) == 3
