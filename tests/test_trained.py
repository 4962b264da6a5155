"""The models that a run ended with are what was evaluated, as ordinary networks, from its folder or from one file."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError
from raypfl.methods import METHODS
from raypfl.runs import models_file
from raypfl.runs.trained import TrainedModels, newest
from raypfl.server.outline import DataOutline
from raypfl.storage import checkpoint
from raypfl.storage.checkpoint import Snapshot
from raypfl.storage.states import StateShard
from tests.runs import experiment

PERSONAL = [name for name in METHODS if METHODS.get(name)().has("personal_model")]


def in_one_file(run_dir: Path, file: Path) -> TrainedModels:
    """A run's models by way of a file."""
    described, snapshot = newest(run_dir)
    models_file.write(file, described, snapshot, TrainedModels.of_run(run_dir).outline)
    return TrainedModels.of_file(file)


def accuracy(model: torch.nn.Module, data: raypfl.data.FederatedData, client: int) -> float:
    where = data.indices(client, "test")
    logits = model(torch.from_numpy(data.inputs[where]))
    return float((logits.argmax(1).numpy() == data.labels[where]).mean())


def recorded(result: raypfl.Result, model: str) -> dict[int, float]:
    rows = result.evaluations.to_pylist()
    return {
        row["client"]: row["accuracy"]
        for row in rows
        if (row["round"], row["protocol"], row["model"]) == (result.round, "local", model) and row["samples"]
    }


@pytest.mark.parametrize("method", PERSONAL)
def test_personal_models_are_those_that_were_evaluated_whatever_the_method(method: str, tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, method=method, rounds=2, evaluation__every=2))
    folder, file = TrainedModels.of_run(result.run_dir), in_one_file(result.run_dir, tmp_path / "models.safetensors")
    expected = recorded(result, "personal")
    assert len(expected) > 8
    for client, right in expected.items():
        assert accuracy(file.personal_model(client), file.outline.data, client) == pytest.approx(right, abs=1e-9)
    one = next(iter(expected))
    for a, b in zip(*(models.personal_model(one).parameters() for models in (folder, file)), strict=True):
        assert torch.equal(a, b)


def test_the_global_model_is_the_one_that_was_evaluated(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, rounds=2, evaluation__every=2))
    models = TrainedModels.of_snapshot(*newest(result.run_dir, whole=False))
    for client, right in recorded(result, "global").items():
        assert accuracy(models.global_model(), models.outline.data, client) == pytest.approx(right, abs=1e-9)


def test_clients_that_were_never_trained_get_what_the_method_gives_them(tmp_path: Path):
    described = experiment(
        tmp_path, method="fedper", rounds=2, data__unseen_fraction=0.2, evaluation__protocols="[unseen]"
    )
    result = raypfl.run(described)
    models = in_one_file(result.run_dir, tmp_path / "models.safetensors")
    assert len(models.outline.unseen) == 2
    rows = [row for row in result.evaluations.to_pylist() if row["model"] == "personal"]
    for row in rows:
        found = accuracy(models.personal_model(row["client"]), models.outline.data, row["client"])
        assert found == pytest.approx(row["accuracy"], abs=1e-9)


def test_models_are_made_from_the_file_alone_where_the_data_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = raypfl.run(experiment(tmp_path, method="fedper", rounds=2, evaluation__every=0))
    models = in_one_file(result.run_dir, tmp_path / "models.safetensors")
    monkeypatch.setattr(models_file, "load_federated", lambda *args, **options: pytest.fail("the data were opened"))
    alone = TrainedModels.of_file(tmp_path / "models.safetensors")
    expected = models.personal_model(3)(torch.ones(2, 1, 8, 8))
    assert torch.equal(alone.personal_model(3)(torch.ones(2, 1, 8, 8)), expected)
    assert torch.isfinite(alone.global_model()(torch.ones(2, 1, 8, 8))).all()


def test_what_is_not_there_is_refused_in_a_sentence(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, evaluation__every=0))
    models = TrainedModels.of_run(result.run_dir)
    with pytest.raises(ConfigError, match="FedAvg makes no personal models"):
        models.personal_model(0)
    with pytest.raises(ConfigError, match="no client 12; clients are numbered from 0 to 11"):
        models.personal_model(12)
    with pytest.raises(CheckpointError, match="is no run's folder") as refused:
        TrainedModels.of_run(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(str(refused.value))):
        raypfl.resume(tmp_path)
    (tmp_path / "torn").write_bytes(b"\x08")
    with pytest.raises(CheckpointError, match="torn is no file of a run's models"):
        TrainedModels.of_file(tmp_path / "torn")


def outline(clients: int) -> DataOutline:
    return DataOutline(
        input_shape=(1, 8, 8),
        num_classes=10,
        kind="classes",
        discrete=False,
        scale=16.0,
        mean=np.zeros(1, np.float32),
        std=np.ones(1, np.float32),
        unseen=np.zeros(0, np.int64),
        sizes={"train": np.ones(clients, np.int64), "test": np.ones(clients, np.int64)},
        data=lambda: pytest.fail("the data were opened"),
    )


def snapshot_of(shards: Iterable[StateShard], **server) -> Snapshot:
    return Snapshot(round=1, server=server, states=shards, tables={}, meta={})


