"""A finished run's models, from its folder or an export, are ordinary networks and are those that were evaluated."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import raypfl
from raypfl import Experiment
from raypfl.common.errors import CheckpointError, ConfigError, DataError, RaypflError
from raypfl.methods import METHODS
from raypfl.storage import checkpoints
from raypfl.storage.checkpoints import Snapshot, StoredStates, write_shards
from raypfl.storage.states import StateShard
from raypfl.trained.models import TrainedModels
from raypfl.trained.saved_model import save
from tests.support.runs import experiment
from tests.support.tiers import methods

PERSONAL = [name for name in METHODS if METHODS.get(name)().has("personal_model")]


def exported(run_dir: Path, folder: Path) -> TrainedModels:
    """A run's models, exported to a folder and read from there."""
    TrainedModels.of_run(run_dir).export(folder)
    return TrainedModels.of_export(folder)


def accuracy(model: torch.nn.Module, data: raypfl.data.FederatedData, client: int) -> float:
    """The accuracy on a client's test samples."""
    indices = data.indices(client, "test")
    logits = model(torch.from_numpy(data.inputs[indices]))
    return float((logits.argmax(1).numpy() == data.labels[indices]).mean())


def recorded(result: raypfl.Result, model: str) -> dict[int, float]:
    """Client -> the accuracy in the run's last evaluation, for clients with test samples."""
    accuracies = {}
    for row in result.evaluations.to_pylist():
        evaluation = (row["round"], row["protocol"], row["model"])
        if evaluation == (result.round, "local", model) and row["samples"]:
            accuracies[row["client"]] = row["accuracy"]
    return accuracies


@pytest.mark.parametrize("method", methods(PERSONAL))
def test_personal_models_are_those_that_were_evaluated_whatever_the_method(method: str, tmp_path: Path):
    small = {"rounds": 2, "evaluation__every": 2, "partition__clients": 6, "cohort__size": 3, "training__steps": 4}
    result = raypfl.run(experiment(tmp_path, method=method, **small))
    from_folder = TrainedModels.of_run(result.run_dir)
    from_export = exported(result.run_dir, tmp_path / "models")

    expected = recorded(result, "personal")
    assert len(expected) > 4
    data = from_export.outline.data
    for client, evaluated in expected.items():
        model = from_export.personal_model(client)
        assert accuracy(model, data, client) == pytest.approx(evaluated, abs=1e-9)

    client = next(iter(expected))
    parameters = (models.personal_model(client).parameters() for models in (from_folder, from_export))
    for a, b in zip(*parameters, strict=True):
        assert torch.equal(a, b)


def test_the_global_model_is_the_one_that_was_evaluated(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, rounds=2, evaluation__every=2))
    models = TrainedModels.of_run(result.run_dir, whole=False)
    for client, evaluated in recorded(result, "global").items():
        assert accuracy(models.global_model(), models.outline.data, client) == pytest.approx(evaluated, abs=1e-9)


def test_models_of_a_regression_give_numbers_in_the_units_of_the_targets(tmp_path: Path):
    changes = {"data": "diabetes", "partition": "by_column", "objective": "{name: regression, mean: 150, std: 75}"}
    result = raypfl.run(experiment(tmp_path, **changes, method="fedavg", rounds=1, evaluation__every=1))
    models = raypfl.trained_models(result)
    x, y = models.outline.data.take(models.outline.data.indices(0, "test"))
    (row,) = (row for row in result.evaluations.to_pylist() if (row["client"], row["protocol"]) == (0, "local"))

    model = models.global_model()
    predicted = model(torch.from_numpy(x)).detach()[:, 0]
    assert float((predicted - torch.from_numpy(y)).square().mean()) == pytest.approx(row["mse"], rel=1e-5)

    file = save(model, models.origin, tmp_path / "model.safetensors", {})
    assert torch.equal(raypfl.load_model(file)(torch.from_numpy(x))[:, 0], predicted)


def test_clients_that_were_never_trained_get_what_the_method_gives_them(tmp_path: Path):
    described = experiment(
        tmp_path, method="fedper", rounds=2, data__unseen_fraction=0.2, evaluation__protocols="[unseen]"
    )
    result = raypfl.run(described)
    models = exported(result.run_dir, tmp_path / "models")
    assert len(models.outline.unseen) == 2

    rows = [row for row in result.evaluations.to_pylist() if row["model"] == "personal"]
    for row in rows:
        again = accuracy(models.personal_model(row["client"]), models.outline.data, row["client"])
        assert again == pytest.approx(row["accuracy"], abs=1e-9)


def test_models_that_are_made_with_noise_have_the_noise_of_the_evaluation(tmp_path: Path):
    changes = {"rounds": 1, "data__unseen_fraction": 0.2, "evaluation__protocols": "[local, unseen]"}
    described = experiment(tmp_path, method="fedavg-ft", privacy__noise=1.0, cohort__size=2, **changes)
    result = raypfl.run(described)
    models = raypfl.trained_models(result)

    rows = [row for row in result.evaluations.to_pylist() if row["model"] == "personal"]
    assert {row["protocol"] for row in rows} == {"local", "unseen"}
    for row in rows:
        again = accuracy(models.personal_model(row["client"]), models.outline.data, row["client"])
        assert again == pytest.approx(row["accuracy"], abs=1e-9)


