"""A full disk costs no earlier files, and is reported in a sentence."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import raypfl
from raypfl.common import files
from raypfl.common.errors import RaypflError, Unwritable
from raypfl.engine.events import Checkpointed, RunFinished, RunStarted
from raypfl.storage import filesystems
from tests.support.runs import experiment, same_tables


@contextmanager
def full_disk() -> Iterator[None]:
    """A context in which no file can grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_stays_as_it_was_and_is_named(tmp_path: Path):
    file = tmp_path / "summary.json"
    files.write(file, "before")
    with full_disk(), pytest.raises(Unwritable, match=r"summary\.json cannot be written: File too large\. "):
        files.write(file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "Free some space there."),
        (errno.EACCES, "Allow this user to write there."),
        (errno.ENOTEMPTY, "A file or folder of this name is in the way; move it."),
        (errno.EIO, "Write to another place, or try again."),
    ],
)
def test_only_a_full_disk_is_called_full(tmp_path: Path, monkeypatch, number: int, sentence: str):
    def refuse(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(Unwritable) as caught:
        files.write(tmp_path / "summary.json", "after")
    assert str(caught.value) == f"{tmp_path}/summary.json cannot be written: {os.strerror(number)}. {sentence}"
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_in_a_run_is_told_once_and_the_run_goes_on_to_the_same_bits(tmp_path: Path, default_run):
    crowded = full_disk()

    def fill(event):
        if isinstance(event, Checkpointed):
            crowded.__enter__()

    try:
        with pytest.raises(RaypflError) as caught:
            raypfl.run(experiment(tmp_path, tracking__mlflow=False), listeners=[fill])
    finally:
        crowded.__exit__(None, None, None)
    first, *further = str(caught.value).splitlines()
    assert first.startswith("The checkpoint of round 4 cannot be written")
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(further) == 1 and f"raypfl resume {folder}" in further[0]
    resumed = raypfl.resume(folder)
    assert resumed.weights_hash == default_run.weights_hash and same_tables(resumed, default_run)


class Unreachable:
    """A pretended object store behind a network that is down."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> None:
            raise OSError("AWS Error NETWORK_CONNECTION")

        return call


def test_a_storage_that_becomes_unreachable_costs_no_earlier_results(tmp_path: Path):
    described = experiment(tmp_path, cohort__size=1)

    def fail(event):
        if isinstance(event, Checkpointed):
            away.setattr(filesystems, "open_location", lambda location: (Unreachable(), "run"))

    with pytest.MonkeyPatch.context() as away, pytest.raises(RaypflError) as caught:
        raypfl.run(described, listeners=[fail], run_dir=tmp_path / "run")
    first, second = str(caught.value).splitlines()
    place = tmp_path / "run" / "checkpoints"
    assert first == f"The checkpoints in {place} cannot be read: AWS Error NETWORK_CONNECTION. Try again when they can."
    assert second.endswith(f"The tables in {tmp_path / 'run'} lack earlier rounds until the run has been resumed.")
    failed = raypfl.Result.load(tmp_path / "run")
    assert failed.status == "failed" and failed.rounds["round"].to_pylist() == [3, 4]
    resumed = raypfl.resume(tmp_path / "run")
    whole = raypfl.run(described)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)


@pytest.mark.parametrize("moment", [RunStarted, RunFinished])
def test_a_full_disk_at_the_start_or_the_end_of_a_run_is_reported_in_a_sentence(tmp_path: Path, moment: type):
    crowded = full_disk()

    def fill(event):
        if isinstance(event, moment):
            crowded.__enter__()

    def run_on_full_disk():
        try:
            raypfl.run(experiment(tmp_path, rounds=1), listeners=[fill], run_dir=tmp_path / "run")
        finally:
            crowded.__exit__(None, None, None)

    with pytest.raises(RaypflError, match=r"cannot be written"):
        run_on_full_disk()
    assert raypfl.resume(tmp_path / "run").status == "finished"
