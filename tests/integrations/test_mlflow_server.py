"""An MLflow server that dies during a run does not disturb it; what the server missed is recorded later."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raypfl
from raypfl.engine.events import Event, RoundFinished
from raypfl.integrations.tracking.listener import track
from tests.support.ports import free_port
from tests.support.runs import experiment
from tests.support.tracking import with_database

pytestmark = pytest.mark.slow


class Server:
    """An MLflow server in processes of its own."""

    def __init__(self, folder: Path):
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        store = [f"--backend-store-uri=sqlite:///{self._folder}/mlflow.db", f"--artifacts-destination={self._folder}"]
        command = [sys.executable, "-m", "mlflow", "server", f"--port={self.port}", "--workers=1", *store]
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.2)
        raise TimeoutError

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def test_a_server_that_dies_causes_one_warning_and_gets_the_rest_later(tmp_path: Path, mlflow_database: Path):
    server = Server(with_database(tmp_path, mlflow_database))
    changes = {"tracking__mlflow": True, "tracking__uri": server.uri, "tracking__system_metrics": False}
    warnings: list[str] = []

    def kill_server(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round == 3:
            time.sleep(2)  # the listener records in a thread of its own
            server.kill()

    with raypfl.MLflowListener(warn=warnings.append) as listener:
        result = raypfl.run(experiment(tmp_path, **changes), listeners=[listener, kill_server])

    assert result.status == "finished"
    assert result.weights_hash == raypfl.run(experiment(tmp_path)).weights_hash
    assert len(warnings) == 1 and f"MLflow at {server.uri} does not record the run" in warnings[0]

    server.start()
    try:
        track(result.run_dir)
        import mlflow

        client = mlflow.MlflowClient(server.uri)
        (run,) = client.search_runs(
            [mlflow_experiment.experiment_id for mlflow_experiment in client.search_experiments()]
        )
        assert run.info.status == "FINISHED"
        losses = client.get_metric_history(run.info.run_id, "loss")
        assert [point.step for point in losses] == [1, 2, 3, 4, 5, 6]
    finally:
        server.kill()
