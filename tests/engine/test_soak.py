"""A run whose processes are killed all the time ends with the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

import raypfl
from raypfl.engine.events import Event, RoundFinished, Warned
from tests.support.runs import experiment, same_tables

CLIENT = "ray::ClientActor"
SERVER = "ray::ServerActor"
STARTING = re.compile(r"__init__|prepare").search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Killer(threading.Thread):
    """Kills a client actor of this test every second or two, now and then one that starts, and at times the server."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.killed = {CLIENT: 0, SERVER: 0}
        self._draws = random.Random(7)

    def run(self) -> None:
        turn = 0
        while not self.over.wait(self._draws.uniform(1, 2)):
            turn += 1
            self._kill(CLIENT, starting=turn % 5 == 0)

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round % 9 == 0:  # more often than Ray starts a server again
            self._kill(SERVER, starting=False)

    def _kill(self, name: str, starting: bool) -> None:
        processes = sorted(_of_this_test(name, starting))
        if processes:
            os.kill(self._draws.choice(processes), signal.SIGKILL)
            self.killed[name] += 1


def _of_this_test(name: str, starting: bool) -> list[int]:
    """Processes of the actors with this name that belong to the Ray which this process has started."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}
    pids = [int(pid) for pid, _, command in rows if command.startswith(name) and bool(STARTING(command)) == starting]
    return [pid for pid in pids if parents.get(parents[pid]) == os.getpid()]


def test_sixty_rounds_end_with_the_same_bits_although_their_processes_are_killed_all_the_time(tmp_path: Path):
    settings = {
        "method": "tests.support.federated_methods:Slow",
        "rounds": 60,
        "evaluation__every": 20,
        "cohort__size": 12,
    }
    whole = raypfl.run(experiment(tmp_path, **settings))
    settings |= {"engine__backend": "ray", "ray__actors": 3, "ray__cpus_per_actor": 0.3}
    on_ray = experiment(tmp_path, **settings)
    events: list = []
    killer = Killer()
    killer.start()
    try:
        result = raypfl.run(on_ray, listeners=[events.append, killer])
    finally:
        killer.over.set()
        killer.join()
    finished_rounds = [event.round for event in events if isinstance(event, RoundFinished)]
    print(killer.killed, sum(isinstance(event, Warned) for event in events), "warnings")

    assert finished_rounds == list(range(1, 61)) and min(killer.killed.values()) > 0
    assert result.weights_hash == whole.weights_hash and same_tables(result, whole)
