"""Jobs without a cluster: the files in a package, refusals, and following a log whatever happens to its stream."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE
from ray.job_submission import JobStatus

from raypfl.cli.actions import jobs as command
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.integrations.jobs import following, package
from tests.support.command import raypfl
from tests.support.ports import free_port

DESCRIPTION = "rounds: 2\nmethod: job_methods:Mine\noutput: /shared/runs\n"
METHOD = (
    "from job_layers import SCALE\nfrom raypfl.methods import FedAvg\nclass Mine(FedAvg):\n    scale: float = SCALE\n"
)

LOST = object()
"""A connection that is lost without an end, in a stream of `Server`."""


class Server:
    """A stand-in for a job server.

    Attributes
    ----------
    streams : the pieces of the log, for each connection; an exception breaks it.
    submitted, packed : the last job's options, and its files by path.
    """

    def __init__(self, *streams: list, ends: JobStatus = JobStatus.SUCCEEDED, code: int | None = 0, message: str = ""):
        self.streams = list(streams)
        self.end = ends
        self.code = code
        self.message = message
        self.submitted: dict = {}
        self.packed: dict[str, str] = {}

    def submit_job(self, **options) -> None:
        folder = Path(options["runtime_env"]["working_dir"])
        files = [path for path in folder.rglob("*") if path.is_file()]
        self.packed = {file.relative_to(folder).as_posix(): file.read_text() for file in files}
        self.submitted = options

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
    server = Server(["one\ntwo\nthree\n"])
    monkeypatch.setattr(command, "client", lambda address: server)
    monkeypatch.setattr(following, "POLL", 0.0)
    return server


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project: a description, the module that it names, one that this imports, and files that no job needs."""
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


def refusal(*words: str) -> str:
    """The message of a job that is refused."""
    result = raypfl("submit", *words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_job_packs_its_description_and_the_modules_that_it_needs_alone(server: Server):
    assert raypfl("submit", "run", "mine.yaml", "rounds=3", "--quiet").exit_code == 0

    assert set(server.packed) == {"mine.yaml", "job_methods.py", "job_layers.py"}
    job = server.submitted["submission_id"]
    start = "exec python -m raypfl run mine.yaml rounds=3 --quiet --run-dir /shared/runs/"
    assert server.words == f"{start}{job}"


def test_a_package_is_packed_without_environments_runs_caches_and_hidden_files():
    assert set(package.collect([], ["job_package.late"])) == {
        "job_package/__init__.py",
        "job_package/late.py",
        "job_package/table.csv",
        "job_late.py",
    }


def test_a_run_dir_is_passed_on_as_it_is(server: Server):
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
    too_long = refusal("tune", "plans/sweep.yaml", "scheduler=asha", "scheduler.grace=1000")
    assert "so it would decide nothing" in too_long and not server.submitted

    (home / "study.yaml").write_text("extends: digits-personal\nmethods: {own: 'job_methods:Mine'}\n")
    (home / "again.yaml").write_text("extends: study.yaml\nseeds: 1\n")
    server.streams = [["one\n"]]
    assert raypfl("submit", "study", "again.yaml", "output=/shared", "--rounds", "2").exit_code == 0
    assert set(server.packed) == {"again.yaml", "study.yaml", "job_methods.py", "job_layers.py"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["output=runs"], "output is 'runs', which would be in the job's working directory, and Ray deletes that"),
        (["output=runs", "--run-dir", "/runs/a"], "output, where MLflow's database is also with --run-dir, is 'runs'"),
        (["output=s3://bucket/runs"], "output is 's3://bucket/runs'"),
        (["--run-dir", "here"], "--run-dir is 'here'"),
        (["tracking.uri=sqlite:///runs/mlflow.db"], "tracking.uri is 'sqlite:///runs/mlflow.db'. A job takes along"),
        (["tracking.uri=mlruns"], "tracking.uri is 'mlruns'"),
        (["checkpoint.location=kept"], "checkpoint.location is 'kept'"),
        (["data.root=../data"], "data.root is '../data'"),
        (["data.cache=cache"], "data.cache is 'cache'"),
        (["data.pools={more: {name: npy, root: here}}"], "data.pools.more.root is 'here'"),
        (["model.weights=weights.pt"], "model.weights is 'weights.pt'"),
        (["partition={name: from_file, file: who.csv}"], "partition.file is 'who.csv'"),
        (["devices.hardware={name: table, file: phones.csv}"], "devices.hardware.file is 'phones.csv'"),
        (
            ["devices.hardware=lognormal", "devices.availability={name: spans, file: on.csv}"],
            "devices.availability.file is 'on.csv'",
        ),
        (["rouns=3"], "rouns is not a setting"),
        (["../mine.yaml"], "There is no file '../mine.yaml'"),
    ],
)
def test_settings_that_cannot_work_in_a_job_are_refused_before_anything_is_sent(
    server: Server, words: list[str], sentence: str
):
    source = [] if words[0].endswith(".yaml") else ["mine.yaml"]
    assert sentence in refusal("run", *source, *words)
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
    assert "location is 'kept'" in refusal("run", "mine.yaml", "output=/shared")
    assert raypfl("submit", "run", "mine.yaml", "output=/shared", "checkpoint.location=/shared/kept").exit_code == 0


