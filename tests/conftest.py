"""Set up all tests: one thread, their own cache and Ray token, one Ray for the session."""

from __future__ import annotations

import ast
import atexit
import faulthandler
import functools
import gc
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Where the shell switches it off, every process that a test starts would compile raypfl again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

import hypothesis
import pytest
import torch
from filelock import FileLock

from raypfl.common.stopping import STOP_SIGNALS
from raypfl.engine.backends.processes import importing

# Tests interrupt runs by signals. A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)

# `importing` freezes what is collected; libraries report functions that are still there when the process ends.
atexit.register(gc.unfreeze)

# A flush to the disk makes a difference only if the machine loses power, which no test can see, and every run waits for
# 30 of them. The processes that tests start have their own.
os.fsync = lambda handle: None
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from 800,000 objects that stay, which take it 3 seconds, and 0.6 each time later."""
    with importing():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(3600))
            if item.get_closest_marker("thorough"):
                raise pytest.UsageError(f"{item.nodeid} is slow and thorough, so CI would run it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow"):
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, and all tests that use Ray to the same one.

    Ray takes fifteen seconds to start, and these tests wait for processes more than they compute.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            test = nodeid.removeprefix(f"{file}::").partition("[")[0]
            return "Ray" if _uses_ray(config.rootpath / file, test) else file

    return Scheduling(config, log)


def _uses_ray(file: Path, test: str) -> bool:
    tests, all_others_do = _tests_and_ray(file)
    return tests.get(test, all_others_do)


@functools.cache
def _tests_and_ray(file: Path) -> tuple[dict[str, bool], bool]:
    """Whether each test of a file names Ray's fixture; and whether the rest of the file, so all tests, needs Ray."""
    text = file.read_text()
    if "ray_cluster" not in text and "tests.support.nodes" not in text:
        return {}, False

    tests = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
            tests[node.name] = "ray_cluster" in source
            text = text.replace(source, "\n" * source.count("\n"))
    if "ray_cluster" in text or "tests.support.nodes" in text:
        return {}, True
    return tests, False


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Fail a test that leaves another handler of a signal that stops runs."""
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    os.environ["RAYPFL_CACHE"] = str(folder)
    yield folder
    del os.environ["RAYPFL_CACHE"]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray and its actors for all tests that need them; it starts with the first."""
    import raypfl

    with raypfl.session(raypfl.Experiment()):
        yield


@pytest.fixture(scope="session")
def default_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of `tests.support.runs.experiment` without a change, for tests to compare with and to read."""
    import raypfl
    from tests.support.runs import experiment

    return raypfl.run(experiment(tmp_path_factory.mktemp("default")))


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty tracking database, for tests to copy: its migrations take seconds, so all processes share it."""
    from raypfl.integrations.tracking.connection import quiet_mlflow

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / "empty.db"
    with FileLock(folder / "empty.db.lock"):
        if not file.exists():
            quiet_mlflow().MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have no figures, most of the time that they take, where a test reads their text alone."""
    from markupsafe import Markup

    monkeypatch.setattr("raypfl.results.report.figures.svg", lambda *arguments: Markup())


@pytest.fixture
def without_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's method is not evaluated before its run, where a test counts what the run itself does with it."""
    monkeypatch.setattr("raypfl.runs.preparing.refuse_failing_evaluation", lambda prepared: None)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """A function that opens the named data set of the folder ``data``, by default for two clients."""
    from raypfl.data import IID, load_federated
    from raypfl.experiment import Experiment

    def open_folder(name: str, partition: Any = None, **options: Any) -> Any:
        described = {"name": name, "root": str(tmp_path / "data")} | options
        config = Experiment(data=described).data
        return load_federated(config, partition or IID(clients=2), seed=0, cache=tmp_path / "cache")

    return open_folder
