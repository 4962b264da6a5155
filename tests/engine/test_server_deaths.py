"""How often a server may die: only deaths without a finished round in between count."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import raypfl
from raypfl.common.errors import RaypflError
from raypfl.engine.backends.session import StartedServer
from raypfl.engine.events import RoundFinished
from raypfl.runs import on_ray
from tests.support.runs import experiment


class Died(Exception):
    """Stops the driver where a run would have ended."""


@pytest.fixture
def server_lives(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds that each successive server finishes before it dies for good; a server takes its number from the list."""
    lives: list[int] = []
    finished_rounds = 0

    def follow(ray, server, job, prepared, emit, stop):
        nonlocal finished_rounds
        if not lives:
            raise Died
        for _ in range(lives.pop(0)):
            finished_rounds += 1
            emit(RoundFinished(finished_rounds, 1.0, 0.1, 0, 0, 1, 0, 0, 0, 0))
        raise on_ray._ServerDied("The server's process died.")

    monkeypatch.setattr(
        on_ray, "connected", lambda *of: contextlib.nullcontext(SimpleNamespace(kill=lambda actor: None))
    )
    monkeypatch.setattr(on_ray, "has_local_cluster_died", lambda ray: False)
    monkeypatch.setattr(on_ray, "client_actors", lambda *of: [1])
    monkeypatch.setattr(on_ray, "node_for_server", lambda *of: None)
    monkeypatch.setattr(on_ray, "_start_server", lambda *of: StartedServer(object(), None, None))
    monkeypatch.setattr(on_ray, "_follow", follow)
    return lives


def test_deaths_of_the_server_with_rounds_in_between_do_not_end_the_run(tmp_path: Path, server_lives: list[int]):
    server_lives += [3] * 10
    with pytest.raises(RaypflError, match="Died"):
        raypfl.run(experiment(tmp_path, engine__backend="ray"))
    assert not server_lives


def test_a_server_that_dies_without_a_round_in_between_ends_the_run_in_a_sentence(
    tmp_path: Path, server_lives: list[int]
):
    server_lives += [3, 0, 3]
    with pytest.raises(RaypflError, match="The server's process died"):
        raypfl.run(experiment(tmp_path, engine__backend="ray"))
    assert server_lives == [3]
