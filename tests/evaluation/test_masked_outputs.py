"""Masked outputs: evaluation with the logits of classes that a client has no training data of masked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.events import Evaluated
from raypfl.evaluation.masking import MASKS
from raypfl.integrations.tracking.entries import evaluation_points
from raypfl.integrations.tuning.sweep import load as load_sweep
from raypfl.results.run_groups import group_runs
from raypfl.results.table import result_columns, result_rows
from raypfl.runs.replay import events_of
from raypfl.studies.cells import plan
from raypfl.studies.description import load as load_study
from tests.evaluation.test_evaluation import judged_federation, models_of, scored
from tests.support.command import raypfl_json
from tests.support.federation import CLASSES, EXECUTORS, as_module
from tests.support.runs import ON_RAY, experiment, same_tables

TRAINED_CLASSES = [{0, 1}, {2}, {0, 1, 2}, {0, 2}]
"""The classes of each client's training data."""


def federation(executor: str):
    """Clients that lack classes, some of which are in their tests."""
    fed = judged_federation(executor)
    for client, classes in enumerate(TRAINED_CLASSES):
        fed.labels[fed.split[client]] = np.resize(sorted(classes), len(fed.split[client]))
    return fed


def masked_by_hand(fed, theta, client: int, mask: str) -> dict[str, float]:
    """Accuracy and loss in float64, sample by sample."""
    right = loss = 0.0
    tests = fed.tests[client]
    for index in tests:
        with torch.no_grad():
            logits = as_module(fed.factory, theta).eval()(fed.normalised(index)[None])[0].tolist()
        for label in set(range(CLASSES)) - TRAINED_CLASSES[client]:
            logits[label] = 0.0 if mask == "zero" else -math.inf
        target = int(fed.labels[index])
        right += max(range(CLASSES), key=lambda label: logits[label]) == target
        loss += math.log(sum(math.exp(logit) for logit in logits)) - logits[target]

    return {"accuracy": right / len(tests), "loss": loss / len(tests)}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_masked_outputs_equal_those_of_a_loop_over_samples(executor):
    fed = federation(executor)
    personal = models_of(fed)
    shared = personal[0] + 0.3
    table = scored(fed, personal, shared, ("local", "val"), groups=((0, 2), (1, 3)), masks=MASKS)
    changed = 0
    for client in (0, 1, 3):  # client 2 has no tests
        for model, theta in (("personal", personal[client]), ("global", shared)):
            for mask in MASKS:
                row = table[f"local/{mask}", model, client]
                expected = masked_by_hand(fed, theta, client, mask)
                assert row["accuracy"] == pytest.approx(expected["accuracy"])
                assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
                assert table[f"val/{mask}", model, client] == row | {"protocol": f"val/{mask}"}
                changed += row["accuracy"] != table["local", model, client]["accuracy"]

    assert changed >= 4
    assert table["local/exclude", "personal", 0]["loss"] == math.inf  # a test sample is of a class that it lacks


