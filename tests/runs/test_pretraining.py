"""Pretraining a network on a pool before the first round: once, on no client's samples, and with a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data import load_federated
from raypfl.engine.events import Progress, RunStarted, Warned
from tests.support import datasets
from tests.support.command import raypfl as command
from tests.support.command import raypfl_json
from tests.support.runs import experiment

FROZEN = {"model__trained": "output layer", "data__pools": "{backbone: 0.4}"}
PRETRAINED = FROZEN | {"model__pretrain": "backbone", "model__pretrain_epochs": 4}


def pretrained(tmp_path: Path, **changes) -> tuple[raypfl.Result, list]:
    events: list = []
    short = {"method": "fedavg", "rounds": 1, "data__cache": tmp_path / "cache", **PRETRAINED}
    return raypfl.run(experiment(tmp_path, **short | changes), listeners=[events.append]), events


def pretraining_messages(events: list) -> list[str]:
    return [event.text for event in events if isinstance(event, Progress) and "pretraining" in event.text]


def test_the_pretrained_body_separates_the_pools_classes_and_the_head_is_new(tmp_path):
    result, events = pretrained(tmp_path, model__pretrain_epochs=40, model__pretrain_lr=0.01)
    body = load_file(result.experiment.model.weights)
    assert set(body) == {"1.weight", "1.bias"}

    final = raypfl.trained_models(result.run_dir).global_model().network.state_dict()
    assert all(torch.equal(final[name], tensor) for name, tensor in body.items())

    (metadata,) = [event.metadata for event in events if isinstance(event, RunStarted)]
    assert "2 of 4 tensors; 3 drawn at random" in metadata["weights"]
    assert not [event for event in events if isinstance(event, Warned)]

    data = load_federated(result.experiment.data, result.experiment.partition, seed=0)
    x, y = (torch.from_numpy(part[data.pool("backbone")].copy()) for part in (data.inputs, data.labels))
    x = ((x / data.scale).flatten(1) - float(data.mean[0])) / float(data.std[0])
    hidden = (x @ body["1.weight"].T + body["1.bias"]).relu()

    # A linear probe: least squares from the body's features to the classes.
    features = torch.cat([hidden, torch.ones(len(y), 1)], 1)
    classes = torch.nn.functional.one_hot(y).float()
    probe = torch.linalg.lstsq(features, classes).solution
    predicted = (features @ probe).argmax(1)

    assert (predicted == y).float().mean() > 0.93


def test_a_pretrained_body_does_not_fit_the_new_output_layer(tmp_path):
    # A method that trains nothing: its accuracy is that of the network before the first round.
    result, _ = pretrained(tmp_path, model__pretrain_epochs=40, model__trained="null", training__lr=1e-9)
    (accuracy,) = {row["accuracy"] for row in result.summary() if row["protocol"] == "global"}
    assert accuracy < 0.25


def test_a_network_is_pretrained_once_for_all_methods_and_again_for_another_pool_or_seed(tmp_path):
    first, events = pretrained(tmp_path)
    (sentence,) = pretraining_messages(events)
    assert sentence.startswith("pretraining mlp on the pool 'backbone'")

    for same in ({}, {"method": "local"}, {"model__trained": "null"}, {"training__lr": 0.5}):
        again, events = pretrained(tmp_path, **same)
        assert not pretraining_messages(events) and again.experiment.model.weights == first.experiment.model.weights

    for other in ({"seed": 1}, {"data__pools": "{backbone: 0.3}"}, {"model__pretrain_lr": 0.01}):
        assert pretraining_messages(pretrained(tmp_path, **other)[1])


def test_a_resumed_run_and_one_in_a_folder_use_the_same_file_to_the_same_bits(tmp_path):
    whole, _ = pretrained(tmp_path, rounds=4, checkpoint__every=2)
    short, _ = pretrained(tmp_path, rounds=2, checkpoint__every=2)
    assert raypfl.resume(short.run_dir, overrides=["rounds=4"]).weights_hash == whole.weights_hash


def test_with_weights_in_the_settings_nothing_is_pretrained(tmp_path):
    first, _ = pretrained(tmp_path)
    own_weights = tmp_path / "mine.safetensors"
    own_weights.write_bytes(Path(first.experiment.model.weights).read_bytes())
    result, events = pretrained(tmp_path, model__weights=own_weights, data__cache=tmp_path / "other")
    assert result.experiment.model.weights == str(own_weights) and not pretraining_messages(events)
    assert result.weights_hash == first.weights_hash


@pytest.mark.thorough
def test_adapters_are_no_part_of_a_pretrained_network(tmp_path):
    image = {"model": "{name: resnet10, stem: cifar, width: 4}", "model__pretrain": "backbone"}
    image |= {"model__pretrain_epochs": 1, "training__smallest_batch": 2, "model__trained": "null", "method": "local"}
    plain, _ = pretrained(tmp_path, **image)
    adapted, events = pretrained(tmp_path, **image | {"model__adapters": "bias", "model__trained": "adapters, fc"})
    assert not pretraining_messages(events) and adapted.experiment.model.weights == plain.experiment.model.weights


def test_frozen_random_weights_are_warned_of(tmp_path):
    events: list = []
    frozen = {name: value for name, value in PRETRAINED.items() if "pretrain" not in name}
    raypfl.run(experiment(tmp_path, method="fedavg", rounds=1, **frozen), listeners=[events.append])
    (warning,) = [event.text for event in events if isinstance(event, Warned)]
    assert "1,040 of the network's 1,210 parameters are frozen at random values" in warning


def test_pools_that_cannot_pretrain_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no pool called 'backbnoe'; did you mean 'backbone'"):
        pretrained(tmp_path, model__pretrain="backbnoe")

    root = str(tmp_path / "cifar")
    datasets.cifar10(Path(root))
    datasets.cifar100(Path(root))
    data = {"name": "cifar10", "root": root, "pools": {"backbone": {"name": "cifar100", "root": root}}}
    settings = experiment(tmp_path, method="fedavg", rounds=1, cohort__size=2, partition__clients=2)
    settings = settings.replace(data=data, model={"name": "mlp", "pretrain": "backbone"})

    with pytest.raises(ConfigError, match="the pool 'backbone' has no labels of the clients' classes"):
        raypfl.run(settings)


@pytest.mark.thorough
def test_the_command_pretrains_once_and_records_it_and_a_run_uses_the_weights(tmp_path):
    words = [f"data.cache={tmp_path / 'cache'}", f"output={tmp_path}", "model.pretrain=body", "data.pools={body: 0.3}"]
    words += ["model.pretrain_epochs=2", "model.trained=output layer"]
    first = raypfl_json("pretrain", *words)

    assert first["seconds"] > 0 and 0 < first["loss"] < 3 and Path(first["weights"]).exists()
    assert raypfl_json("pretrain", *words) == first | {"seconds": None}

    runs = raypfl_json("run", *words, "engine.backend=inline", "rounds=1", "tracking.mlflow=false")["runs"]
    assert {outcome["experiment"]["model"]["weights"] for outcome in runs} == {first["weights"]}

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("raypfl").experiment_id])
    assert run.data.metrics["loss"] == pytest.approx(first["loss"]) and run.data.params["pretrain"] == "body"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == [Path(first["weights"]).name]


def test_the_command_needs_the_name_of_a_pool():
    result = command("pretrain", "rounds=1")
    assert result.exit_code == 2
    assert "model.pretrain is not set; raypfl pretrain needs the name of a pool" in " ".join(result.output.split())