def test_models_are_read_from_an_export_without_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = raypfl.run(experiment(tmp_path, method="fedper", rounds=2, evaluation__every=0))
    models = exported(result.run_dir, tmp_path / "models")
    monkeypatch.setattr(Experiment, "load_data", lambda self: pytest.fail("the data were opened"))
    alone = TrainedModels.of_export(tmp_path / "models")
    expected = models.personal_model(3)(torch.ones(2, 1, 8, 8))
    assert torch.equal(alone.personal_model(3)(torch.ones(2, 1, 8, 8)), expected)
    assert torch.isfinite(alone.global_model()(torch.ones(2, 1, 8, 8))).all()


def test_damaged_states_are_not_exported_as_if_they_were_intact(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, method="fedper", rounds=1, evaluation__every=0))
    (file,) = (result.run_dir / "checkpoints" / "states").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"is damaged: the content of its states/.* has changed"):
        TrainedModels.of_run(result.run_dir, whole=False).export(tmp_path / "models")


def test_missing_models_clients_and_checkpoints_are_refused_in_a_sentence(tmp_path: Path):
    result = raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, evaluation__every=0))
    models = TrainedModels.of_run(result.run_dir)
    with pytest.raises(ConfigError, match="FedAvg makes no personal models"):
        models.personal_model(0)
    with pytest.raises(ConfigError, match="no client 12; clients are numbered from 0 to 11"):
        models.personal_model(12)
    # The axis of channels is missing: torch alone would speak of matrices that cannot be multiplied.
    with pytest.raises(DataError, match=r"trained with inputs of shape \[n, 1, 8, 8\], and fails with \[5, 8, 4\]"):
        models.global_model()(torch.ones(5, 8, 4))

    with pytest.raises(CheckpointError, match="is not the folder of a run") as refused:
        TrainedModels.of_run(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(str(refused.value))):
        raypfl.resume(tmp_path)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*empty"):
        TrainedModels.of_export(tmp_path / "empty")


def test_models_of_data_that_have_changed_since_are_refused(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 3)))
    np.save(tmp_path / "y.npy", np.arange(40) % 2)
    data = {"data": f"{{name: arrays, root: {tmp_path}, input: x.npy, target: y.npy}}", "partition__clients": 2}
    small = {"cohort__size": 2, "rounds": 1, "evaluation__every": 0}
    run_dir = raypfl.run(experiment(tmp_path, **data, **small)).run_dir
    assert TrainedModels.of_run(run_dir).num_clients == 2

    np.save(tmp_path / "x.npy", np.random.default_rng(1).normal(size=(40, 3)))
    with pytest.raises(DataError, match="have changed since the run was trained"):
        TrainedModels.of_run(run_dir)


def test_a_checkpoint_gives_a_clients_latest_state_or_the_server_without_states(tmp_path: Path):
    older = StateShard(np.array([1, 2]), {"a": np.array([1.0, 2.0])})
    newer = StateShard(np.array([1]), {"a": np.array([5.0])})
    states = StoredStates(str(tmp_path), (write_shards(str(tmp_path), [older, newer]),))
    snapshot = Snapshot(round=1, server={"theta": torch.ones(2)}, states=states, tables={}, meta={})
    checkpoints.save(str(tmp_path), snapshot, keep=1)

    loaded = checkpoints.load(str(tmp_path), pytest.fail)
    assert loaded is not None
    assert [float(loaded.state_of(client)["a"]) for client in (1, 2)] == [5.0, 2.0]
    assert loaded.state_of(0) == {}

    (tmp_path / states.state_files[0].path).write_bytes(b"damaged")
    server_alone = checkpoints.load(str(tmp_path), pytest.fail, whole=False)
    assert server_alone is not None and torch.equal(server_alone.server["theta"], torch.ones(2))


def test_a_model_that_needs_exchanges_is_built_from_folder_and_export(tmp_path: Path):
    described = experiment(
        tmp_path,
        method="pefll",
        rounds=2,
        data__unseen_fraction=0.2,
        evaluation__protocols="[local,unseen]",
    )
    result = raypfl.run(described)
    from_folder = TrainedModels.of_run(result.run_dir)
    from_export = exported(result.run_dir, tmp_path / "models")

    rows = [row for row in result.evaluations.to_pylist() if row["round"] == 2 and row["samples"]]
    assert {row["protocol"] for row in rows} == {"local", "unseen"}
    for row in rows:
        client = row["client"]
        for models in (from_folder, from_export):
            again = accuracy(models.personal_model(client), from_folder.outline.data, client)
            assert again == pytest.approx(row["accuracy"], abs=1e-9)


class FailsInRoundTwo(raypfl.methods.FedAvg):
    def round(self, server, cohort) -> None:
        super().round(server, cohort)
        if cohort.round == 2:
            raise ValueError("in round 2")


def test_models_of_a_failed_run_come_with_a_warning(tmp_path: Path):
    described = experiment(tmp_path, rounds=3, evaluation__every=0).replace(method=FailsInRoundTwo())
    with pytest.raises(RaypflError, match="in round 2"):
        raypfl.run(described, run_dir=tmp_path / "run")
    with pytest.warns(UserWarning, match="failed: its models are those after round 1 of 3"):
        TrainedModels.of_run(tmp_path / "run")
