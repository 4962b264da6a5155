"""The lease on a run: one attempt at a time writes to it, on any machine."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.fs as pafs
import pytest

import raypfl
from raypfl.common.errors import CheckpointError, RaypflError, Unwritable
from raypfl.engine.events import RoundFinished
from raypfl.storage import checkpoints, filesystems, lease
from tests.support.runs import experiment, same_tables


class Once:
    """A listener that calls `act` after round 3, and stores its results."""

    def __init__(self, act) -> None:
        self.act = act
        self.results: list = []

    def __call__(self, event) -> None:
        if isinstance(event, RoundFinished) and event.round == 3:
            self.results.append(self.act())


def files(folder: Path) -> dict[str, float]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def holder_on_another_machine(**changes) -> lease._Holder:
    return replace(lease._Holder.in_this_process("another"), host="node7", machine="node7", process=4711, **changes)


def write_lease(folder: Path, holder: lease._Holder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lease.json").write_text(json.dumps(asdict(holder)))


def test_a_second_attempt_at_a_run_is_refused_and_does_not_disturb_the_first(tmp_path: Path, default_run):
    def again():
        with pytest.raises(CheckpointError, match=r"already running as process \d+ on \S+ since \d{4}-.*stop it there"):
            raypfl.resume(tmp_path / "run")

    second = Once(again)
    first = raypfl.run(experiment(tmp_path), listeners=[second], run_dir=tmp_path / "run")
    assert len(second.results) == 1
    assert first.weights_hash == default_run.weights_hash and same_tables(first, default_run)
    assert not (tmp_path / "run" / "checkpoints" / "lease.json").exists()


def test_an_attempt_that_was_taken_for_dead_writes_nothing_more(tmp_path: Path):
    def taken_over():
        write_lease(tmp_path / "run" / "checkpoints", holder_on_another_machine())
        return files(tmp_path / "run")

    other = Once(taken_over)
    with pytest.raises(RaypflError, match="process 4711 on node7 has taken it over") as caught:
        raypfl.run(experiment(tmp_path), listeners=[other], run_dir=tmp_path / "run")
    assert len(str(caught.value).splitlines()) == 1
    assert files(tmp_path / "run") == other.results[0]


def test_a_run_that_has_ended_elsewhere_is_not_written_to(tmp_path: Path):
    gone = Once(lambda: (tmp_path / "run" / "checkpoints" / "lease.json").unlink())
    with pytest.raises(RaypflError, match="another process has taken it over"):
        raypfl.run(experiment(tmp_path), listeners=[gone], run_dir=tmp_path / "run")


@pytest.fixture(params=["a folder", "an object store"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A location whose lease a process of another machine holds."""
    if request.param == "an object store":
        store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
        monkeypatch.setattr(filesystems, "open_location", lambda location: (store, "run"))
    write_lease(tmp_path / "run", holder_on_another_machine())
    return str(tmp_path / "run")


def test_a_silent_holder_elsewhere_is_taken_for_dead_and_then_refused(place, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 0.01)
    monkeypatch.setattr(lease, "_POLL", 0.001)
    messages: list[str] = []
    with lease.hold_lease(place, "mine", messages.append):
        lease.refuse_unless_held(place, "mine")
        with pytest.raises(CheckpointError, match="taken it over"):
            lease.refuse_unless_held(place, "another")

    assert len(messages) == 1 and "process 4711 on node7" in messages[0]


def test_a_holder_elsewhere_with_signs_of_life_keeps_the_lease(place, monkeypatch, tmp_path):
    monkeypatch.setattr(
        lease.time, "sleep", lambda seconds: write_lease(tmp_path / "run", holder_on_another_machine(beat=1))
    )
    with (
        pytest.raises(CheckpointError, match="already running as process 4711 on node7"),
        lease.hold_lease(place, "mine", lambda text: None),
    ):
        pytest.fail("two attempts at a time")
    lease.refuse_unless_held(place, "another")


