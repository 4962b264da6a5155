"""A new client gets the model that the run's evaluation would give it, and the model can be saved."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

import raypfl
from raypfl.common.errors import CheckpointError, ConfigError, DataError, RaypflError, Unwritable
from raypfl.data import FederatedData
from raypfl.methods import METHODS, FedAvg
from raypfl.methods.mixed_models.fedamp import FedAMP
from raypfl.methods.personal_models.ditto import Ditto
from raypfl.trained.models import TrainedModels
from raypfl.trained.new_clients import checked_samples, require_new_client_models
from tests.support.runs import experiment


def serves_new_clients(name: str) -> bool:
    method = METHODS.get(name)()
    return method.has("unseen_model") or method.has("personalize")


FOR_NEW_CLIENTS = [name for name in METHODS if serves_new_clients(name)]


@cache
def trained(folder: Path, method: str) -> TrainedModels:
    """A short run. A client has one mini-batch, of all its samples, so draws change rounding only."""
    described = experiment(
        folder,
        method=method,
        rounds=2,
        data__unseen_fraction=0.25,
        evaluation__protocols="[unseen]",
        evaluation__every=0,
        training__batch_size=512,
    )
    if method == "pefll":
        described = described.override(["method.batch=null"])
    return TrainedModels.of_run(raypfl.run(described).run_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def samples(models: TrainedModels, client: int) -> tuple[np.ndarray, np.ndarray]:
    data = models.outline.data
    assert isinstance(data, FederatedData)
    return data.take(data.indices(client))


def test_every_method_that_the_page_names_serves_new_clients():
    assert {"pefll", "pfedhn", "knn-per", "fedavg-ft", "fedrep", "per-fedavg", "perada"} <= set(FOR_NEW_CLIENTS)


# pfedhn starts at a random vector.
@pytest.mark.parametrize("method", [name for name in FOR_NEW_CLIENTS if name != "pfedhn"])
def test_a_new_client_gets_the_model_that_an_unseen_client_with_its_samples_gets(method: str, folder: Path):
    models = trained(folder, method)
    client = int(models.outline.unseen[-1])
    x, y = samples(models, client)
    images = torch.from_numpy(x)

    new = models.personalize(x, y, held_out=0)

    assert (new.samples, new.held_out, new.metrics) == (len(y), 0, {}) and new.seconds > 0
    torch.testing.assert_close(new.model(images), models.personal_model(client)(images), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["pefll", "fedrep", "knn-per"])
def test_the_model_depends_on_the_clients_own_samples_alone(method: str, folder: Path):
    models = trained(folder, method)
    clients = [samples(models, int(client)) for client in models.outline.unseen]

    alone = models.personalize(*clients[-1])
    together = models.personalize_all(clients)[-1]

    images = torch.from_numpy(clients[0][0])
    torch.testing.assert_close(alone.model(images), together.model(images), rtol=1e-4, atol=1e-5)
    assert alone.metrics == pytest.approx(together.metrics, abs=1e-4)


def test_a_personalized_model_is_tested_on_samples_that_it_was_not_trained_on(folder: Path):
    models = trained(folder, "fedavg-ft")
    x, y = samples(models, int(models.outline.unseen[0]))
    of_one_class = np.flatnonzero(y == y[0])[:8]  # the split is by class, so it is the same in all eight tries
    x = x[of_one_class]
    y = y[of_one_class]
    images = torch.from_numpy(x)
    original = models.personalize(x, y, held_out=0.5)
    assert (original.samples, original.held_out) == (4, 4) and {"accuracy", "loss"} <= original.metrics.keys()

    # Blacking out a held-out image changes the metrics and not the model; a training image changes the model.
    unchanged = []
    for blacked_out in range(8):
        changed_x = x.copy()
        changed_x[blacked_out] = 0
        changed = models.personalize(changed_x, y, 0.5)
        same_model = torch.equal(changed.model(images), original.model(images))
        unchanged.append(same_model)
        if same_model:
            assert changed.metrics != original.metrics
    assert sorted(unchanged) == [False] * 4 + [True] * 4

    assert models.personalize(x[:1], y[:1]).metrics == {}  # nothing is left to hold out


def test_a_hypernetwork_adapts_a_vector_for_a_new_client(folder: Path):
    models = trained(folder, "pfedhn")
    new = models.personalize(*samples(models, int(models.outline.unseen[0])))
    assert new.metrics["accuracy"] >= 0


def test_a_saved_model_is_read_by_raypfl_and_by_plain_torch(folder: Path, tmp_path: Path):
    models = trained(folder, "pefll")
    x, y = samples(models, int(models.outline.unseen[0]))
    new = models.personalize(x, y)
    file = new.save(tmp_path / "new" / "model.safetensors")
    images = torch.from_numpy(x)
    assert torch.equal(raypfl.load_model(file)(images), new.model(images))

    with safetensors.safe_open(str(file), "pt") as opened:
        metadata = opened.metadata()
    assert "Linear(in_features=64, out_features=16, bias=True)" in metadata["outline"]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    plain.load_state_dict(load_file(file))
    gain, offset = (torch.tensor(json.loads(metadata[name])) for name in ("gain", "offset"))
    torch.testing.assert_close(plain(images * gain + offset), new.model(images))
    assert json.loads(metadata["facts"])["samples"] == new.samples


def test_a_saved_model_with_batch_norm_is_read(tmp_path: Path):
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, model="{name: resnet10, norm: batch}")
    models = TrainedModels.of_run(raypfl.run(described).run_dir)
    new = models.personalize(IMAGES, CLASSES)
    file = new.save(tmp_path / "model.safetensors")
    images = torch.from_numpy(IMAGES)
    assert torch.equal(raypfl.load_model(file)(images), new.model(images))


def test_a_file_that_is_no_model_is_refused_in_a_sentence(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="cannot be read as a personal model"):
        raypfl.load_model(tmp_path / "nothing.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError, match="cannot be read as a personal model"):
        raypfl.load_model(tmp_path / "damaged.safetensors")

    other_tensors = {"0.weight": torch.zeros(2, 2)}
    new = trained(folder, "pefll").personalize(IMAGES, CLASSES)
    new.model.network.state_dict = lambda: other_tensors  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="are not those of a model of pefll"):
        raypfl.load_model(new.save(tmp_path / "other.safetensors"))


def test_a_model_with_a_memory_of_samples_is_saved_and_read_too(folder: Path, tmp_path: Path):
    models = trained(folder, "knn-per")
    x, y = samples(models, int(models.outline.unseen[0]))
    images = torch.from_numpy(x)

    new = models.personalize(x, y)
    file = new.save(tmp_path / "memory.safetensors")

    assert torch.equal(raypfl.load_model(file)(images), new.model(images))
    assert load_file(file)["memory"].shape == (new.samples, 16)


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("ditto", r"A new client gets the global model as it is, .*such as fedavg-ft"),
        ("fedamp", "has no global model either"),
    ],
)
def test_methods_without_models_for_new_clients_say_what_one_gets(method: str, advice: str):
    with pytest.raises(ConfigError, match=f"^{method} has no way to make a model for a new client.*{advice}"):
        require_new_client_models(raypfl.Experiment(method=method))


class StopsByValidation(FedAvg):
    """Trains for a new client only if that lowers its loss on validation samples."""

    needs_validation: ClassVar[bool] = True

    def unseen_model(self, clients, server):
        trained = clients.sgd(clients.loss, server["theta"])
        before = clients.evaluate(server["theta"], "val")["loss"]
        after = clients.evaluate(trained, "val")["loss"]
        return torch.where((after < before)[:, None], trained, server["theta"])


def test_a_new_client_has_validation_samples_if_the_method_needs_them(tmp_path: Path):
    described = experiment(tmp_path, method=f"{__name__}:StopsByValidation", rounds=1, data__val_fraction=0.4)
    models = TrainedModels.of_run(raypfl.run(described).run_dir)
    x, y = samples(models, 0)

    new = models.personalize(x, y, held_out=0.25)

    assert (new.samples, new.held_out) == (len(y) - round(0.25 * len(y)), round(0.25 * len(y)))
    images = torch.from_numpy(x)
    assert not torch.equal(new.model(images), models.global_model()(images))


class WithoutGlobalModel(FedAMP):
    """A method of a user's own."""