def test_no_file_from_outside_the_folder_is_packed(
    server: Server, home: Path, tmp_path_factory: pytest.TempPathFactory
):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "other.yaml").write_text(DESCRIPTION)
    assert "is outside the current folder" in refusal("run", str(outside / "other.yaml"))

    (home / "linked.yaml").symlink_to(outside / "other.yaml")
    assert "is outside the current folder" in refusal("run", "linked.yaml")

    (home / "sweep.yaml").write_text(
        f"recipe: {outside}/other.yaml\nsearch: {{training.lr: {{uniform: [0.1, 0.2]}}}}\n"
    )
    assert "is outside the current folder" in refusal("tune", "sweep.yaml", "data.val_fraction=0.2")

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
    sentence = r"have 2\.0 MiB, and Ray accepts 1\.(?s:.*) 2\.0 MiB  job_package/images.npy"
    with pytest.raises(ConfigError, match=sentence):
        package.collect([], ["job_package"])


@pytest.mark.thorough
def test_a_log_is_shown_once_although_its_stream_ends_early_breaks_or_falls_silent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "SILENCE", 0.05)
    server = Server(
        ["one\n"],
        [aiohttp.ClientConnectionError()],
        ["one\n", LOST],
        ["one\n", "two\n", RuntimeError("closed")],
        ["one\n", "two\n"],  # without the last line, which only the whole log has
    )
    shown: list[str] = []
    assert following.follow(server, "job", shown.append).status is JobStatus.SUCCEEDED
    assert "".join(shown) == "one\ntwo\nthree\n"


def test_following_gives_up_a_job_server_that_does_not_answer_for_long(monkeypatch: pytest.MonkeyPatch):
    def fail_to_connect(job: str) -> None:
        raise ConnectionError

    server = Server([])
    monkeypatch.setattr(server, "get_job_info", fail_to_connect)
    monkeypatch.setattr(following, "POLL", 0.0)
    monkeypatch.setattr(following, "PATIENCE", 0.05)
    with pytest.raises(RaypflError, match="has not answered for"):
        following.follow(server, "job", lambda text: None)


def test_a_killed_head_is_noticed_at_once_and_not_after_minutes(monkeypatch: pytest.MonkeyPatch):
    import requests

    port = free_port()

    def request_a_closed_port(job: str) -> None:
        requests.get(f"http://127.0.0.1:{port}/api/jobs/{job}")

    server = Server([])
    monkeypatch.setattr(server, "get_job_info", request_a_closed_port)
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
    server.end = JobStatus(ends)
    server.code = code
    server.message = message
    for words in (["submit", "run", "mine.yaml"], ["logs", "job", "--follow"]):
        result = raypfl(*words)
        assert result.exit_code == exits
        assert result.stdout == "one\ntwo\nthree\n"
        assert says in result.stderr


def test_a_detached_job_is_not_followed_and_the_commands_for_it_are_shown(server: Server):
    result = raypfl("submit", "run", "mine.yaml", "--detach", "--address", "http://head:8265")
    assert (result.exit_code, result.stdout) == (0, "")
    job = server.submitted["submission_id"]
    assert f"Follow it: raypfl logs {job} --follow --address http://head:8265." in result.stderr
    assert f"Stop it: raypfl stop {job} --address http://head:8265" in result.stderr


def test_ctrl_c_ends_the_following_and_not_the_job(server: Server, monkeypatch: pytest.MonkeyPatch):
    async def press_ctrl_c(job: str):
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)
        yield ""

    monkeypatch.setattr(server, "tail_job_logs", press_ctrl_c)
    result = raypfl("submit", "run", "mine.yaml")
    assert result.exit_code == 130
    assert "No longer following; the job continues. Follow it: raypfl logs mine-" in result.stderr


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265"])
def test_a_run_refuses_addresses_that_are_not_the_cluster_s_own(address: str):
    result = raypfl("run", "digits", f"ray.address={address}")
    assert result.exit_code == 2 and "Send a job: raypfl submit run" in " ".join(result.output.split())


def test_an_address_option_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch):
    """Ray itself prefers the environment."""
    from raypfl.integrations.jobs.cluster import client

    addresses = []
    monkeypatch.setattr(
        "ray.dashboard.modules.job.sdk.JobSubmissionClient._check_connection_and_version",
        lambda self, *args, **options: addresses.append(self._address),
    )

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="No cluster is named: give --address"):
        client(None)

    monkeypatch.setenv("RAY_ADDRESS", "http://second:8265")
    client(None)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://first:8265")
    client(None)
    client("http://given:8265")
    assert list(dict.fromkeys(addresses)) == ["http://second:8265", "http://first:8265", "http://given:8265"]
