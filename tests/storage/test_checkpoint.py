"""A checkpoint gives back the same bits, or says in a sentence why it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypfl.common import files
from raypfl.common.errors import CheckpointError
from raypfl.storage import checkpoints, filesystems
from raypfl.storage.checkpoints import Snapshot, StoredStates, write_shards
from raypfl.storage.checkpoints.layout import FORMAT, STATES, TABLES
from raypfl.storage.columns import Columns
from raypfl.storage.states import StateShard
from raypfl.storage.tables import RunTable
from tests.support.processes import call

AWKWARD = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 0.1]


def make_shards(round: int) -> list[StateShard]:
    """Return two shards of clients' states, with the round, so that no two rounds share a file."""
    numbers = np.array([0.5, -0.0], "float32")
    return [
        StateShard(np.array([4, 1]), {"personal": np.array([AWKWARD, AWKWARD]), "alpha": numbers}),
        StateShard(np.array([7]), {"steps/count": np.array([[2**60, round]]), "seen": np.array([True])}),
    ]


def make_snapshot(location: object, round: int = 3) -> Snapshot:
    """Return a snapshot whose clients' states are in the location already."""
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
    states = StoredStates(str(location), (write_shards(str(location), make_shards(round)),))
    tables = {"rounds": RunTable(Columns({"round": "int32", "loss": "float64"}))}
    tables["rounds"].waiting.extend({"round": [1, 2, 3], "loss": [0.5, float("nan"), -0.0]})

    return Snapshot(round=round, server=server, states=states, tables=tables, meta={"seed": 1, "run": "digits"})


def save(location: object, round: int, keep: int) -> str:
    return checkpoints.save(str(location), make_snapshot(location, round), keep)


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
    return sorted(entry.name for entry in location.iterdir() if entry.name not in (STATES, TABLES))


def test_a_snapshot_comes_back_to_the_same_bits(tmp_path: Path) -> None:
    saved = make_snapshot(tmp_path)
    path = checkpoints.save(str(tmp_path), saved, keep=2)
    assert Path(path).parent == tmp_path

    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.round, loaded.meta) == (3, saved.meta)

    assert_same(saved.server, loaded.server)
    rounds = checkpoints.read_table(str(tmp_path), loaded.tables["rounds"])
    assert repr(rounds.to_pydict()) == repr({"round": [1, 2, 3], "loss": [0.5, float("nan"), -0.0]})
    for _ in range(2):  # the states can be read again
        for before, after in zip(make_shards(3), loaded.states, strict=True):
            assert np.array_equal(before.clients, after.clients)
            assert before.tensors.keys() == after.tensors.keys()
            for name, array in before.tensors.items():
                assert after.tensors[name].dtype == array.dtype
                assert after.tensors[name].tobytes() == array.tobytes()