class WithGlobalModel(Ditto):
    """A method of a user's own."""


@pytest.mark.parametrize("method", [WithoutGlobalModel, WithGlobalModel])
def test_own_methods_without_models_for_new_clients_are_told_what_to_define(method: type):
    with pytest.raises(ConfigError, match=r"defines unseen_model or personalize: docs/new_clients\.md\.$") as refused:
        require_new_client_models(raypfl.Experiment(method=method()))
    assert "fedavg-ft" not in str(refused.value)


IMAGES = np.full((4, 1, 8, 8), 3, dtype=np.uint8)
CLASSES = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (
            IMAGES[:, 0],
            CLASSES,
            r"x has the shape \[4, 8, 8\], but the run's inputs are \[n, 1, 8, 8\] with values from 0 to 16",
        ),
        (IMAGES, CLASSES[:3], r"x has 4 samples, but y has the shape \[3\]"),
        (IMAGES[:0], CLASSES[:0], "x is empty"),
        (IMAGES, np.array([0, 1, 2, 10]), "Sample 3 has label 10, but there are 10 classes"),
        (IMAGES, CLASSES + 0.5, "y is float64, but the run's targets are classes"),
        (IMAGES, np.eye(4, dtype=np.int64), "the run's targets are classes"),
        (IMAGES.astype(str), CLASSES, "not numbers"),
        (IMAGES * np.float32("nan"), CLASSES, "Sample 0 of x has an input that is not finite"),
        (IMAGES.astype(np.int64) * 50, CLASSES, "x has values from 150 to 150, but the run's images have 0 to 16"),
        (IMAGES / 16, CLASSES, "as if it had been divided; the run's images have 0 to 16"),
        ([[1], [1, 2]], CLASSES[:2], "The x are of different shapes"),
    ],
)
def test_samples_that_do_not_fit_are_refused_in_a_sentence(x: np.ndarray, y: np.ndarray, sentence: str, folder: Path):
    with pytest.raises(RaypflError, match=sentence) as refused:
        trained(folder, "pefll").personalize(x, y)
    assert isinstance(refused.value, DataError)


