"""A checkpoint gives back the same bits, or says in a sentence why it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs as pafs
import pytest
import torch

from raypfl.common.errors import CheckpointError
from raypfl.storage import checkpoints, filesystems
from raypfl.storage.checkpoints import Snapshot, writing
from raypfl.storage.checkpoints.layout import TABLES
from raypfl.storage.columns import Columns
from raypfl.storage.states import StateShard
from raypfl.storage.tables import RunTable

ROOT = Path(__file__).parents[2]
AWKWARD = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 0.1]


def make_snapshot(round: int = 3) -> Snapshot:
    theta = torch.arange(12, dtype=torch.float32)
    server = {
        "theta": theta,
        "view": theta[3:7],
        "transposed": theta.reshape(3, 4).T,
        "momentum": torch.tensor(AWKWARD, dtype=torch.float64),
        "half": torch.tensor(AWKWARD, dtype=torch.bfloat16),
        "nested": {"step": 7, "lr": 0.1, "name": "adam", "nesterov": False, "none": None, "betas": (0.9, 0.999)},
        "by_class": {0: torch.tensor(5), 1: torch.tensor([True, False]), "0": torch.zeros(0, 4)},
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "history": [torch.ones(2, dtype=torch.int64), -0.0, float("nan"), 2**60],
    }
    states = [
        StateShard(
            np.array([4, 1]), {"personal": np.array([AWKWARD, AWKWARD]), "alpha": np.array([0.5, -0.0], "float32")}
        ),
        StateShard(np.array([7]), {"steps/count": np.array([[2**60]]), "seen": np.array([True])}),
    ]
    tables = {"rounds": RunTable(Columns({"round": "int32", "loss": "float64"}))}
    tables["rounds"].waiting.extend({"round": [1, 2, 3], "loss": [0.5, float("nan"), -0.0]})

    return Snapshot(round=round, server=server, states=states, tables=tables, meta={"seed": 1, "run": "digits"})


def assert_same(a: object, b: object) -> None:
    """Assert that two trees are equal in type, shape and every bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        bytes_of_a = a.contiguous().reshape(-1).view(torch.uint8)
        bytes_of_b = b.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(bytes_of_a, bytes_of_b)
    elif isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert repr(a) == repr(b)  # tells -0.0 from 0.0, and finds nan equal to nan


def load(location: object, warnings: list[str] | None = None) -> Snapshot | None:
    return checkpoints.load(str(location), (lambda text: None) if warnings is None else warnings.append)


def folders(location: Path) -> list[str]:
    return sorted(entry.name for entry in location.iterdir() if entry.name != TABLES)


def test_a_snapshot_comes_back_to_the_same_bits(tmp_path: Path) -> None:
    saved = make_snapshot()
    path = checkpoints.save(str(tmp_path), saved, keep=2)
    assert Path(path).parent == tmp_path

    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.round, loaded.meta) == (3, saved.meta)

    assert_same(saved.server, loaded.server)
    rounds = checkpoints.read_table(str(tmp_path), loaded.tables["rounds"])
    assert repr(rounds.to_pydict()) == repr({"round": [1, 2, 3], "loss": [0.5, float("nan"), -0.0]})
    for _ in range(2):  # the states can be read again
        for before, after in zip(saved.states, loaded.states, strict=True):
            assert np.array_equal(before.clients, after.clients)
            assert before.tensors.keys() == after.tensors.keys()
            for name, array in before.tensors.items():
                assert after.tensors[name].dtype == array.dtype
                assert after.tensors[name].tobytes() == array.tobytes()


def test_loaded_tensors_and_states_can_be_written_to(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), make_snapshot(), keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    loaded.server["theta"] += 1
    for shard in loaded.states:
        for array in shard.tensors.values():
            array[:] = 0


def test_a_method_without_state_can_be_saved(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), Snapshot(round=1, server={}, states=[], tables={}, meta={}), keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.server, list(loaded.states), loaded.tables) == ({}, [], {})


def test_states_are_written_a_file_at_a_time_and_never_all_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "FILE_SIZE", 2 * 16)
    written_before = []

    def shards() -> Iterator[StateShard]:
        for i in range(5):
            written_before.append(len(list(tmp_path.rglob("states-*"))))
            yield StateShard(np.array([i]), {"w": np.zeros((1, 2))})

    checkpoints.save(str(tmp_path), Snapshot(round=1, server={}, states=shards(), tables={}, meta={}), keep=1)
    assert written_before == [0, 0, 0, 1, 1]
    loaded = load(tmp_path)
    assert loaded is not None
    assert [shard.clients.tolist() for shard in loaded.states] == [[0], [1], [2], [3], [4]]