def test_loaded_tensors_and_states_can_be_written_to(tmp_path: Path) -> None:
    save(tmp_path, 3, keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    loaded.server["theta"] += 1
    for shard in loaded.states:
        for array in shard.tensors.values():
            array[:] = 0


NO_STATES = StoredStates("")


def test_a_method_without_state_can_be_saved(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), Snapshot(round=1, server={}, states=NO_STATES, tables={}, meta={}), keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    assert (loaded.server, list(loaded.states), loaded.tables) == ({}, [], {})


def test_no_folder_means_no_checkpoint(tmp_path: Path) -> None:
    assert load(tmp_path / "nothing") is None
    assert load(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for round in range(1, 5):
        save(tmp_path, round, keep=2)
    assert folders(tmp_path) == ["000003-round-3", "000004-round-4"]


def test_a_checkpoint_never_overwrites_one_of_the_same_round(tmp_path: Path) -> None:
    assert save(tmp_path, 5, keep=2) != save(tmp_path, 5, keep=2)


def test_a_checkpoint_saved_after_falling_back_counts_as_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 20, keep=2)
    save(tmp_path, 30, keep=2)
    save(tmp_path, 25, keep=2)
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 25


FILES = ["server.safetensors", "states", "meta.json", "manifest.json"]
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
    save(tmp_path, 1, keep=2)
    files_before = set(tmp_path.glob("states/*"))
    newest = Path(save(tmp_path, 2, keep=2))
    file = newest / name
    if name == "states":
        (file,) = set(tmp_path.glob("states/*")) - files_before
    inflict(damage, file, file.read_bytes().index(b'"sha256": "') + 12 if name == "manifest.json" else None)
    warnings: list[str] = []
    loaded = load(tmp_path, warnings)

    assert loaded is not None
    assert loaded.round == 1
    assert len(warnings) == 1
    assert str(newest) in warnings[0]
    assert file.name in warnings[0] or name == "manifest.json"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_costs_its_rows_and_no_checkpoint(tmp_path: Path, damage: str) -> None:
    snapshot = make_snapshot(tmp_path, 2)
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
    snapshot = make_snapshot(tmp_path, 2)
    for round in range(4, 9):
        checkpoints.save(str(tmp_path), snapshot, keep=1)
        snapshot.tables["rounds"].waiting.extend({"round": [round], "loss": [1 / round]})

    checkpoints.save(str(tmp_path), snapshot, keep=1)
    rows = checkpoints.read_table(str(tmp_path), snapshot.tables["rounds"])
    for part in snapshot.tables["rounds"].parts:
        for copy, restored in ((rows.slice(1), False), (rows, True)):
            inflict("a bit flipped", tmp_path / "tables" / part.file)
            warnings: list[str] = []
            loaded = checkpoints.load(str(tmp_path), warnings.append, copy_of=lambda name: copy)  # noqa: B023
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
    save(tmp_path, 1, keep=2)
    newest = Path(save(tmp_path, 2, keep=2))
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
        (Path(save(tmp_path, round, keep=2)) / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"round-2 .*meta.json is missing.*round-1 .*meta.json is missing"):
        load(tmp_path)


def kill_saves_at_each_step(location: Path) -> tuple[list[int], list[str]]:
    """Kill a save at its first step, at its second step, and so on until it gets to its end.

    Returns
    -------
    The round that is loaded after each of them, and the warnings.
    """
    save(location, 1, keep=1)
    steps_left = 0

    def dying(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal steps_left
            steps_left -= 1
            if not steps_left:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*arguments)

        return run

    # A local save goes by these: the content is there, it is on the disk, it has its name.
    for module, name in ((files.os, "fsync"), (files.os, "rename"), (files.Path, "replace")):
        setattr(module, name, dying(getattr(module, name)))

    warnings: list[str] = []
    rounds: list[int] = []
    has_died = True
    while has_died:
        steps_left = len(rounds) + 1
        child = os.fork()
        if not child:
            save(location, 2, keep=1)
            os._exit(0)
        has_died = os.waitpid(child, 0)[1] == signal.SIGKILL
        loaded = load(location, warnings)
        assert loaded is not None
        rounds.append(loaded.round)
    return rounds, warnings


def test_a_save_that_is_killed_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    rounds, warnings = call(kill_saves_at_each_step, tmp_path)
    num_before = rounds.count(1)
    assert num_before >= 10  # the last steps are to make sure that the new one is on the disk
    assert rounds == [1] * num_before + [2] * (len(rounds) - num_before)
    assert all("is unfinished" in text for text in warnings)

    assert len(folders(tmp_path)) == 1
    (only_states,) = (tmp_path / STATES).iterdir()
    assert only_states.suffix == ".safetensors"


def test_a_run_killed_in_its_very_first_save_has_no_checkpoint(tmp_path: Path) -> None:
    path = Path(save(tmp_path, 3, keep=1))
    path.rename(path.with_name(path.name + ".draft"))
    warnings: list[str] = []
    assert load(tmp_path, warnings) is None
    assert len(warnings) == 1


def test_a_failed_save_is_reported_in_a_sentence_and_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*arguments: object) -> None:
        raise OSError("No space left on device")

    save(tmp_path, 1, keep=1)
    snapshot = make_snapshot(tmp_path, 2)
    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(CheckpointError, match=r"round 2 cannot be written.*No space left.*checkpoint.location"):
        checkpoints.save(str(tmp_path), snapshot, keep=1)
    loaded = load(tmp_path)
    assert loaded is not None
    assert loaded.round == 1


@pytest.mark.parametrize("value", [object(), np.float32(1), {(1, 2): 3}])
def test_a_server_state_that_cannot_be_stored_is_refused_by_its_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="optimizer/thing"):
        checkpoints.save(
            str(tmp_path), Snapshot(1, {"optimizer": {"thing": value}}, NO_STATES, tables={}, meta={}), keep=1
        )


def test_a_name_is_added_to_an_address_before_its_query() -> None:
    assert filesystems.join("s3://b/runs/?endpoint_override=h:9000&scheme=http", "x") == (
        "s3://b/runs/x?endpoint_override=h:9000&scheme=http"
    )
    # A question mark in a local folder's name is part of the name.
    assert filesystems.join("/why?/", "x") == "/why?/x"


def test_a_copy_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    save(tmp_path, 3, keep=1)
    with pytest.raises(CheckpointError, match="checkpoint of round 3 cannot be written to /dev/null/copy"):
        checkpoints.copy_round(str(tmp_path), 3, "/dev/null/copy")


def test_a_uri_can_be_the_location(tmp_path: Path) -> None:
    save(f"file://{tmp_path}/a", 3, keep=1)
    assert load(tmp_path / "a") is not None
    assert load(f"file://{tmp_path}/a/") is not None


@pytest.mark.parametrize("location", ["nowhere://bucket/a", "s3:// bad uri"])
def test_a_location_that_cannot_be_opened_is_named(location: str) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.location is"):
        load(location)


@pytest.mark.parametrize(("change", "age"), [(-1, "an older"), (1, "a newer")])
def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, change: int, age: str) -> None:
    file = Path(save(tmp_path, 1, keep=1)) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": FORMAT + change}))
    with pytest.raises(CheckpointError, match=f"{age} version of raypfl, which is needed to read it"):
        load(tmp_path)
