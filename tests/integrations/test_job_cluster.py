"""Jobs on a real cluster, with its dashboard and a token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypfl

ROOT = Path(__file__).parents[2]
CLUSTER = """
import subprocess, sys
cluster = subprocess.Popen(["ray", "start", "--head", "--block", *sys.argv[1:]], stdout=subprocess.DEVNULL)
sys.stdin.read()
cluster.terminate()
cluster.wait()
"""
METHOD = """
from pathlib import Path
import time
from raypfl.methods import FedAvg

class Mine(FedAvg):
    slow: str = ""  # a file; as long as it exists, rounds take seconds

    def round(self, server, cohort):
        time.sleep(3 * Path(self.slow).is_file())
        super().round(server, cohort)

class Failing(FedAvg):
    def train(self, clients, theta):
        raise ValueError("no")
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of the cluster and of those who submit to it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": path,
        "COLUMNS": "300",
        "RAY_raylet_start_wait_time_s": "120",
    }


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """The address of a cluster of two CPUs, whose ports no other Ray of this machine uses.

    The cluster ends when the standard input of its starter closes, also if the tests are killed.
    """
    with contextlib.ExitStack() as open_sockets:  # all at once, so that the four ports differ
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(4)]
        for unused in sockets:
            unused.bind(("127.0.0.1", 0))
        head, page, agent, clients = (unused.getsockname()[1] for unused in sockets)

    folder = tempfile.mkdtemp(prefix="raypfl-jobs-", dir="/tmp")  # the paths of sockets must be short
    options = [f"--port={head}", f"--dashboard-port={page}", f"--dashboard-agent-listen-port={agent}"]
    options += [f"--ray-client-server-port={clients}", "--min-worker-port=0", "--max-worker-port=0"]
    options += ["--num-cpus=2", f"--temp-dir={folder}", "--object-store-memory=100000000", "--disable-usage-stats"]

    command = [sys.executable, "-c", CLUSTER, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdin
        yield _wait_for_job_server(f"http://127.0.0.1:{page}")
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def _wait_for_job_server(address: str) -> str:
    """Return the address once a job server answers there."""
    from raypfl.integrations.jobs.cluster import Unreachable, client

    deadline = time.monotonic() + 120
    while True:
        try:
            client(address).list_jobs()
            return address
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(1)


@pytest.fixture
def command(tmp_path: Path, address: str, environment: dict[str, str]):
    """A function that runs a raypfl command against the cluster, in a folder with a description and a module."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "job_cluster_methods.py").write_text(METHOD)
    (tmp_path / "home" / "mine.yaml").write_text(
        "rounds: 4\nmethod: job_cluster_methods:Mine\npartition: {name: dirichlet, clients: 6, alpha: 0.3}\n"
        "model: {name: mlp, hidden: [8]}\nevaluation: {every: 4}\ncheckpoint: {every: 1}\ntracking: {mlflow: false}\n"
        f"output: {tmp_path / 'runs'}\n"
    )

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "raypfl", *words, "--address", address]
        env = {**environment, **variables}
        return subprocess.run(line, cwd=tmp_path / "home", env=env, capture_output=True, text=True, timeout=300)

    return run


def hash_of(folder: Path) -> str:
    return json.loads((folder / "summary.json").read_text())["weights_hash"]


def inline_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *changes: str) -> str:
    """The hash of the same run in this process."""
    monkeypatch.syspath_prepend(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    described = raypfl.Experiment.from_yaml(tmp_path / "home" / "mine.yaml")
    inline = described.override(["engine.backend=inline", *changes])
    return raypfl.run(inline, run_dir=tmp_path / "inline").weights_hash


@pytest.mark.slow
def test_a_job_ends_with_the_bits_of_an_inline_run_and_a_failed_one_with_its_exit_code(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
):
    submitted = command("submit", "run", "mine.yaml")
    assert submitted.returncode == 0, submitted.stderr + submitted.stdout
    assert "round 4/4" in submitted.stdout
    assert "job_cluster_methods.py, mine.yaml (2 files" in submitted.stderr
    (folder,) = (tmp_path / "runs").glob("mine-*")
    assert hash_of(folder) == inline_hash(tmp_path, monkeypatch)

    failed = command("submit", "run", "mine.yaml", "method=job_cluster_methods:Failing", "engine.backend=inline")
    assert failed.returncode == 1
    assert "ValueError: no" in failed.stdout
    assert "ended with exit code 1" in failed.stderr

    listed = command("jobs").stdout
    assert re.search(rf"{folder.name} +SUCCEEDED", listed)
    assert re.search(r"mine-\S+ +FAILED", listed)

    refused = command("jobs", RAY_AUTH_TOKEN="0" * 64)
    assert refused.returncode == 2
    assert "refuses this token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH" in refused.stderr


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_its_rounds_and_continues_when_it_is_submitted_again(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "runs" / "kept"
    slow = tmp_path / "slow"
    slow.touch()
    words = ["submit", "run", "mine.yaml", "rounds=60", f"method.slow={slow}", "--run-dir", str(folder)]
    detached = command(*words, "--detach")
    assert detached.returncode == 0, detached.stderr
    job = re.search(r"Submitted (\S+)", detached.stderr)[1]

    deadline = time.monotonic() + 300
    while not re.search(r"round ([2-9]|\d\d)/60", command("logs", job).stdout):
        assert time.monotonic() < deadline
    assert command("stop", job).stdout == f"{job}: STOPPED\n"
    log = command("logs", job, "--follow")
    assert log.returncode == 130
    assert "Stopping: the finished rounds are being saved" in log.stdout
    saved = json.loads((folder / "summary.json").read_text())["round"]
    assert 2 <= saved < 60

    slow.unlink()
    submitted_again = command(*words)
    assert submitted_again.returncode == 0, submitted_again.stderr + submitted_again.stdout
    assert min(map(int, re.findall(r"round (\d+)/60", submitted_again.stdout))) > saved
    assert hash_of(folder) == inline_hash(tmp_path, monkeypatch, "rounds=60")