def test_a_token_that_the_network_does_not_know_is_refused_in_a_sentence(tmp_path: Path):
    for client in range(6):
        (tmp_path / f"{client}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    data = f"{{name: text, root: {tmp_path}, size: 8}}"
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, model="{name: gru, width: 8}", evaluation__every=0)
    run = raypfl.run(described.override([f"data={data}", "partition=by_column"])).run_dir

    x = np.full((8, 8), 3)
    x[0, 0] = 1000
    with pytest.raises(DataError, match=r"new client\. index out of range"):
        raypfl.trained_models(run).personalize(x, np.full((8, 8), 2))


def test_a_new_client_whose_training_diverges_is_told_so(tmp_path: Path):
    changes = ["data=diabetes", "partition=iid", "objective={name: regression, mean: 150, std: 80}"]
    described = experiment(tmp_path, method="fedavg-ft", rounds=1, evaluation__every=0).override(changes)
    models = raypfl.trained_models(raypfl.run(described).run_dir)
    x, y = samples(models, 0)
    with pytest.raises(
        DataError, match=r"^No model could be made.* Training diverged on client 0 in round 1: mean loss"
    ):
        models.personalize(1e30 * x, y)


@pytest.mark.parametrize("y", [np.array(["many"] * 4), np.array([{}] * 4), np.arange(4) * 1j])
def test_targets_that_are_no_numbers_are_refused_in_a_sentence(y: np.ndarray):
    outline = SimpleNamespace(input_shape=(2,), kind="numbers", num_classes=1, discrete=False, scale=1.0)
    with pytest.raises(DataError, match=r"y is .*, not numbers"):
        checked_samples(np.zeros((4, 2)), y, outline)  # type: ignore[arg-type]


def test_a_model_whose_folder_cannot_be_made_is_a_sentence(folder: Path):
    client = trained(folder, "fedrep").personalize(IMAGES, CLASSES)
    with pytest.raises(Unwritable, match="/dev/null/models cannot be made: Not a directory"):
        client.save("/dev/null/models/mine.safetensors")
