"""Real runs in MLflow: comparisons below a parent, usable final models, and runs recorded afterwards."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import CheckpointError, RaypflError
from raypfl.integrations.tracking.listener import MLflowListener, track
from raypfl.integrations.tracking.models import log_models
from raypfl.trained.models import TrainedModels
from tests.support.command import raypfl as command
from tests.support.runs import experiment
from tests.support.tracking import client_of, forget_mlflow_settings, runs_of, with_database


class BranchingNetwork(nn.Module):
    """A network that torch cannot export, since it branches on its output."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(int(np.prod(input_shape)), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.layer(x.flatten(1))
        return outputs if outputs.sum().item() < 1e30 else -outputs


@pytest.fixture
def folder(tmp_path: Path, mlflow_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    forget_mlflow_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return with_database(tmp_path / "runs", mlflow_database)


def small(folder: Path, **changes: Any) -> raypfl.Experiment:
    changes = {"rounds": 2, "evaluation__every": 1, "tracking__mlflow": True, **changes}
    return experiment(folder.parent, tracking__system_metrics=False, **changes)


def uri(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


@pytest.mark.thorough
def test_a_comparison_is_a_parent_with_its_results_and_a_child_for_each_run_with_its_models(folder: Path) -> None:
    import mlflow.pytorch

    results = []
    with MLflowListener("small", warn=pytest.fail) as listener:
        for method, seed in product(("fedavg", "fedper"), (0, 1)):
            results.append(raypfl.run(small(folder, method=method, seed=seed), listeners=[listener]))
        (folder / "picture.png").write_bytes(b"png")
        listener.attach(folder / "picture.png")

    parent, *children = runs_of(folder)
    assert parent.info.status == "FINISHED" and parent.inputs.dataset_inputs[0].dataset.name == "digits"
    assert re.fullmatch(r"small: (fedavg|fedper) \d+\.\d %, (?!\1)(fedavg|fedper) \d+\.\d %", parent.info.run_name)
    accuracy = 100 * children[2].data.metrics["accuracy/local/personal"]
    assert children[2].info.run_name == f"fedper {accuracy:.1f} % s0"
    without_scores = [re.sub(r" [\d.]+ %", "", run.info.run_name) for run in children]
    assert without_scores == ["fedavg s0", "fedavg s1", "fedper s0", "fedper s1"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    note = parent.data.tags["mlflow.note.content"]
    assert "| fedper | local |" in note and "±" in note

    client = client_of(folder)
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["picture.png"]
    artifacts = [{file.path for file in client.list_artifacts(run.info.run_id)} for run in children]
    assert ["models" in files for files in artifacts] == [False, False, True, True]

    run_id = children[2].info.run_id
    images = torch.ones(3, 1, 8, 8, dtype=torch.uint8)
    from_mlflow = raypfl.trained_models(run_id, uri(folder))
    from_folder = raypfl.trained_models(results[2].run_dir)
    assert torch.equal(from_mlflow.personal_model(7)(images), from_folder.personal_model(7)(images))
    assert not torch.equal(from_mlflow.personal_model(7)(images), from_mlflow.personal_model(8)(images))

    (logged,) = client.search_logged_models([parent.info.experiment_id], f"source_run_id = '{run_id}'")
    assert (logged.name, logged.status.value) == ("global_model", "READY")
    model = mlflow.pytorch.load_model(logged.artifact_location)
    assert torch.allclose(model(images), from_folder.global_model()(images), atol=1e-6)
    described = mlflow.models.Model.load(logged.artifact_location.removeprefix("file://"))
    assert described.signature.inputs.inputs[0].shape == (-1, 1, 8, 8)
    assert described.saved_input_example_info is not None


def test_the_score_in_a_runs_name_is_a_mean_over_the_last_evaluations(folder: Path) -> None:
    described = small(folder, rounds=3, method="fedavg", evaluation__every=1, evaluation__last=3)
    result = raypfl.run(described, listeners=[MLflowListener(warn=pytest.fail)])

    (run,) = runs_of(folder)
    accuracies = [result.summary(round)[0]["accuracy"] for round in (1, 2, 3)]
    mean = 100 * sum(accuracies) / 3
    last = 100 * accuracies[-1]
    assert f" {mean:.1f} % " in run.info.run_name and f"{mean:.1f}" != f"{last:.1f}"


@pytest.mark.parametrize(("method", "models_mb"), [("fedavg", 1), ("local", 1), ("ditto", 1), ("ditto", 0)])
def test_the_code_in_a_runs_description_loads_its_models(folder: Path, method: str, models_mb: float) -> None:
    import mlflow

    raypfl.run(
        small(folder, method=method, tracking__models_mb=models_mb), listeners=[MLflowListener(warn=pytest.fail)]
    )
    (run,) = runs_of(folder)
    code = re.findall(r"```python\n(.*?)```", run.data.tags["mlflow.note.content"], re.DOTALL)
    assert len(code) == (models_mb > 0)
    try:
        for block in code:
            exec(block, {})
    finally:
        mlflow.set_tracking_uri(None)  # the code sets it for the whole process


def test_a_method_without_a_global_model_has_personal_ones_alone(folder: Path) -> None:
    raypfl.run(small(folder, method="local"), listeners=[MLflowListener(warn=pytest.fail)])
    (run,) = runs_of(folder)
    client = client_of(folder)
    assert list(client.search_logged_models([run.info.experiment_id])) == []
    assert "models" in {file.path for file in client.list_artifacts(run.info.run_id)}


def test_models_that_are_too_large_are_not_recorded_and_a_warning_says_where_they_are(folder: Path) -> None:
    warnings: list[str] = []
    described = small(folder, method="ditto", tracking__models_mb=0.001)
    result = raypfl.run(described, listeners=[MLflowListener(warn=warnings.append)])
    assert len(warnings) == 2 and all("more than tracking.models_mb=0.001" in text for text in warnings)
    assert f'raypfl.trained_models("{result.run_dir}")' in warnings[1]

    (run,) = runs_of(folder)
    files = {file.path for file in client_of(folder).list_artifacts(run.info.run_id)}
    assert run.info.status == "FINISHED" and "models" not in files


def test_a_hypernetwork_of_which_personal_models_are_made_counts_as_they_do(folder: Path) -> None:
    warnings: list[str] = []
    result = raypfl.run(small(folder, method="pefll", tracking__mlflow=False, tracking__models_mb=0.001))
    log_models(None, "", str(result.run_dir), warnings.append)  # type: ignore[arg-type]
    (warning,) = warnings
    assert "personal models take" in warning and "more than tracking.models_mb=0.001" in warning


def test_a_network_that_torch_cannot_export_costs_the_global_model_and_not_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    described = small(folder, method="fedavg").replace(model="tests.integrations.test_mlflow_models:BranchingNetwork")
    raypfl.run(described, listeners=[MLflowListener(warn=warnings.append)])
    (run,) = runs_of(folder)
    (warning,) = warnings
    assert run.info.status == "FINISHED" and "global model are not in MLflow" in warning
    assert "The network's code depends on its inputs' values" in warning
    assert "def forward" not in capfd.readouterr().err


def test_a_run_that_was_not_tracked_can_be_recorded_afterwards_and_only_once(folder: Path) -> None:
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


def test_a_run_that_is_recorded_again_keeps_one_global_model_until_it_is_longer(folder: Path) -> None:
    result = raypfl.run(small(folder, method="fedavg", tracking__mlflow=False))
    track(result.run_dir)
    track(result.run_dir)

    client = client_of(folder)
    (run,) = runs_of(folder)
    assert len(client.search_logged_models([run.info.experiment_id])) == 1

    raypfl.resume(result.run_dir, rounds=3)
    track(result.run_dir)
    (run,) = runs_of(folder)
    assert sorted(model.step for model in run.outputs.model_outputs) == [2, 3]


def test_a_comparison_that_is_recorded_afterwards_has_its_picture(folder: Path) -> None:
    pair = folder / "pair"
    words = ["rounds=1", "evaluation.protocols=[local]", "engine.backend=inline", "tracking.mlflow=false"]
    assert command("run", "--method=fedavg,local", f"--run-dir={pair}", f"output={folder}", *words).exit_code == 0
    track(pair)

    parent, *_ = runs_of(folder)
    assert [file.path for file in client_of(folder).list_artifacts(parent.info.run_id)] == ["picture.png"]


def test_a_run_whose_server_still_refuses_it_is_an_error_with_a_sentence(folder: Path) -> None:
    result = raypfl.run(small(folder, method="local", tracking__mlflow=False))
    (folder / "torn.db").write_bytes(b"no database")
    with pytest.raises(RaypflError, match="does not record the run"):
        track(result.run_dir, uri=f"sqlite:///{folder}/torn.db")


def test_models_of_an_unknown_run_are_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is neither a run's folder, nor has MLflow at sqlite"):
        raypfl.trained_models("nowhere", uri(folder))


def test_a_runs_models_are_those_of_its_folder(folder: Path) -> None:
    result = raypfl.run(small(folder, method="ditto", tracking__mlflow=False))
    models = raypfl.trained_models(str(result.run_dir))
    assert isinstance(models, TrainedModels) and models.round == 2
    state = torch.from_numpy(result.client_state(3)["personal"])
    parameters = [parameter.detach().reshape(-1) for parameter in models.personal_model(3).network.parameters()]
    assert torch.equal(torch.cat(parameters), state)