def test_of_a_client_in_several_shards_the_last_one_counts_also_if_it_lacks_a_name(tmp_path: Path):
    old = StateShard(np.array([4, 1, 2]), {"a": np.arange(3.0), "b": np.arange(3)})
    new = StateShard(np.array([1]), {"a": np.array([7.0])})
    server = {"steps": torch.zeros(0, 3), "half": torch.ones(3, dtype=torch.bfloat16), "nested": {"seen": True}}
    models_file.write(tmp_path / "f", raypfl.Experiment(), snapshot_of([old, new], **server), outline(5))
    stored = models_file.ModelsFile(tmp_path / "f")
    kept = [{name: value.item() for name, value in stored.state_of(client).items()} for client in range(5)]
    assert kept == [{}, {"a": 7.0}, {"a": 2.0, "b": 2}, {}, {"a": 0.0, "b": 0}]
    assert stored.server["steps"].shape == (0, 3) and stored.server["nested"] == {"seen": True}
    assert torch.equal(stored.server["half"], server["half"])


def test_a_name_that_did_not_change_is_taken_from_the_shard_that_has_it_in_whatever_order_they_come(tmp_path: Path):
    shards = [
        StateShard(np.array([1]), {"a": np.array([9.0])}, number=3, whole=False),
        StateShard(np.array([1, 2]), {"a": np.arange(2.0), "b": np.arange(2)}, number=1),
        StateShard(np.array([2]), {"a": np.array([5.0])}, number=4),
        StateShard(np.array([1, 2]), {"b": np.array([7, 7]), "c": np.zeros(2)}, number=0, whole=False),
    ]
    models_file.write(tmp_path / "f", raypfl.Experiment(), snapshot_of(shards), outline(3))
    stored = models_file.ModelsFile(tmp_path / "f")
    kept = [{name: value.item() for name, value in stored.state_of(client).items()} for client in range(3)]
    assert kept == [{}, {"a": 9.0, "b": 0}, {"a": 5.0}]


def test_the_file_is_an_ordinary_safetensors_file_with_a_row_for_each_client(tmp_path: Path):
    rows = np.random.default_rng(0).normal(size=(3, 4))
    models_file.write(
        tmp_path / "f",
        raypfl.Experiment(),
        snapshot_of([StateShard(np.array([5, 0, 3]), {"personal": rows})]),
        outline(6),
    )
    tensors = safetensors.numpy.load_file(tmp_path / "f")
    assert tensors["state/personal/clients"].tolist() == [0, 3, 5]
    assert np.array_equal(tensors["state/personal/rows"], rows[[1, 2, 0]])


def test_a_file_is_written_with_no_more_than_two_shards_in_memory(tmp_path: Path):
    made: list[weakref.ref[StateShard]] = []
    most = 0

    class Shards:
        def __iter__(self) -> Iterator[StateShard]:
            nonlocal most
            for k in range(20):
                shard = StateShard(np.array([k]), {"a": np.full((1, 3), k)})
                made.append(weakref.ref(shard))
                most = max(most, sum(one() is not None for one in made))
                yield shard

    models_file.write(tmp_path / "f", raypfl.Experiment(), snapshot_of(Shards()), outline(20))
    assert most <= 2
    assert models_file.ModelsFile(tmp_path / "f").state_of(13)["a"].tolist() == [13, 13, 13]


def test_states_that_make_no_rows_are_refused_in_a_sentence(tmp_path: Path):
    shards = [StateShard(np.array([k]), {"a": np.zeros((1, 2 + k))}) for k in range(2)]
    with pytest.raises(CheckpointError, match="What clients keep as 'a' is float64"):
        models_file.write(tmp_path / "f", raypfl.Experiment(), snapshot_of(shards), outline(2))
    assert not (tmp_path / "f").exists()


def test_a_checkpoint_finds_one_clients_state_and_the_server_alone(tmp_path: Path):
    packed = [
        StateShard(np.array([1, 2]), {"a": np.array([1.0, 2.0])}),
        StateShard(np.array([1]), {"a": np.array([5.0])}),
    ]
    path = Path(checkpoint.save(str(tmp_path), snapshot_of(packed, theta=torch.ones(2)), keep=1))
    loaded = checkpoint.load(str(tmp_path), pytest.fail)
    assert loaded is not None
    assert [float(loaded.state_of(client)["a"]) for client in (1, 2)] == [5.0, 2.0]
    assert loaded.state_of(0) == {}
    (path / "states-00000.safetensors").write_bytes(b"damaged")
    alone = checkpoint.load(str(tmp_path), pytest.fail, whole=False)
    assert alone is not None and torch.equal(alone.server["theta"], torch.ones(2))


def test_a_model_that_takes_exchanges_is_made_by_them_from_folder_and_file(tmp_path: Path):
    described = experiment(
        tmp_path,
        method="tests.prediction_methods:Hypernetwork",
        rounds=2,
        data__unseen_fraction=0.2,
        evaluation__protocols="[local,unseen]",
    )
    result = raypfl.run(described)
    folder, file = TrainedModels.of_run(result.run_dir), in_one_file(result.run_dir, tmp_path / "models.safetensors")
    rows = [row for row in result.evaluations.to_pylist() if row["round"] == 2 and row["samples"]]
    assert {row["protocol"] for row in rows} == {"local", "unseen"}
    for row in rows:
        models = (one.personal_model(row["client"]) for one in (folder, file))
        found = [accuracy(model, folder.outline.data, row["client"]) for model in models]
        assert found == pytest.approx([row["accuracy"]] * 2, abs=1e-9)
