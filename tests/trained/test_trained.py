"""The models that a run ended with are what was evaluated, as ordinary networks, from its folder or an export."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError
from raypfl.methods import METHODS
from raypfl.runs.result import newest
from raypfl.storage import checkpoints
from raypfl.storage.checkpoints import Snapshot
from raypfl.storage.states import StateShard
from raypfl.trained import models as trained
from raypfl.trained.models import TrainedModels
from tests.support.runs import experiment

PERSONAL = [name for name in METHODS if METHODS.get(name)().has("personal_model")]


def exported(run_dir: Path, folder: Path) -> TrainedModels:
    """A run's models by way of an export."""
    TrainedModels.of_snapshot(*newest(run_dir)).export(folder)
    return TrainedModels.of_export(folder)


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
    folder, file = TrainedModels.of_snapshot(*newest(result.run_dir)), exported(result.run_dir, tmp_path / "models")
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
    models = exported(result.run_dir, tmp_path / "models")
    assert len(models.outline.unseen) == 2
    rows = [row for row in result.evaluations.to_pylist() if row["model"] == "personal"]
    for row in rows:
        found = accuracy(models.personal_model(row["client"]), models.outline.data, row["client"])
        assert found == pytest.approx(row["accuracy"], abs=1e-9)


def test_models_are_made_from_an_export_alone_where_the_data_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = raypfl.run(experiment(tmp_path, method="fedper", rounds=2, evaluation__every=0))
    models = exported(result.run_dir, tmp_path / "models")
    monkeypatch.setattr(trained, "load_federated", lambda *args, **options: pytest.fail("the data were opened"))
    alone = TrainedModels.of_export(tmp_path / "models")
    expected = models.personal_model(3)(torch.ones(2, 1, 8, 8))
    assert torch.equal(alone.personal_model(3)(torch.ones(2, 1, 8, 8)), expected)
    assert torch.isfinite(alone.global_model()(torch.ones(2, 1, 8, 8))).all()


def test_what_is_not_there_is_refused_in_a_sentence(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, evaluation__every=0))
    models = TrainedModels.of_snapshot(*newest(result.run_dir))
    with pytest.raises(ConfigError, match="FedAvg makes no personal models"):
        models.personal_model(0)
    with pytest.raises(ConfigError, match="no client 12; clients are numbered from 0 to 11"):
        models.personal_model(12)
    with pytest.raises(CheckpointError, match="is not the folder of a run") as refused:
        TrainedModels.of_snapshot(*newest(tmp_path))
    with pytest.raises(CheckpointError, match=re.escape(str(refused.value))):
        raypfl.resume(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*empty"):
        TrainedModels.of_export(tmp_path / "empty")


def test_a_checkpoint_finds_one_clients_state_and_the_server_alone(tmp_path: Path):
    packed = [
        StateShard(np.array([1, 2]), {"a": np.array([1.0, 2.0])}),
        StateShard(np.array([1]), {"a": np.array([5.0])}),
    ]
    snapshot = Snapshot(round=1, server={"theta": torch.ones(2)}, states=packed, tables={}, meta={})
    path = Path(checkpoints.save(str(tmp_path), snapshot, keep=1))
    loaded = checkpoints.load(str(tmp_path), pytest.fail)
    assert loaded is not None
    assert [float(loaded.state_of(client)["a"]) for client in (1, 2)] == [5.0, 2.0]
    assert loaded.state_of(0) == {}
    (path / "states-00000.safetensors").write_bytes(b"damaged")
    alone = checkpoints.load(str(tmp_path), pytest.fail, whole=False)
    assert alone is not None and torch.equal(alone.server["theta"], torch.ones(2))


def test_a_model_that_takes_exchanges_is_made_by_them_from_folder_and_export(tmp_path: Path):
    described = experiment(
        tmp_path,
        method="tests.support.prediction_methods:Hypernetwork",
        rounds=2,
        data__unseen_fraction=0.2,
        evaluation__protocols="[local,unseen]",
    )
    result = raypfl.run(described)
    folder, file = TrainedModels.of_snapshot(*newest(result.run_dir)), exported(result.run_dir, tmp_path / "models")
    rows = [row for row in result.evaluations.to_pylist() if row["round"] == 2 and row["samples"]]
    assert {row["protocol"] for row in rows} == {"local", "unseen"}
    for row in rows:
        models = (one.personal_model(row["client"]) for one in (folder, file))
        found = [accuracy(model, folder.outline.data, row["client"]) for model in models]
        assert found == pytest.approx([row["accuracy"]] * 2, abs=1e-9)
