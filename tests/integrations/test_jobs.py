"""Jobs without a cluster: what goes along, what is refused, and how one is followed whatever becomes of the stream."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
from ray.job_submission import JobStatus

from raypfl.cli import jobs as command
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.integrations.jobs import following, package
from tests.support.command import raypfl

DESCRIPTION = "rounds: 2\nmethod: job_methods:Mine\noutput: /shared/runs\n"
METHOD = (
    "from job_layers import SCALE\nfrom raypfl.methods import FedAvg\nclass Mine(FedAvg):\n    scale: float = SCALE\n"
)

LOST = object()


class Server:
    """A job server: `streams` are what a log's stream brings each time.

    An exception is how it breaks, and :data:`LOST` a connection that is lost without an end.
    """

    def __init__(self, *streams: list, ends: JobStatus = JobStatus.SUCCEEDED, code: int | None = 0, message: str = ""):
        self.streams, self.end, self.code, self.message = list(streams), ends, code, message
        self.submitted: dict = {}
        self.packed: dict[str, str] = {}

    def submit_job(self, **given) -> None:
        folder = Path(given["runtime_env"]["working_dir"])
        self.packed = {
            file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()
        }
        self.submitted = given

    async def tail_job_logs(self, job: str):
        for piece in self.streams.pop(0) if self.streams else ():
            if piece is LOST:
                await asyncio.sleep(3600)
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def get_job_info(self, job: str) -> SimpleNamespace:
        status = JobStatus.RUNNING if self.streams else self.end
        return SimpleNamespace(status=status, driver_exit_code=self.code, message=self.message)

    def get_job_logs(self, job: str) -> str:
        return "one\ntwo\nthree\n"

    @property
    def words(self) -> str:
        return self.submitted["entrypoint"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server(["one\ntwo\nthree\n"])
    monkeypatch.setattr(command, "client", lambda address: made)
    monkeypatch.setattr(following, "POLL", 0.0)
    return made


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project: a description, a module that it names, one that this imports, and much that no job needs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    for name, text in {
        "mine.yaml": DESCRIPTION,
        "job_methods.py": METHOD,
        "job_layers.py": "SCALE = 1.0\n",
        "secret.txt": "",
        "job_package/__init__.py": "",
        "job_package/late.py": "def build():\n    import job_late\n",
        "job_package/table.csv": "1,2\n",
        "job_package/.git/config": "",
        "job_package/.env": "",
        "job_package/venv/pyvenv.cfg": "",
        "job_package/venv/lib.py": "",
        "job_package/__pycache__/late.pyc": "",
        "job_package/runs/a/experiment.yaml": "",
        "job_package/runs/a/metadata.json": "",
        "job_late.py": "import numpy, json\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("job_")]:
        del sys.modules[name]


def refused(*words: str) -> str:
    result = raypfl("submit", *words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_job_takes_along_its_description_and_the_modules_that_it_needs_and_nothing_else(server: Server):
    assert raypfl("submit", "run", "mine.yaml", "rounds=3", "--quiet").exit_code == 0
    assert set(server.packed) == {"mine.yaml", "job_methods.py", "job_layers.py"}
    job = server.submitted["submission_id"]
    start = "exec python -m raypfl run mine.yaml rounds=3 --quiet --run-dir /shared/runs/"
    assert server.words == f"{start}{job}"


def test_a_package_goes_along_without_environments_runs_caches_and_hidden_files():
    assert set(package.collect([], ["job_package.late"])) == {
        "job_package/__init__.py",
        "job_package/late.py",
        "job_package/table.csv",
        "job_late.py",
    }


def test_the_folder_that_is_given_is_the_run_s_and_a_job_submitted_again_says_the_same(server: Server):
    words = ["submit", "run", "digits", "output=/shared", "--method", "fedavg", "--run-dir", "/shared/mine"]
    assert raypfl(*words).exit_code == 0
    assert server.words == "exec python -m raypfl run digits output=/shared --method fedavg --run-dir /shared/mine"


def test_sweeps_and_studies_take_the_files_that_they_name(server: Server, home: Path):
    (home / "plans").mkdir()
    (home / "plans" / "sweep.yaml").write_text(
        "recipe: mine.yaml\nexperiment: {data.val_fraction: 0.2}\nsearch: {training.lr: {uniform: [0.1, 0.2]}}\n"
    )
    assert raypfl("submit", "tune", "plans/sweep.yaml", "trials=2").exit_code == 0
    assert set(server.packed) == {"mine.yaml", "plans/sweep.yaml", "job_methods.py", "job_layers.py"}
    assert server.words == "exec python -m raypfl tune plans/sweep.yaml trials=2"
    server.submitted.clear()
    too_long = refused("tune", "plans/sweep.yaml", "scheduler=asha", "scheduler.grace=1000")
    assert "so none could ever be stopped" in too_long and not server.submitted
    server.streams = [["one\n"]]
    (home / "study.yaml").write_text("extends: digits-personal\nmethods: {own: 'job_methods:Mine'}\n")
    (home / "again.yaml").write_text("extends: study.yaml\nseeds: 1\n")
    server.streams = [["one\n"]]
    assert raypfl("submit", "study", "again.yaml", "output=/shared", "--rounds", "2").exit_code == 0
    assert set(server.packed) == {"again.yaml", "study.yaml", "job_methods.py", "job_layers.py"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["output=runs"], "output is 'runs', which would be in the job's working directory, and Ray deletes that"),
        (["output=s3://bucket/runs"], "output is 's3://bucket/runs'"),
        (["--run-dir", "here"], "--run-dir is 'here'"),
        (["tracking.uri=sqlite:///runs/mlflow.db"], "tracking.uri is 'sqlite:///runs/mlflow.db'. A job takes along"),
        (["tracking.uri=mlruns"], "tracking.uri is 'mlruns'"),
        (["checkpoint.location=kept"], "checkpoint.location is 'kept'"),
        (["data.root=../data"], "data.root is '../data'"),
        (["data.cache=cache"], "data.cache is 'cache'"),
        (["data.pools={more: {name: npy, root: here}}"], "data.pools.more.root is 'here'"),
        (["model.weights=weights.pt"], "model.weights is 'weights.pt'"),
        (["rouns=3"], "rouns is not a setting"),
        (["../mine.yaml"], "There is no file '../mine.yaml'"),
    ],
)
def test_what_cannot_work_as_a_job_is_refused_before_anything_is_sent(server: Server, words: list[str], sentence: str):
    source = [] if words[0].endswith(".yaml") else ["mine.yaml"]
    assert sentence in refused("run", *source, *words)
    assert not server.submitted


@pytest.mark.parametrize(
    "words",
    [
        ["tracking.uri=sqlite:////shared/mlflow.db"],
        ["tracking.uri=http://tracking:5000"],
        ["checkpoint.location=s3://bucket/kept"],
        ["data=cifar10", "data.root=~/data"],
        ["data.cache=/shared/cache"],
        ["model=resnet18", "model.weights=IMAGENET1K_V1"],
    ],
)
def test_paths_that_mean_something_on_a_cluster_are_accepted(server: Server, words: list[str]):
    assert raypfl("submit", "run", "mine.yaml", *words).exit_code == 0
    assert server.submitted


def test_an_assignment_replaces_a_path_of_the_file(server: Server, home: Path):
    (home / "mine.yaml").write_text("output: runs\ncheckpoint: {location: kept}\n")
    assert "location is 'kept'" in refused("run", "mine.yaml", "output=/shared")
    assert raypfl("submit", "run", "mine.yaml", "output=/shared", "checkpoint.location=/shared/kept").exit_code == 0


def test_nothing_from_outside_the_folder_goes_along(
    server: Server, home: Path, tmp_path_factory: pytest.TempPathFactory
):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "other.yaml").write_text(DESCRIPTION)
    assert "is outside the current folder" in refused("run", str(outside / "other.yaml"))
    (home / "linked.yaml").symlink_to(outside / "other.yaml")
    assert "is outside the current folder" in refused("run", "linked.yaml")
    (home / "sweep.yaml").write_text(
        f"recipe: {outside}/other.yaml\nsearch: {{training.lr: {{uniform: [0.1, 0.2]}}}}\n"
    )
    assert "is outside the current folder" in refused("tune", "sweep.yaml", "data.val_fraction=0.2")
    for link in ("job_package/keys", "job_linked.py"):
        (home / link).symlink_to("/etc/hostname")
    for module in ("job_package", "job_linked"):
        with pytest.raises(ConfigError, match="is a link that leads out of"):
            package.collect([], [module])
    assert not server.submitted


def test_a_package_that_is_too_large_is_refused_with_its_largest_files(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert package.LIMIT == DASHBOARD_CLIENT_MAX_SIZE
    monkeypatch.setattr(package, "LIMIT", 2**20)
    (home / "job_package" / "images.npy").write_bytes(bytes(2**21))
    with pytest.raises(
        ConfigError, match=r"have 2\.0 MiB, and Ray accepts 1\.(?s:.*) 2\.0 MiB  job_package/images.npy"
    ):
        package.collect([], ["job_package"])


def test_a_log_whose_stream_ends_early_breaks_falls_silent_or_says_too_little_is_shown_once(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(following, "SILENCE", 0.05)
    broken = aiohttp.ClientConnectionError()
    shown: list[str] = []
    lost = ["one\n", LOST]
    server = Server(["one\n"], [broken], lost, ["one\n", "two\n", RuntimeError("closed")], ["one\n", "two\n"])
    assert following.follow(server, "job", shown.append).status is JobStatus.SUCCEEDED
    assert "".join(shown) == "one\ntwo\nthree\n"


def test_a_job_server_that_does_not_answer_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch):
    def gone(job: str) -> None:
        raise ConnectionError

    server = Server([])
    monkeypatch.setattr(server, "get_job_info", gone)
    monkeypatch.setattr(following, "POLL", 0.0)
    monkeypatch.setattr(following, "PATIENCE", 0.05)
    with pytest.raises(RaypflError, match="has not answered for"):
        following.follow(server, "job", lambda text: None)


def test_a_head_that_was_killed_is_noticed_at_once_and_not_after_minutes(monkeypatch: pytest.MonkeyPatch):
    import requests

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    def ask_a_closed_port(job: str) -> None:
        requests.get(f"http://127.0.0.1:{port}/api/jobs/{job}")

    server = Server([])
    monkeypatch.setattr(server, "get_job_info", ask_a_closed_port)
    monkeypatch.setattr(following, "POLL", 0.0)
    monkeypatch.setattr(following, "REFUSED", 0.05)
    with pytest.raises(RaypflError, match=r"head has died or was stopped.*submit it again"):
        following.follow(server, "job", lambda text: None)


@pytest.mark.parametrize(
    ("ends", "code", "message", "exits", "says"),
    [
        ("SUCCEEDED", 0, "", 0, ""),
        ("FAILED", 3, "", 3, "ended with exit code 3"),
        ("FAILED", -9, "", 137, "ended with exit code 137"),
        ("FAILED", None, "The node died.\nDetails", 1, "failed: The node died."),
        ("STOPPED", None, "", 130, "was stopped"),
        ("STOPPED", 0, "", 130, "was stopped"),
    ],
)
def test_a_job_s_exit_code_is_the_command_s(server: Server, ends: str, code: int, message: str, exits: int, says: str):
    server.end, server.code, server.message = JobStatus(ends), code, message
    for words in (["submit", "run", "mine.yaml"], ["logs", "job", "--follow"]):
        result = raypfl(*words)
        assert result.exit_code == exits
        assert result.stdout == "one\ntwo\nthree\n"
        assert says in result.stderr


def test_a_detached_job_is_not_followed_and_the_way_back_is_said(server: Server):
    result = raypfl("submit", "run", "mine.yaml", "--detach", "--address", "http://head:8265")
    assert (result.exit_code, result.stdout) == (0, "")
    job = server.submitted["submission_id"]
    assert f"Follow it: raypfl logs {job} --follow --address http://head:8265." in result.stderr
    assert f"Stop it: raypfl stop {job} --address http://head:8265" in result.stderr


def test_ctrl_c_ends_the_following_and_not_the_job(server: Server, monkeypatch: pytest.MonkeyPatch):
    async def pressed(job: str):
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)
        yield ""

    monkeypatch.setattr(server, "tail_job_logs", pressed)
    result = raypfl("submit", "run", "mine.yaml")
    assert result.exit_code == 130
    assert "No longer following; the job continues. Follow it: raypfl logs mine-" in result.stderr


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_a_run_refuses_addresses_that_are_not_the_cluster_s_own(address: str):
    done = raypfl("run", "digits", f"ray.address={address}")
    assert done.exit_code == 2 and "Send a job: raypfl submit run" in " ".join(done.output.split())


def test_an_address_that_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Ray lets the environment win."""
    asked = []
    monkeypatch.setattr(
        "ray.dashboard.modules.job.sdk.JobSubmissionClient._check_connection_and_version",
        lambda self, *given, **more: asked.append(self._address),
    )
    from raypfl.integrations.jobs.cluster import client

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="No cluster is named: give --address"):
        client(None)
    monkeypatch.setenv("RAY_ADDRESS", "http://second:8265")
    client(None)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://first:8265")
    client(None)
    client("http://given:8265")
    assert list(dict.fromkeys(asked)) == ["http://second:8265", "http://first:8265", "http://given:8265"]