def test_small_states_share_a_file(tmp_path: Path) -> None:
    shards = [StateShard(np.array([i]), {"w": np.full((1, 2), i)}) for i in range(200)]
    path = checkpoints.save(str(tmp_path), Snapshot(round=1, server={}, states=shards, tables={}, meta={}), keep=1)
    assert len(list(Path(path).glob("states-*"))) == 1
    loaded = load(tmp_path)
    assert loaded is not None
    assert [(int(s.clients[0]), int(s.tensors["w"][0, 1])) for s in loaded.states] == [(i, i) for i in range(200)]


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert load(tmp_path / "nothing") is None
    assert load(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for round in range(1, 5):
        checkpoints.save(str(tmp_path), make_snapshot(round), keep=2)
    assert folders(tmp_path) == ["000003-round-3", "000004-round-4"]


def test_a_checkpoint_never_overwrites_one_of_the_same_round(tmp_path: Path) -> None:
    assert checkpoints.save(str(tmp_path), make_snapshot(5), 2) != checkpoints.save(str(tmp_path), make_snapshot(5), 2)


def test_a_checkpoint_saved_after_falling_back_counts_as_the_newest(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), make_snapshot(20), keep=2)
    checkpoints.save(str(tmp_path), make_snapshot(30), keep=2)
    checkpoints.save(str(tmp_path), make_snapshot(25), keep=2)
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 25


FILES = ["server.safetensors", "states-00000.safetensors", "meta.json", "manifest.json"]
DAMAGES = ["truncated", "missing", "a bit flipped"]


def inflict(damage: str, file: Path, place: int | None = None) -> None:
    """Damage a file; the flipped bit is at `place`, or in the middle."""
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2 if place is None else place] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_skipped_with_a_sentence_that_names_the_file(
    tmp_path: Path, name: str, damage: str
) -> None:
    checkpoints.save(str(tmp_path), make_snapshot(1), keep=2)
    newest = Path(checkpoints.save(str(tmp_path), make_snapshot(2), keep=2))
    file = newest / name
    inflict(damage, file, file.read_bytes().index(b'"sha256": "') + 12 if name == "manifest.json" else None)
    warnings: list[str] = []
    loaded = load(tmp_path, warnings)

    assert loaded is not None
    assert loaded.round == 1
    assert len(warnings) == 1
    assert str(newest) in warnings[0]
    assert name in warnings[0] or name == "manifest.json"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_costs_its_rows_and_no_checkpoint(tmp_path: Path, damage: str) -> None:
    snapshot = make_snapshot(2)
    table = snapshot.tables["rounds"]
    checkpoints.save(str(tmp_path), snapshot, keep=2)
    table.waiting.extend({"round": [4], "loss": [0.25]})
    checkpoints.save(str(tmp_path), snapshot, keep=2)
    first = table.parts[0]
    inflict(damage, tmp_path / "tables" / first.file)
    warnings: list[str] = []
    loaded = load(tmp_path, warnings)

    assert loaded is not None
    assert checkpoints.read_table(str(tmp_path), loaded.tables["rounds"]).to_pydict() == {"round": [4], "loss": [0.25]}
    assert len(warnings) == 1
    assert "3 rows of the table rounds are lost, and the run continues without them: " in warnings[0]
    assert first.file in warnings[0]
    with pytest.raises(CheckpointError, match=first.file):
        checkpoints.load(str(tmp_path), lambda text: None, needed=["rounds"])


def test_a_damaged_table_is_written_again_from_a_copy_if_that_has_its_rows(tmp_path: Path) -> None:
    snapshot = make_snapshot(2)
    for round in range(4, 9):
        checkpoints.save(str(tmp_path), snapshot, keep=1)
        snapshot.tables["rounds"].waiting.extend({"round": [round], "loss": [1 / round]})

    checkpoints.save(str(tmp_path), snapshot, keep=1)
    rows = checkpoints.read_table(str(tmp_path), snapshot.tables["rounds"])
    for part in snapshot.tables["rounds"].parts:
        for copy, restored in ((rows.slice(1), False), (rows, True)):
            inflict("a bit flipped", tmp_path / "tables" / part.file)
            warnings: list[str] = []
            loaded = checkpoints.load(str(tmp_path), warnings.append, copies=lambda name: copy)  # noqa: B023
            assert loaded is not None
            assert (len(loaded.tables["rounds"].parts) == len(snapshot.tables["rounds"].parts)) == restored
            assert ("written again" in warnings[0]) == restored
            if not restored:
                inflict("a bit flipped", tmp_path / "tables" / part.file)
        assert repr(checkpoints.read_table(str(tmp_path), loaded.tables["rounds"]).to_pydict()) == repr(
            rows.to_pydict()
        )


@pytest.mark.parametrize("content", ["[]", "{}", "null", '{"round": 2, "state_files": "x"}', '"round"'])
def test_a_checkpoint_with_an_odd_meta_file_is_skipped_with_a_sentence(tmp_path: Path, content: str) -> None:
    checkpoints.save(str(tmp_path), make_snapshot(1), keep=2)
    newest = Path(checkpoints.save(str(tmp_path), make_snapshot(2), keep=2))
    manifest = json.loads((newest / "manifest.json").read_text())
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest["files"]["meta.json"] = entry
    (newest / "meta.json").write_text(content)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    warnings: list[str] = []
    loaded = load(tmp_path, warnings)

    assert loaded is not None
    assert loaded.round == 1
    assert "its meta.json is not what raypfl writes" in warnings[0]


