"""Real runs in MLflow: comparisons below a parent, final models as one can use them, runs recorded afterwards."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import CheckpointError, RaypflError
from raypfl.integrations.tracking.listener import MLflowListener, track
from raypfl.trained.models import TrainedModels
from tests.support.runs import experiment
from tests.support.tracking import client_of, runs_of, with_database


class Moody(nn.Module):
    """A network that torch cannot export, since it looks at its input."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x.flatten(1))
        return z if z.sum().item() < 1e30 else -z


@pytest.fixture
def folder(tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return with_database(tmp_path / "runs", mlflow_database)


def small(folder: Path, **changes: Any) -> raypfl.Experiment:
    changes = {"rounds": 2, "evaluation__every": 1, "tracking__mlflow": True, **changes}
    return experiment(folder.parent, tracking__system_metrics=False, **changes)


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def test_a_comparison_is_a_parent_with_its_results_and_a_child_for_each_run_with_its_models(folder: Path) -> None:
    import mlflow.pytorch

    with MLflowListener("small", warn=pytest.fail) as tracked:
        results = [
            raypfl.run(small(folder, method=method, seed=seed), listeners=[tracked])
            for method in ("fedavg", "fedper")
            for seed in (0, 1)
        ]
        (folder / "picture.png").write_bytes(b"png")
        tracked.attach(folder / "picture.png")

    parent, *children = runs_of(folder)
    assert parent.info.status == "FINISHED" and parent.inputs.dataset_inputs[0].dataset.name == "digits"
    assert re.fullmatch(r"small: (fedavg|fedper) \d+\.\d %, (?!\1)(fedavg|fedper) \d+\.\d %", parent.info.run_name)
    last = 100 * children[2].data.metrics["accuracy/local/personal"]
    assert children[2].info.run_name == f"fedper {last:.1f} % s0"
    without_scores = [re.sub(r" [\d.]+ %", "", run.info.run_name) for run in children]
    assert without_scores == ["fedavg s0", "fedavg s1", "fedper s0", "fedper s1"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    note = parent.data.tags["mlflow.note.content"]
    assert "| fedper | local |" in note and "±" in note
    client = client_of(folder)
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["picture.png"]
    kept = [{file.path for file in client.list_artifacts(run.info.run_id)} for run in children]
    assert ["models" in files for files in kept] == [False, False, True, True]

    fedper, run_id = results[2], children[2].info.run_id
    images = torch.ones(3, 1, 8, 8, dtype=torch.uint8)
    fetched = raypfl.trained_models(run_id, uri(folder))
    here = raypfl.trained_models(fedper.run_dir)
    assert torch.equal(fetched.personal_model(7)(images), here.personal_model(7)(images))
    assert not torch.equal(fetched.personal_model(7)(images), fetched.personal_model(8)(images))

    (logged,) = client.search_logged_models([parent.info.experiment_id], f"source_run_id = '{run_id}'")
    assert (logged.name, logged.status.value) == ("global_model", "READY")
    model = mlflow.pytorch.load_model(logged.artifact_location)
    assert torch.allclose(model(images), here.global_model()(images), atol=1e-6)
    described = mlflow.models.Model.load(logged.artifact_location.removeprefix("file://"))
    assert described.signature.inputs.inputs[0].shape == (-1, 1, 8, 8)
    assert described.saved_input_example_info is not None


def test_a_method_without_a_global_model_has_personal_ones_alone(folder: Path) -> None:
    raypfl.run(small(folder, method="local"), listeners=[MLflowListener(warn=pytest.fail)])
    (run,) = runs_of(folder)
    client = client_of(folder)
    assert list(client.search_logged_models([run.info.experiment_id])) == []
    assert "models" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_models_that_are_too_large_stay_where_they_are_and_that_is_said(folder: Path) -> None:
    said: list[str] = []
    described = small(folder, method="ditto", tracking__models_mb=0.001)
    result = raypfl.run(described, listeners=[MLflowListener(warn=said.append)])
    assert len(said) == 2 and all("more than tracking.models_mb=0.001" in text for text in said)
    assert f'raypfl.trained_models("{result.run_dir}")' in said[1]
    (run,) = runs_of(folder)
    files = {file.path for file in client_of(folder).list_artifacts(run.info.run_id)}
    assert run.info.status == "FINISHED" and "models" not in files


def test_a_network_that_torch_cannot_export_costs_the_global_model_and_not_the_run(folder: Path) -> None:
    said: list[str] = []
    described = small(folder, method="fedavg").replace(model="tests.integrations.test_mlflow_models:Moody")
    raypfl.run(described, listeners=[MLflowListener(warn=said.append)])
    (run,) = runs_of(folder)
    (text,) = said
    assert run.info.status == "FINISHED" and "global model are not in MLflow" in text


def test_a_run_that_was_not_tracked_is_recorded_afterwards_but_once(folder: Path) -> None:
    result = raypfl.run(small(folder, method="local", tracking__mlflow=False))
    track(result.run_dir)
    track(result.run_dir)
    (run,) = runs_of(folder)
    client = client_of(folder)
    for metric in ("loss", "accuracy/local/personal"):
        assert [point.step for point in client.get_metric_history(run.info.run_id, metric)] == [1, 2]
    assert run.data.metrics["bytes_up_total"] == 1e6 * result.megabytes[0]
    assert run.data.tags["weights_hash"] == result.weights_hash
    assert run.data.tags["metadata.num_clients"] == "12"
    assert raypfl.trained_models(run.info.run_id, uri(folder)).num_clients == 12


def test_a_run_whose_server_still_refuses_it_is_an_error_with_a_sentence(folder: Path) -> None:
    result = raypfl.run(small(folder, method="local", tracking__mlflow=False))
    (folder / "torn.db").write_bytes(b"no database")
    with pytest.raises(RaypflError, match="does not record the run"):
        track(result.run_dir, uri=f"sqlite:///{folder}/torn.db")


def test_what_is_no_run_is_a_sentence(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is neither a run's folder, nor has MLflow at sqlite"):
        raypfl.trained_models("nowhere", uri(folder))


def test_a_runs_models_are_those_of_its_folder(folder: Path) -> None:
    result = raypfl.run(small(folder, method="ditto", tracking__mlflow=False))
    models = raypfl.trained_models(str(result.run_dir))
    assert isinstance(models, TrainedModels) and models.round == 2
    kept = torch.from_numpy(result.client_state(3)["personal"])
    found = torch.cat([p.detach().reshape(-1) for p in models.personal_model(3).network.parameters()])
    assert torch.equal(found, kept)
