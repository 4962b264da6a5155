"""Which runs of a session can have the server of the run before."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from raypfl.engine.backends.session import SpareServer, StartedServer


class Ray:
    """A pretended Ray, which records the actors that are killed."""

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.mark.parametrize(
    ("kind", "node", "suits"),
    [("two CPUs", "a", True), ("two CPUs", None, True), ("two CPUs", "b", False), ("three CPUs", "a", False)],
)
def test_a_run_of_the_same_kind_has_the_server_unless_it_needs_one_on_another_node(kind, node, suits):
    ray = Ray()
    server = StartedServer("actor", "two CPUs", "a")
    assert SpareServer(shared=True, server=server).take(ray, kind, node) == (server if suits else None)
    assert ray.killed == ([] if suits else ["actor"])


def test_a_server_that_runs_anywhere_does_not_suit_a_run_that_needs_it_on_a_node():
    assert not StartedServer("actor", "kind", None).suits("kind", "a")


def test_a_server_that_may_have_imported_a_module_that_was_changed_since_is_not_used_again(tmp_path, monkeypatch):
    ray = Ray()
    spare = SpareServer(shared=True)

    def is_reused() -> bool:
        """Return whether a run has the server of the run before."""
        server = spare.take(ray, "kind", None)
        spare.server = server or StartedServer("actor", "kind", None)
        return server is not None

    assert not is_reused()
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "edited_method.py"
    file.write_text("rate = 1\n")
    importlib.import_module(file.stem)
    assert is_reused()

    file.write_text("rate = 2\n")
    os.utime(file, ns=(0, 0))
    assert not is_reused() and ray.killed == ["actor"]
    assert is_reused()
    file.unlink()
    assert not is_reused()
