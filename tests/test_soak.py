"""A run whose processes are killed all the time ends with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import raypfl
from raypfl.federation.events import RoundFinished, Warned
from tests.runs import experiment, same_tables

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Killer(threading.Thread):
    """Kills one of this test's client actors every second or two, also while it starts, and the server now and then."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.killed = {"ray::ClientActor": 0, "ray::ServerActor": 0}
        self._draws = random.Random(7)

    def run(self) -> None:
        next_server = time.monotonic() + 20
        while not self.over.wait(self._draws.uniform(1, 2)):
            self._kill("ray::ClientActor")
            if time.monotonic() > next_server:
                self._kill("ray::ServerActor")
                next_server += 40

    def _kill(self, name: str) -> None:
        if processes := sorted(_of_this_test(name)):
            os.kill(self._draws.choice(processes), signal.SIGKILL)
            self.killed[name] += 1


def _of_this_test(name: str) -> list[int]:
    """Processes of the actors with this name that belong to the Ray which this process has started."""
    told = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in told.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    mine = [int(pid) for pid, _, command in rows if command.startswith(name)]
    return [pid for pid in mine if parents.get(parents[pid]) == os.getpid()]


def test_sixty_rounds_end_with_the_same_bits_although_their_processes_are_killed_all_the_time(tmp_path: Path):
    settings = {"method": "tests.federated_methods:Slow", "rounds": 60, "evaluation__every": 20, "cohort__size": 12}
    whole = raypfl.run(experiment(tmp_path, **settings))
    on_ray = experiment(tmp_path, **settings, engine__backend="ray", ray__actors=3, ray__cpus_per_actor=0.3)
    events: list = []
    killer = Killer()
    killer.start()
    try:
        result = raypfl.run(on_ray, listeners=[events.append])
    finally:
        killer.over.set()
        killer.join()
    done = [event.round for event in events if isinstance(event, RoundFinished)]
    print(killer.killed, sum(isinstance(event, Warned) for event in events), "warnings")
    assert done == list(range(1, 61)) and min(killer.killed.values()) > 0
    assert result.weights_hash == whole.weights_hash and same_tables(result, whole)
