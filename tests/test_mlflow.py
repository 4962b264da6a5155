"""What a run tells its listeners is found again in MLflow, and MLflow's troubles are not the run's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypfl.config import Experiment
from raypfl.federation.events import Checkpointed, Evaluated, Event, RoundFinished, RunFinished, RunStarted
from raypfl.tracking.mlflow import MLflowListener, tracking_uri

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")  # inside MLflow


def events(folder: Path, rounds: range = range(1, 4), status: str = "finished", **tracking: Any) -> list[Event]:
    settings: dict[str, Any] = {"method": "ditto", "tracking": tracking}
    experiment = Experiment(rounds=rounds.stop - 1, output=str(folder), **settings)
    run_dir = folder / "digits-ditto"
    run_dir.mkdir(exist_ok=True)
    score = {"accuracy": 0.5, "std": 0.1, "worst_decile": 0.2, "weighted": 0.6, "loss": 1.5}
    happened: list[Event] = [
        RunStarted(
            "digits-ditto", str(run_dir), experiment, {"actors": 2, "versions": {"raypfl": "1"}}, rounds.start - 1
        )
    ]
    for round in rounds:
        happened.append(RoundFinished(round, 1.0 / round, 0.1, 10, 20, clients=5, dropped=0, failed=0))
    happened.append(Evaluated(rounds.stop - 1, [{"protocol": "local", "model": "personal", **score}]))
    happened.append(Checkpointed(rounds.stop - 1, f"{run_dir}/checkpoints/000001-round-3"))
    tables = {"rounds": pa.table({"round": [1]})}
    happened.append(RunFinished(status, rounds.stop - 1, "abc", "a client's loss is NaN", tables))  # type: ignore[arg-type]
    return happened


def record(happened: list[Event]) -> list[str]:
    """Tell a listener what happened; its warnings."""
    warnings: list[str] = []
    listener = MLflowListener(warnings.append)
    for event in happened:
        listener(event)
    return warnings


def client_of(folder: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(tracking_uri(Experiment(output=str(folder))))


def runs_of(folder: Path) -> list[Any]:
    client = client_of(folder)
    return list(client.search_runs([client.get_experiment_by_name("raypfl").experiment_id]))


def test_a_run_is_recorded_with_parameters_metrics_tags_and_tables(tmp_path: Path) -> None:
    assert record(events(tmp_path)) == []
    (run,) = runs_of(tmp_path)
    client = client_of(tmp_path)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "digits-ditto")
    assert run.data.params["method.lam"] == "0.75"
    assert run.data.metrics["accuracy/local/personal"] == 0.5
    assert run.data.metrics["worst_decile/local/personal"] == 0.2
    assert run.data.metrics["bytes_up_total"] == 30
    assert [point.value for point in client.get_metric_history(run.info.run_id, "loss")] == [1.0, 1 / 2, 1 / 3]
    assert [point.step for point in client.get_metric_history(run.info.run_id, "bytes_down_total")] == [1, 2, 3]
    expected = {"method": "ditto", "data": "digits", "seed": "0", "facts.actors": "2", "facts.versions.raypfl": "1"}
    assert expected.items() <= run.data.tags.items()
    assert run.data.tags["checkpoint"].endswith("000001-round-3")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"experiment.yaml", "rounds.parquet"}
    assert (tmp_path / "mlartifacts" / run.info.run_id).is_dir()


@pytest.mark.parametrize(("status", "recorded"), [("stopped", "KILLED"), ("failed", "FAILED")])
def test_a_run_that_does_not_finish_says_so(tmp_path: Path, status: str, recorded: str) -> None:
    record(events(tmp_path, status=status))
    (run,) = runs_of(tmp_path)
    assert run.info.status == recorded
    assert run.data.tags["error"] == "a client's loss is NaN"


def test_a_resumed_run_goes_on_in_its_mlflow_run(tmp_path: Path) -> None:
    record(events(tmp_path, range(1, 4), status="stopped"))
    assert record(events(tmp_path, range(3, 6))) == []
    (run,) = runs_of(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["bytes_up_total"] == 50  # round 3, done twice, is counted once
    assert (run.data.params["rounds"], run.data.tags["resumed.rounds"]) == ("3", "5")


def test_a_resumed_run_whose_mlflow_run_is_gone_gets_a_new_one(tmp_path: Path) -> None:
    happened = events(tmp_path)
    (tmp_path / "digits-ditto" / "mlflow_run_id").write_text("0123456789abcdef0123456789abcdef")
    assert record(happened) == []
    assert len(runs_of(tmp_path)) == 1


def test_one_listener_records_several_runs_and_attaches_a_file_to_each(tmp_path: Path) -> None:
    listener = MLflowListener()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for event in events(tmp_path / name, uri=f"sqlite:///{tmp_path}/shared.db"):
            listener(event)
    (tmp_path / "picture.png").write_bytes(b"png")
    listener.attach(tmp_path / "picture.png")
    assert len(list(tmp_path.rglob("mlartifacts/*/artifacts/picture.png"))) == 2


def test_without_tracking_nothing_is_recorded(tmp_path: Path) -> None:
    assert record(events(tmp_path, mlflow=False)) == []
    assert [file.name for file in tmp_path.iterdir()] == ["digits-ditto"]


def test_a_server_that_refuses_is_reported_once_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        warnings = record(events(tmp_path, uri=f"http://me:secret@{address}"))
    assert len(warnings) == 1
    assert f"MLflow at http://{address} does not record the run" in warnings[0]
    assert str(tmp_path / "digits-ditto") in warnings[0]
    assert "secret" not in warnings[0]


def test_what_mlflow_refuses_at_first_is_recorded_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    create_run, refusals = mlflow.MlflowClient.create_run, iter([True])

    def moody(self: Any, *args: Any, **options: Any) -> Any:
        if next(refusals, False):
            raise ConnectionError("come back later")
        return create_run(self, *args, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "create_run", moody)
    assert len(record(events(tmp_path))) == 1
    (run,) = runs_of(tmp_path)
    assert (run.info.status, run.data.metrics["bytes_up_total"]) == ("FINISHED", 30)


def test_importing_the_listener_imports_no_mlflow_and_recording_sends_no_telemetry() -> None:
    program = """
import sys
import raypfl.tracking.mlflow as ours
assert "mlflow" not in sys.modules
ours._mlflow()
from mlflow.telemetry.utils import is_telemetry_disabled
assert is_telemetry_disabled()
"""
    # MLflow is silent of its own accord where it sees a test or a continuous integration at work.
    looks = {"CI", "PYTEST_CURRENT_TEST", "GITHUB_ACTIONS", "MLFLOW_DISABLE_TELEMETRY"}
    bare = {key: value for key, value in os.environ.items() if key not in looks}
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], env={**bare, "PYTHONPATH": root}, check=True)