def test_of_two_attempts_that_waited_for_a_dead_one_the_first_gets_the_lease(place, monkeypatch, tmp_path):
    monkeypatch.setattr(lease, "PATIENCE", 0.01)
    monkeypatch.setattr(lease, "_POLL", 0.001)
    wait_for_silence = lease._LeaseFile.wait_for_silence

    def wait_too_long(file: lease._LeaseFile, notify) -> lease._Holder | None:
        silent_holder = wait_for_silence(file, notify)
        write_lease(tmp_path / "run", replace(holder_on_another_machine(), attempt="faster", host="node8"))
        return silent_holder

    monkeypatch.setattr(lease._LeaseFile, "wait_for_silence", wait_too_long)
    with (
        pytest.raises(CheckpointError, match="already running as process 4711 on node8"),
        lease.hold_lease(place, "mine", lambda text: None),
    ):
        pytest.fail("two attempts at a time")
    lease.refuse_unless_held(place, "faster")


def test_of_two_attempts_at_once_in_a_process_the_first_gets_the_lease(monkeypatch, tmp_path):
    location = str(tmp_path / "run")
    claim = lease._LeaseFile.claim

    def claim_before_another(file: lease._LeaseFile, *arguments) -> None:
        claim(file, *arguments)
        monkeypatch.setattr(lease._LeaseFile, "claim", claim)
        with pytest.raises(CheckpointError, match="already running"), lease.hold_lease(location, "second", pytest.fail):
            pytest.fail("two attempts at a time")

    monkeypatch.setattr(lease._LeaseFile, "claim", claim_before_another)
    with lease.hold_lease(location, "first", pytest.fail):
        lease.refuse_unless_held(location, "first")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_no_signs_of_life(monkeypatch, tmp_path):
    monkeypatch.setattr(lease, "BEAT", 0.001)
    write = lease.write
    writes = itertools.count()

    def write_on_full_disk(path: Path, content: str) -> None:
        if next(writes) == 1:
            raise Unwritable("The disk is full.")
        write(path, content)

    monkeypatch.setattr(lease, "write", write_on_full_disk)
    with lease.hold_lease(str(tmp_path / "run"), "mine", pytest.fail):
        deadline = time.monotonic() + 5
        while json.loads((tmp_path / "run" / "lease.json").read_text())["beat"] < 3:
            assert time.monotonic() < deadline


def test_a_location_that_is_slow_to_write_to_is_no_sign_of_death_and_changes_no_bit(tmp_path, monkeypatch, default_run):
    for name, seconds in {"BEAT": 0.02, "PATIENCE": 0.5, "_POLL": 0.01}.items():
        monkeypatch.setattr(lease, name, seconds)
    monkeypatch.setattr(lease._Holder, "is_alive", None)  # as seen from another machine
    save = checkpoints.save
    refused_at = []

    def save_slowly(location: str, *args):
        def look():
            with pytest.raises(CheckpointError, match="already running"), lease.hold_lease(location, "another", print):
                pytest.fail("two attempts at a time")
            refused_at.append(location)

        watcher = threading.Thread(target=look)
        watcher.start()
        watcher.join()  # as long as the write takes
        return save(location, *args)

    monkeypatch.setattr(checkpoints, "save", save_slowly)
    assert raypfl.run(experiment(tmp_path)).weights_hash == default_run.weights_hash
    assert len(refused_at) == 3


def test_signs_of_life_end_when_the_lease_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 0.001)
    location = tmp_path / "run"
    other_holder = holder_on_another_machine()
    with lease.hold_lease(str(location), "mine", pytest.fail):
        while json.loads((location / "lease.json").read_text())["beat"] < 3:
            pass
        while any(thread.name == "raypfl-lease" for thread in threading.enumerate()):  # a beat may be on its way
            write_lease(location, other_holder)
            time.sleep(0.01)

    assert json.loads((location / "lease.json").read_text()) == asdict(other_holder)


def test_a_dead_process_of_this_machine_is_recognised_although_its_number_is_reused():
    me = lease._Holder.in_this_process("mine")
    parent = replace(me, process=lease.os.getppid(), born=lease._start_time(lease.os.getppid()))
    assert me.is_alive is False  # this process does not hold that
    assert parent.is_alive is True
    assert replace(parent, born="1").is_alive is False
    assert holder_on_another_machine().is_alive is None


def test_an_ended_process_holds_no_lease_even_as_a_zombie(tmp_path: Path):
    child = subprocess.Popen([sys.executable, "-c", ""])
    holder = replace(lease._Holder.in_this_process("mine"), process=child.pid, born=lease._start_time(child.pid))
    write_lease(tmp_path, holder)
    assert holder.is_alive is True
    lease.wait_until_free(str(tmp_path), seconds=60)
    assert holder.is_alive is False and child.returncode is None
    child.wait()
