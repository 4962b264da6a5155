"""Reading files runs no code that they contain, and a cluster takes no connection without its token."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import raypfl
from raypfl.common.errors import RaypflError
from raypfl.engine.backends import cluster
from raypfl.runs.result import RunResult
from tests.support.runs import experiment

ROOT = Path(raypfl.__file__).parent
DANGEROUS = {"pickle", "cloudpickle", "torch", "np", "numpy", "joblib", "dill", "yaml", "marshal", "shelve"}
MESSAGES = {
    "engine/backends/client_actor.py",
    "engine/backends/server_actor.py",
    "engine/backends/shipment.py",
    "federation/exchange/backend.py",
    "runs/several/processes.py",
    "integrations/tuning/search.py",
    "integrations/tuning/trial_log.py",
}
"""Files that unpickle, with `loads`, what a process of the same run sent over Ray or saved with Tune."""
FILES = {
    "experiment/yaml_text.py": "Loader=_Loader",
    "data/datasets/readers/npy.py": "allow_pickle=False",
    "models/weights.py": "weights_only=True",
    "trained/samples.py": "allow_pickle=False",
}
"""Files that read formats which could hold code, and the argument that keeps it from being run."""


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_pickles_are_read_from_the_runs_own_processes_alone():
    unexpected = []
    for file in sorted(ROOT.rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value).removeprefix("ray.")
            if owner not in DANGEROUS or node.func.attr not in ("load", "loads", "open", "Unpickler", "unsafe_load"):
                continue
            safe = FILES.get(name, "")
            if not (safe and safe in ast.unparse(node)) and not (name in MESSAGES and node.func.attr == "loads"):
                unexpected.append(f"{name}: {ast.unparse(node)}")
    assert not unexpected


def test_no_file_of_a_runs_folder_is_unpickled(tmp_path: Path):
    marker = tmp_path / "marker"
    with contextlib.suppress(pickle.PickleError):
        pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists(), "unpickling would leave no trace, so this test could not fail"
    marker.rmdir()

    small = {"partition__clients": 4, "cohort__size": 2, "training__steps": 1}
    run_dir = raypfl.run(experiment(tmp_path, rounds=2, **small), run_dir=tmp_path / "run").run_dir
    files = [file.relative_to(run_dir) for file in run_dir.rglob("*") if file.is_file()]
    assert len(files) > 6

    copy = tmp_path / "copy"
    for name in files:
        shutil.copytree(run_dir, copy)
        (copy / name).write_bytes(pickle.dumps(Hostile(marker)))
        with contextlib.suppress(Exception):
            RunResult.load(copy).server_state()
        with contextlib.suppress(Exception):
            raypfl.resume(copy, overrides=["rounds=3"])
        assert not marker.exists(), name
        shutil.rmtree(copy)


def test_weights_are_read_without_running_code(tmp_path: Path):
    file = tmp_path / "weights.pt"
    torch.save({"weight": Hostile(tmp_path / "marker")}, file)
    with pytest.raises(RaypflError):
        raypfl.run(experiment(tmp_path, model__weights=file))
    assert not (tmp_path / "marker").exists()


def test_a_local_cluster_gets_a_token_that_only_this_process_knows_and_another_one_is_asked_for_by_token(monkeypatch):
    def after(local: bool, **before: str) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", before)
        cluster._authenticate(local)
        return os.environ

    first = after(local=True)
    second = after(local=True)
    assert first["RAY_AUTH_MODE"] == "token" and len(first["RAY_AUTH_TOKEN"]) == 64
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert after(local=False) == {"RAY_AUTH_MODE": "token"}

    for chosen_by_user in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/file"}):
        assert after(local=True, **chosen_by_user) == chosen_by_user
