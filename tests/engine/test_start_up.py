"""What processes do before the first round: who imports when, and what is kept from being done twice."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypfl.engine.backends.processes import importing

ROOT = Path(__file__).parents[2]

START = """
import sys
import ray

class Remote:
    def options(self, **options):
        return self
    def remote(self):
        asked.append("torch" in sys.modules)
        return self

asked = []
ray.remote = lambda kind: Remote()
from raypfl.engine.backends.server_actor import ServerActor
ServerActor([2], [{}])
print(asked, "torch" in sys.modules)
"""


LAZY = """
import sys
import raypfl
heavy = {"torch", "matplotlib", "jinja2", "importlib.metadata"}
print(sorted(heavy & sys.modules.keys()), callable(raypfl.report.write), "jinja2" in sys.modules)
"""


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_a_server_asks_for_its_client_actors_before_it_imports_torch_itself() -> None:
    done = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[False, False] True\n", done.stderr


def test_the_report_is_there_with_the_package_and_imported_when_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[] True True\n", done.stderr


def test_nothing_is_collected_while_modules_are_imported_and_all_is_again_afterwards() -> None:
    with pytest.raises(ImportError), importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_switched_off_stays_off() -> None:
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_what_was_imported_is_not_gone_through_again() -> None:
    with importing():
        kept = [[number] for number in range(10_000)]
    assert gc.get_freeze_count() >= len(kept)
