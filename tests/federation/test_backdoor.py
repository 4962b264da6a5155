"""Backdoors: which samples get the trigger, what malicious clients send, and how success is measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.prepared import Prepared
from raypfl.federation.robustness import Backdoor
from raypfl.results.run_groups import group_runs
from raypfl.results.table import legend
from raypfl.runs.driver import check

SETTINGS = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"epochs": 1, "batch_size": 16, "lr": 0.1},
    "rounds": 2,
    "engine": {"backend": "inline"},
    "tracking": {"mlflow": False},
}


def attacked(**changes) -> raypfl.Experiment:
    attack = {"name": "backdoor", "fraction": 0.34, "target": 3, "share": 0.25, "size": 2}
    evaluation = {"protocols": ["local", "backdoor"]}
    return raypfl.Experiment(**SETTINGS | {"attack": attack, "evaluation": evaluation} | changes)


def prepared_for(described):
    return Prepared(described, described.load_data()).build()


def stamped_by_hand(images: np.ndarray, white: float) -> np.ndarray:
    stamped = images.copy()
    stamped[:, :, 6:, 6:] = white
    return stamped


def test_a_share_of_malicious_clients_other_training_images_get_the_trigger_and_the_target():
    prepared = prepared_for(attacked())
    data = prepared.data
    for client in range(6):
        for split in ("train", "test"):
            indices = data.indices(client, split)
            images, labels = prepared.context.samples.take(indices)
            is_changed = (images.numpy() != data.inputs[indices]).any(axis=(1, 2, 3)) | (
                labels.numpy() != data.labels[indices]
            )
            if not prepared.is_malicious[client] or split == "test":
                assert not is_changed.any()
                continue

            num_others = int((data.labels[indices] != 3).sum())
            assert is_changed.sum() == round(0.25 * num_others) > 0
            assert (labels[is_changed] == 3).all() and (data.labels[indices][is_changed] != 3).all()
            expected = stamped_by_hand(data.inputs[indices][is_changed], data.scale)
            assert np.array_equal(images[is_changed].numpy(), expected)


def test_images_with_the_trigger_are_tested_for_their_class_and_for_the_target(tmp_path):
    described = attacked(output=str(tmp_path))
    result = raypfl.run(described)
    prepared = prepared_for(described)
    data = prepared.data
    gain, offset = (values.numpy().reshape(1, -1, 1, 1) for values in prepared.normalisation)
    model = prepared.model.as_module(result.global_model())

    evaluations = result.tables["evaluations"].to_pylist()
    rows = [row for row in evaluations if row["protocol"] == "backdoor" and row["round"] == 2]
    assert legend(group_runs([result]))[1] == "backdoor: a client's own data, all with the attack's trigger."
    clients = [row["client"] for row in rows if row["model"] == "global"]
    assert clients == np.flatnonzero(~prepared.is_malicious).tolist()
    for row in rows:
        indices = data.indices(row["client"], "test")
        images = stamped_by_hand(data.inputs[indices], data.scale) * gain + offset
        with torch.no_grad():
            classes = model(torch.from_numpy(images.astype(np.float32))).argmax(1).numpy()
        labels = data.labels[indices]
        assert row["accuracy"] == pytest.approx((classes == labels).mean(), abs=1e-7)
        assert row["attack_success"] == pytest.approx((classes[labels != 3] == 3).mean(), abs=1e-7)


def test_a_factor_multiplies_what_malicious_clients_change(tmp_path):
    def model_after_a_round(factor: float) -> torch.Tensor:
        attack = {"name": "backdoor", "fraction": 0.34, "target": 3, "size": 2, "factor": factor}
        training = SETTINGS["training"] | {"precision": "fp64"}
        described = attacked(rounds=1, attack=attack, training=training, output=str(tmp_path))
        return raypfl.run(described).global_model()

    plain, threefold, fivefold = (model_after_a_round(factor) for factor in (1.0, 3.0, 5.0))
    assert torch.allclose(fivefold - plain, 2 * (threefold - plain), rtol=1e-9, atol=1e-12)
    assert not torch.equal(plain, threefold)


def test_a_trigger_of_ones_own_is_put_on_images_when_they_are_read():
    class Stripe(Backdoor):
        def stamp(self, images, white):
            stamped = images.clone()
            stamped[:, :, 0] = white
            return stamped

    prepared = prepared_for(attacked().replace(attack=Stripe(fraction=0.34, target=3, size=1)))
    client = int(np.flatnonzero(prepared.is_malicious)[0])
    images, labels = prepared.context.samples.take(prepared.data.indices(client, "train"))
    has_stripe = (images[:, 0, 0] == prepared.data.scale).all(1)
    assert has_stripe.any() and (labels[has_stripe] == 3).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attack": None}, "there is no such attack; add attack=backdoor"),
        ({"attack": {"name": "backdoor", "target": 10, "size": 2}}, "numbered from 0 to 9"),
        ({"attack": {"name": "backdoor", "size": 8}}, "choose a smaller trigger"),
        (
            {"attack": {"name": "backdoor", "size": 2, "factor": 2.0}, "privacy": {"secure_aggregation": True}},
            "needs each client's message",
        ),
    ],
)
def test_a_backdoor_that_cannot_be_made_or_measured_is_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        check([attacked(**changes)])


def test_rows_of_a_table_get_no_trigger(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("a,b,label\n" + "1,2,x\n3,4,y\n" * 20)
    data = {"name": "table", "root": str(table), "target": "label"}
    with pytest.raises(ConfigError, match="are not images"):
        check([attacked(data=data, partition={"name": "iid", "clients": 4})])
