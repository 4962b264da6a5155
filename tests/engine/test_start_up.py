"""Start-up: which process imports what, and when; and the garbage collector meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raypfl
from raypfl.common.errors import RaypflError
from raypfl.engine.backends.cluster import start_local
from raypfl.engine.backends.processes import importing
from raypfl.engine.events import Event

ROOT = Path(__file__).parents[2]

START = """
import sys
import ray

class Remote:
    def options(self, **options):
        return self
    def remote(self):
        torch_imported.append("torch" in sys.modules)
        return self

torch_imported = []
ray.remote = lambda kind: Remote()
from raypfl.engine.backends.server_actor import ServerActor
ServerActor([2], [{}])
print(torch_imported, "torch" in sys.modules)
"""

ACTOR = """
import sys
from raypfl.engine.backends.client_actor import ClientActor
needed = {"torch", "raypfl.engine.prepared", "raypfl.experiment"}
before = needed & sys.modules.keys()
ClientActor()
print(sorted(before), sorted(needed - sys.modules.keys()))
"""


LAZY = """
import sys
import raypfl
heavy = {"torch", "matplotlib", "jinja2", "importlib.metadata"}
print(sorted(heavy & sys.modules.keys()))
"""


LOCAL = """
import sys
import raypfl
tracking = {"models_mb": 0}
listener = raypfl.MLflowListener()
raypfl.run(raypfl.Experiment(rounds=1, engine={"backend": "inline"}, tracking=tracking), listeners=[listener])
print("mlflow.system_metrics" in sys.modules, "ray" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.thorough
def test_a_server_requests_its_client_actors_before_it_imports_torch() -> None:
    process = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.stdout == "[False, False] True\n", process.stderr


def test_the_report_is_imported_at_its_first_use() -> None:
    process = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.stdout == "[]\n", process.stderr
    assert callable(raypfl.report.write)


@pytest.mark.thorough
def test_a_client_actor_imports_what_its_jobs_need_when_it_is_made_and_not_before() -> None:
    process = subprocess.run([sys.executable, "-c", ACTOR], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.stdout == "[] []\n", process.stderr


@pytest.mark.thorough
def test_a_run_in_one_process_does_without_ray(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCAL]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert process.stdout.splitlines()[-1] == "True False", process.stderr


def test_the_garbage_collector_pauses_while_modules_are_imported() -> None:
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_switched_off_stays_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_imported_objects_are_frozen_for_the_garbage_collector() -> None:
    frozen_before = gc.get_freeze_count()
    with importing():
        objects = [[number] for number in range(10_000)]
    assert gc.get_freeze_count() - frozen_before >= len(objects)


class UnwillingRay:
    """A pretended Ray whose cluster does not start in the first tries, and leaves a process behind each time."""

    def __init__(self, *errors: str) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._errors = errors

    def init(self, _temp_dir: str, **options: Any) -> str:
        if len(self.processes) == len(self._errors):
            return "started"
        message = self._errors[len(self.processes)]
        self.processes.append(subprocess.Popen([sys.executable, "-c", "input()", _temp_dir], stdin=subprocess.PIPE))
        raise Exception(message)


def test_a_local_ray_that_takes_too_long_to_start_is_started_once_more(tmp_path: Path) -> None:
    ray = UnwillingRay("The node timed out.")
    events: list[Event] = []
    assert start_local(ray, str(tmp_path), events.append) == "started"
    assert len(events) == 1 and [process.wait(timeout=60) for process in ray.processes] == [-signal.SIGKILL]


@pytest.mark.parametrize("errors", [["It timed out.", "It timed out again."], ["There is no room for objects."]])
def test_a_local_ray_that_does_not_start_is_an_error_and_leaves_no_process(tmp_path: Path, errors: list[str]) -> None:
    ray = UnwillingRay(*errors)
    with pytest.raises(RaypflError, match=f"{errors[-1]} .* engine.backend=inline"):
        start_local(ray, str(tmp_path), lambda event: None)
    assert [process.wait(timeout=60) for process in ray.processes] == [-signal.SIGKILL] * len(errors)