def test_without_an_intact_checkpoint_the_error_names_the_damage_of_each(tmp_path: Path) -> None:
    for round in (1, 2):
        (Path(checkpoints.save(str(tmp_path), make_snapshot(round), keep=2)) / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"round-2 .*meta.json is missing.*round-1 .*meta.json is missing"):
        load(tmp_path)


def test_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), make_snapshot(1), keep=1)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_A_SAVE, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

    assert killed.returncode == -signal.SIGKILL
    assert len(folders(tmp_path)) == 2

    warnings: list[str] = []
    loaded = load(tmp_path, warnings)
    assert loaded is not None
    assert loaded.round == 1
    assert "is unfinished" in warnings[0]

    checkpoints.save(str(tmp_path), make_snapshot(2), keep=1)
    assert folders(tmp_path) == ["000003-round-2"]


KILLED_IN_A_SAVE = """
import os, signal, sys
import numpy as np
from raypfl.storage import checkpoints
from raypfl.storage.states import StateShard

def shards():
    yield StateShard(np.arange(2), {"w": np.zeros((2, 1000))})
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints.save(sys.argv[1], checkpoints.Snapshot(round=2, server={}, states=shards(), tables={}, meta={}), keep=1)
"""


def test_a_run_killed_in_its_very_first_save_has_no_checkpoint(tmp_path: Path) -> None:
    path = Path(checkpoints.save(str(tmp_path), make_snapshot(), keep=1))
    path.rename(path.with_name(path.name + ".draft"))
    warnings: list[str] = []
    assert load(tmp_path, warnings) is None
    assert len(warnings) == 1


def test_a_failed_save_is_reported_in_a_sentence_and_costs_no_older_checkpoint(tmp_path: Path) -> None:
    def full_disk() -> Iterator[StateShard]:
        yield StateShard(np.arange(1), {"w": np.zeros((1, 2))})
        raise OSError("No space left on device")

    checkpoints.save(str(tmp_path), make_snapshot(1), keep=1)
    with pytest.raises(CheckpointError, match=r"round 2 cannot be written.*No space left.*checkpoint.location"):
        checkpoints.save(str(tmp_path), Snapshot(round=2, server={}, states=full_disk(), tables={}, meta={}), keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 1


@pytest.mark.parametrize("value", [object(), np.float32(1), {(1, 2): 3}])
def test_a_server_state_that_cannot_be_stored_is_refused_by_its_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="optimizer/thing"):
        checkpoints.save(
            str(tmp_path), Snapshot(round=1, server={"optimizer": {"thing": value}}, states=[], tables={}, meta={}), 1
        )


def test_a_uri_can_be_the_location(tmp_path: Path) -> None:
    checkpoints.save(f"file://{tmp_path}/a", make_snapshot(), keep=1)
    assert load(tmp_path / "a") is not None
    assert load(f"file://{tmp_path}/a/") is not None


@pytest.mark.parametrize("location", ["nowhere://bucket/a", "s3:// bad uri"])
def test_a_location_that_cannot_be_opened_is_named(location: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.location is"):
        load(location)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pafs.FileSystem:
    """A pretended object store: a file system that cannot rename."""
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    monkeypatch.setattr(filesystems, "open_location", lambda location: (store, "runs/digits"))
    return store


def test_an_object_store_keeps_checkpoints_too(bucket: pafs.FileSystem, tmp_path: Path) -> None:
    for round in (1, 2, 3):
        assert checkpoints.save("s3://bucket/runs/digits", make_snapshot(round), keep=2).startswith("runs/digits/")
    loaded = load("s3://bucket/runs/digits")
    assert loaded is not None
    assert_same(loaded.server, make_snapshot().server)
    assert folders(tmp_path / "runs/digits") == ["000002-round-2", "000003-round-3"]


def test_in_an_object_store_a_checkpoint_without_manifest_was_never_finished(
    bucket: pafs.FileSystem, tmp_path: Path
) -> None:
    first = tmp_path / checkpoints.save("s3://bucket/runs/digits", make_snapshot(1), keep=1)
    shutil.copytree(first, first.with_name("000002-round-2"))
    (first.with_name("000002-round-2") / "manifest.json").unlink()
    warnings: list[str] = []
    loaded = load("s3://bucket/runs/digits", warnings)

    assert loaded is not None
    assert loaded.round == 1
    assert "is unfinished" in warnings[0]

    checkpoints.save("s3://bucket/runs/digits", make_snapshot(3), keep=2)
    assert folders(first.parent) == ["000001-round-1", "000003-round-3"]
