"""Many runs of one process that record in MLflow at the same time."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from mlflow import MlflowClient

from raypfl.integrations.tracking.connection import opening_database


def test_more_runs_than_sqlalchemy_allows_connections_by_itself_can_record_at_once(
    tmp_path: Path, mlflow_database: Path
):
    uri = f"sqlite:///{shutil.copy(mlflow_database, tmp_path / 'mlflow.db')}"
    with opening_database(uri):
        engine = MlflowClient(uri)._tracking_client.store.engine
    with contextlib.ExitStack() as connections:
        # The sixteenth would wait for half a minute, and then fail.
        assert not any(connections.enter_context(engine.connect()).closed for _ in range(40))
