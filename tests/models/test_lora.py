"""LoRA: adapters of dense layers start without effect, and only they and the output layer are trained and sent."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.data import load_federated
from raypfl.engine.prepared import Prepared
from raypfl.models import MODELS, FlatModel
from raypfl.models.lora import TRAINED, factor_pairs, with_lora
from tests.support.federation import both_executors

TOKENS = 7
LENGTH = 6
WIDTH = 8
RANK = 2
transformer = partial(MODELS.get("causal_transformer"), (LENGTH,), TOKENS, width=WIDTH, depth=2, heads=2)
adapted = partial(with_lora, transformer, RANK)
IN_A_BLOCK = RANK * (WIDTH + 3 * WIDTH) + RANK * (WIDTH + WIDTH) + 2 * RANK * (WIDTH + 4 * WIDTH)


def test_new_adapters_change_no_output_and_the_base_has_its_usual_initial_weights():
    plain = FlatModel(transformer, 3)
    model = FlatModel(adapted, 3, trained=TRAINED)
    x = torch.randint(0, TOKENS, (4, LENGTH))
    assert torch.equal(model.module(x), plain.module(x))

    plain_tensors = plain.module.state_dict()
    adapted_tensors = model.module.state_dict()
    shared = [name for name in adapted_tensors if name in plain_tensors]
    assert all(torch.equal(plain_tensors[name], adapted_tensors[name]) for name in shared)


def test_the_numbers_of_a_model_are_the_adapters_and_the_output_layers():
    model = FlatModel(adapted, trained=TRAINED)
    assert model.num_parameters == model.size == 2 * IN_A_BLOCK + TOKENS * WIDTH + TOKENS
    assert int(model.mask("adapters").sum()) == 2 * IN_A_BLOCK
    assert model.names("output layer") == ["head.weight", "head.bias"]


def test_the_two_factors_of_all_adapters_are_parts_of_the_network():
    model = FlatModel(adapted, trained=TRAINED)
    assert sorted(model.names("lora A") + model.names("lora B")) == sorted(model.names("adapters"))
    assert int(model.mask("lora A").sum()) == 2 * RANK * (WIDTH + WIDTH + WIDTH + 4 * WIDTH)
    layer = "blocks.0.attn.qkv.adapter"
    assert factor_pairs(model)[0] == (f"{layer}.0.weight", f"{layer}.1.weight") and len(factor_pairs(model)) == 8
    assert factor_pairs(FlatModel(adapted, frozen="lora A")) == []


def test_only_adapters_and_the_output_layer_have_gradients_and_an_update_is_of_low_rank():
    model = FlatModel(adapted, 3, trained=TRAINED)
    network = model.module
    x = torch.randint(0, TOKENS, (4, LENGTH))
    network(x).square().sum().backward()
    moved = {name for name, parameter in network.named_parameters() if parameter.grad is not None}

    assert moved == set(model.names(TRAINED)) and all(".adapter." in name or name.startswith("head") for name in moved)
    layer = network.blocks[0].mlp.fc1
    nn.init.normal_(layer.adapter[1].weight)
    effect = layer(torch.eye(WIDTH)) - nn.functional.linear(torch.eye(WIDTH), layer.weight, layer.bias)

    assert torch.linalg.matrix_rank(effect, atol=1e-5) == RANK


def test_layers_whose_weights_torch_reads_directly_get_no_adapters():
    encoder = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3))
    network = with_lora(lambda: encoder, 2).eval()
    assert [name for name, _ in network.named_modules() if name.endswith("adapter")] == ["0.adapter"]
    with pytest.raises(ConfigError, match=r"model\.lora is 2, but Linear has no nn\.Linear besides its output layer"):
        with_lora(lambda: nn.Linear(3, 3), 2)


def test_a_layer_in_two_places_has_one_adapter_in_both():
    layer = nn.Linear(8, 8)
    network = with_lora(lambda: nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(8, 3)), 2)
    assert network[0] is network[2] and hasattr(network[2], "adapter")

    tied_output = nn.Linear(8, 8)
    network = with_lora(lambda: nn.Sequential(nn.Linear(8, 8), tied_output, nn.ReLU(), tied_output), 2)
    assert network[1] is network[3] is tied_output


def described(tmp_path: Path, **changes) -> raypfl.Experiment:
    base = raypfl.Experiment(
        data={"pools": {"body": 0.3}},
        model={"name": "mlp", "hidden": [32], "lora": 2, "pretrain": "body", "pretrain_epochs": 2},
        training={"lr": 0.1},
        rounds=3,
        cohort={"fraction": 0.5},
        evaluation={"every": 1},
        output=str(tmp_path),
    )

    return base.override(["engine.backend=inline", *(f"{key.replace('__', '.')}={v}" for key, v in changes.items())])


@both_executors
def test_adapters_on_a_pretrained_body_learn_and_are_all_that_is_sent(tmp_path: Path, executor: str):
    result = raypfl.run(described(tmp_path, engine__executor=executor))
    losses = result.rounds["loss"].to_pylist()
    numbers = 2 * (64 + 32) + 32 * 10 + 10
    assert losses[-1] < losses[0] and set(result.ledger["numbers"].to_pylist()) == {numbers}
    assert result.global_model().shape == (numbers,)


def test_personal_adapters_stay_with_the_client(tmp_path: Path):
    result = raypfl.run(described(tmp_path, method="partial", method__personal="adapters"))
    assert set(result.ledger["numbers"].to_pylist()) == {32 * 10 + 10}
    client = result.rounds["cohort"].to_pylist()[-1][0]
    assert result.client_state(client)["personal"].shape == (2 * (64 + 32),)


def test_the_setting_trained_still_applies_with_lora(tmp_path: Path):
    experiment = described(tmp_path, model__trained="adapters")
    data = load_federated(experiment.data, experiment.partition, seed=0)
    assert Prepared(experiment, data).model.num_parameters == 2 * (64 + 32)
    with pytest.raises(ConfigError, match=r"model\.lora is -1; it must be 0 or more"):
        experiment.override(["model.lora=-1"])