@pytest.mark.parametrize("executor", EXECUTORS)
def test_masks_cost_no_forward_pass_and_leave_unmasked_numbers_as_they_are(executor, monkeypatch):
    fed = federation(executor)
    predict = type(fed.context.executor).predict
    calls = []

    def counted(self, at, x, **options):
        calls.append(x.shape)
        return predict(self, at, x, **options)

    monkeypatch.setattr(type(fed.context.executor), "predict", counted)
    plain = scored(fed, models_of(fed), models_of(fed)[0])
    unmasked_calls = calls.copy()
    calls.clear()
    masked = scored(fed, models_of(fed), models_of(fed)[0], masks=MASKS)
    assert calls == unmasked_calls
    assert {key: row for key, row in masked.items() if key in plain} == plain
    assert {protocol for protocol, *_ in masked} - {"local", "global"} == {"local/zero", "local/exclude"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_client_without_training_data_knows_no_class_and_has_no_masked_row(executor):
    fed = federation(executor)
    fed.split[1] = fed.split[1][:0]
    table = scored(fed, models_of(fed), models_of(fed)[0], masks=MASKS)
    clients = {protocol: {row[2] for row in table if row[0] == protocol} for protocol in ("local", "local/exclude")}
    assert clients == {"local": {0, 1, 3}, "local/exclude": {0, 3}}


BOTH_MASKS = {"evaluation__masks": "[zero, exclude]"}


def rows_of(result: raypfl.Result, protocol: str) -> list[dict]:
    return [row | {"protocol": ""} for row in result.evaluations.to_pylist() if row["protocol"] == protocol]


@pytest.mark.usefixtures("ray_cluster")
def test_excluding_nothing_gives_the_unmasked_bits_and_masks_change_no_weight_inline_or_on_ray(tmp_path):
    all_classes = {"partition": "iid", "rounds": 2, "cohort__size": "null", "evaluation__every": 1}
    plain = raypfl.run(experiment(tmp_path, **all_classes))
    masked = raypfl.run(experiment(tmp_path, **all_classes, **BOTH_MASKS))
    on_ray = raypfl.run(experiment(tmp_path, **all_classes, **BOTH_MASKS, **ON_RAY))

    assert rows_of(masked, "local/exclude") == rows_of(masked, "local") == rows_of(plain, "local")
    assert rows_of(masked, "local/zero") == rows_of(masked, "local")
    assert masked.weights_hash == plain.weights_hash == on_ray.weights_hash
    assert masked.ledger.equals(plain.ledger) and same_tables(masked, on_ray)


ONE_CLASS = {
    "partition": "{name: classes_per_client, clients: 12, classes: 1}",
    "data__unseen_fraction": 0.25,
    "evaluation__protocols": "[local, unseen, train]",
    "training__steps": 2,
    "rounds": 2,
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("method", ["fedavg", "ditto", "pefll", "knn-per", "fedbabu"])
def test_a_client_of_one_class_is_always_right_with_the_others_excluded_even_if_never_trained(
    tmp_path, method, executor
):
    result = raypfl.run(experiment(tmp_path, method=method, engine__executor=executor, **ONE_CLASS, **BOTH_MASKS))
    summary = {(row["protocol"], row["model"]): row["accuracy"] for row in result.summary()}
    for (protocol, model), accuracy in summary.items():
        assert accuracy == 1 or not protocol.endswith("/exclude")
        if "/" not in protocol:
            assert (f"{protocol}/zero", model) in summary and (f"{protocol}/exclude", model) in summary
    assert min(accuracy for (protocol, _), accuracy in summary.items() if "/" not in protocol) < 1


@pytest.mark.usefixtures("without_figures")
def test_masked_numbers_stand_beside_the_others_in_tables_the_report_and_mlflow(tmp_path):
    changes = {"data__val_fraction": 0.2, "evaluation__protocols": "[local, val]", "rounds": 2}
    result = raypfl.run(experiment(tmp_path, method="fedavg", **changes, evaluation__masks="[exclude]"))
    groups = group_runs([result])
    tests = [(rows.protocol, rows.best) for rows in result_rows(groups, result_columns(groups))]

    assert tests == [
        *[("local", False), ("local/exclude", False), ("local", True), ("local/exclude", True)],
        *[("val", False), ("val/exclude", False)],  # validation data, not a test
    ]
    assert result.best_round is not None

    page = raypfl.report.write([result], tmp_path / "report.html").read_text("utf-8")
    assert "each client’s own test data, with the classes that a client lacks excluded" in page

    evaluated = [event for event in events_of(result) if isinstance(event, Evaluated)]
    logged = set()
    for event in evaluated:
        logged |= {name for name, *_ in evaluation_points(event)}
    assert {"accuracy/local/global", "accuracy/local/exclude/global"} <= logged


def test_the_infinite_loss_of_excluded_classes_is_null_in_json(tmp_path):
    few = ["rounds=1", "method=fedavg", "evaluation.masks=[exclude]", "engine.backend=inline", "tracking.mlflow=false"]
    # Of many small clients, some test the only sample that they have of a class.
    small = ["partition.clients=60", "partition.min_samples=5"]
    (run,) = raypfl_json("run", "digits", *few, *small, f"output={tmp_path}")["runs"]
    losses = {row["protocol"]: row["loss"] for row in run["summary"]}
    assert losses["local/exclude"] is None and losses["local"] > 0


def test_studies_and_sweeps_accept_masked_metrics(tmp_path):
    study = tmp_path / "masked.yaml"
    text = "methods: {FedAvg: fedavg}\nmetrics: {masked: {protocol: local/zero, model: global}}\nexperiment: "
    study.write_text(text + "{evaluation: {masks: [zero]}}")

    assert plan(load_study(str(study))[0])[0].experiment.evaluation.masks == ("zero",)

    study.write_text(text + "{data: digits}")
    with pytest.raises(ConfigError, match=r"of the protocol 'local/zero', but .* with evaluation\.masks=\[\]; add"):
        plan(load_study(str(study))[0])

    sweep = load_sweep(
        {
            "name": "masked",
            "experiment": {"data": {"name": "digits", "val_fraction": 0.2}},
            "search": {"training.lr": {"grid": [0.1, 0.2]}},
            "metric": {"protocol": "val/exclude"},
            "trials": 1,
        }
    )
    evaluation = sweep.base.evaluation

    assert evaluation.masks == ("exclude",) and "val" in evaluation.protocols


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        ({"masks": ["drop"]}, r"evaluation\.masks\[0\] is .drop.; it must be .zero. or .exclude."),
        ({"masks": ["zero", "zero"]}, r"evaluation\.masks has 'zero' twice"),
        (
            {"masks": ["zero"], "protocols": ["global"]},
            r"evaluation\.masks is \[zero\], .* evaluation\.protocols .* add one of local, val, train, unseen",
        ),
        ({"protocols": ["local/zero"]}, r"has 'local/zero', .* 'local' with evaluation\.masks=\[zero\]"),
    ],
)
def test_masks_that_would_change_nothing_are_refused(evaluation, sentence):
    with pytest.raises(ConfigError, match=sentence):
        raypfl.Experiment(evaluation=evaluation)


def test_masks_of_an_objective_without_classes_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.masks is \[zero\], .* Regression has no classes"):
        raypfl.run(experiment(tmp_path, data="diabetes", method="fedavg", partition="iid", evaluation__masks="[zero]"))
