"""Evaluation in whole runs: protocols, the best round, early stopping, and mistakes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import raypfl
from raypfl import Experiment
from raypfl.clients.worker import Worker
from raypfl.common.errors import ConfigError
from raypfl.engine.events import Evaluated, RoundFinished
from raypfl.evaluation import Measures, summarise
from raypfl.learning.objectives import SampleSums
from raypfl.methods import Ditto, FedAvg, FedAvgFT, Local
from raypfl.results import numbers
from raypfl.results.run_groups import group_runs
from raypfl.runs.replay import events_of
from raypfl.runs.result import RunResult
from tests.support.federation import EXECUTORS
from tests.support.runs import Interrupt, experiment, same_tables


# -------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture
def arrange_data(monkeypatch):
    """Changes the data that a run loads: its pools, its unseen clients, its labels."""

    def arrange(unseen=(), pools=None, labels=None):
        def load(experiment):
            data = replace(load_data(experiment), unseen=np.array(unseen, dtype=np.int64))
            if pools is not None:
                data = replace(data, pools=tuple(pools), _pools=pools)
            return data if labels is None else replace(data, labels=labels(data))

        load_data = Experiment.load_data
        monkeypatch.setattr(Experiment, "load_data", load)

    return arrange


def rows_of(result, **columns):
    """The evaluations with these values in their columns."""
    rows = []
    for row in result.evaluations.to_pylist():
        if all(row[name] == value for name, value in columns.items()):
            rows.append(row)
    return rows


class Adapting(FedAvg):
    """FedAvg that trains the global model on an unseen client's data for two epochs."""

    def unseen_model(self, clients, server):
        clients.state["touched"] = clients.initial.repeat(len(clients), 1)
        return clients.sgd(clients.loss, server["theta"], epochs=2)


class SizesOfCohorts(FedAvg):
    """FedAvg that notes how many clients an evaluation calls at a time."""

    sizes: ClassVar[list[int]] = []

    def personalize(self, server, cohort):
        self.sizes.append(len(cohort))


class ShareOfFirstClass(SampleSums):
    """The share of samples of class 0, a metric that need not have a value."""

    name: ClassVar[str] = "share"

    def sums(self, scores):
        return (scores.targets == 0).to(scores.outputs.dtype)[..., None]


def test_unseen_clients_are_never_in_a_cohort_and_get_the_global_model(tmp_path, arrange_data):
    arrange_data(unseen=(3, 7))
    result = raypfl.run(experiment(tmp_path, method="fedavg", evaluation__protocols=["local", "unseen", "global"]))
    trained = set(np.concatenate(result.rounds["cohort"].to_pylist()).tolist())

    assert trained == set(range(12)) - {3, 7}
    assert {row["client"] for row in rows_of(result, protocol="unseen", round=6)} == {3, 7}
    assert {row["model"] for row in rows_of(result, protocol="unseen")} == {"global"}
    assert {row["client"] for row in rows_of(result, protocol="local", round=6)} == set(range(12)) - {3, 7}

    tests = sum(row["samples"] for row in rows_of(result, protocol="local", round=6))
    assert rows_of(result, protocol="global", round=6)[0]["samples"] == tests


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_method_that_adapts_to_unseen_clients_is_judged_by_its_adapted_models(tmp_path, arrange_data, executor):
    arrange_data(unseen=(3, 7))
    base = experiment(tmp_path, evaluation__protocols=["unseen"], engine__executor=executor)
    result = raypfl.run(base.replace(method=Adapting()))
    rows = {(row["client"], row["model"]): row["loss"] for row in rows_of(result, round=6)}

    assert set(rows) == {(3, "personal"), (7, "personal"), (3, "global"), (7, "global")}
    assert rows[3, "personal"] != rows[3, "global"]
    assert result.client_state(3) == {}

    plain = raypfl.run(base.replace(method=FedAvg()))
    assert result.weights_hash == plain.weights_hash


def test_runs_are_judged_on_pools_and_on_corrupted_tests_with_both_models(tmp_path, arrange_data):
    arrange_data(pools={"ood/odd": np.arange(100)})
    protocols = ["ood/odd", "ood/corrupt/gaussian_noise/5", "ood/corrupt/contrast", "global"]
    result = raypfl.run(experiment(tmp_path, rounds=2, evaluation__protocols=protocols))
    summary = {(row["protocol"], row["model"]): row for row in result.summary()}

    assert set(summary) == set(itertools.product(protocols, ("personal", "global")))
    assert len(rows_of(result, protocol="ood/odd", model="personal")) == 12
    assert len(rows_of(result, protocol="ood/odd", model="global")) == 1

    (tests,) = rows_of(result, protocol="global", model="global")
    (of_contrast,) = rows_of(result, protocol="ood/corrupt/contrast", model="global")
    assert of_contrast["samples"] == 5 * tests["samples"]

    noisy = summary["ood/corrupt/gaussian_noise/5", "global"]
    assert noisy["loss"] != summary["global", "global"]["loss"]


def test_fairness_is_the_population_deviation_over_clients_of_the_class_weighted_accuracy(tmp_path):
    result = raypfl.run(experiment(tmp_path, evaluation__protocols=["pm_l"]))
    accuracy = [row["accuracy"] for row in rows_of(result, round=6, model="personal")]
    row = next(row for row in result.summary() if row["model"] == "personal")
    assert len(accuracy) == 12 and row["std"] == pytest.approx(np.std(accuracy))
    assert row["accuracy"] == pytest.approx(np.mean(accuracy)) and "ece" not in row


def test_aggregates_are_means_deviations_and_the_worst_tenth():
    accuracy = [0.1, 0.9, 0.5, 0.3] * 5
    columns = {"protocol": ["local"] * 20, "model": ["personal"] * 20, "samples": [1, 3] * 10, "accuracy": accuracy}
    columns |= {"loss": [1.0, 2.0] * 10, "ece": [0.1, None] * 10, "auc": [None] * 20, "left_out": [None] * 20}
    (row,) = summarise(Measures(), columns)

    assert row["accuracy"] == pytest.approx(0.45) and row["std"] == pytest.approx(np.std(accuracy))
    assert row["worst_decile"] == pytest.approx(0.1) and row["loss"] == pytest.approx(1.5)
    assert row["weighted"] == pytest.approx((0.1 + 2.7 + 0.5 + 0.9) / 8)
    assert row["ece"] == pytest.approx(0.1) and "auc" not in row


class LargeServer(FedAvg):
    """FedAvg with a large server entry that no client needs."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


class LargeServerDitto(Ditto):
    """Ditto with such an entry; its personal models need nothing from the server."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


class LargeServerFT(FedAvgFT):
    """Fine-tuning with such an entry; its clients read the server's model in each evaluation."""

    finetune_epochs: int = 0

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


@pytest.mark.usefixtures("without_rehearsal")
@pytest.mark.parametrize(
    ("method", "sent_for_evaluation"), [(LargeServer(), 1), (LargeServerDitto(), 1), (LargeServerFT(), 2), (Local(), 0)]
)
def test_a_server_entry_that_no_client_reads_is_not_transferred(tmp_path, monkeypatch, method, sent_for_evaluation):
    sizes = []
    shared_tensor = Worker._shared_tensor

    def record_size(self, array):
        sizes.append(array.size)
        return shared_tensor(self, array)

    monkeypatch.setattr(Worker, "_shared_tensor", record_size)
    raypfl.run(experiment(tmp_path, rounds=1).replace(method=method))
    sent_for_training = 0 if isinstance(method, Local) else 1
    assert len(sizes) == sent_for_training + sent_for_evaluation and 100_000 not in sizes


# -------------------------------------------------------------------------------------------- choosing and stopping
def validated(tmp_path, **changes):
    return experiment(
        tmp_path,
        rounds=12,
        data__val_fraction=0.3,
        evaluation__every=1,
        evaluation__protocols=["val", "local"],
        evaluation__metric="loss",
        training__lr=0.5,
        **changes,
    )


def status_and_rounds(result):
    return result.status, result.round, result.best_round


def validation_losses(result):
    """Mean validation loss of the personal models, by round."""
    losses = {}
    for round in range(1, 13):
        rows = rows_of(result, protocol="val", model="personal", round=round)
        if rows:
            losses[round] = np.mean([row["loss"] for row in rows])
    return losses


@pytest.fixture(scope="module")
def for_most_loss(tmp_path_factory):
    """A run whose best round is the one with the most loss."""
    return raypfl.run(validated(tmp_path_factory.mktemp("max"), evaluation__mode="max"))


def test_the_best_round_is_the_one_with_the_best_validation_metric(tmp_path, for_most_loss):
    result = raypfl.run(validated(tmp_path))
    losses = validation_losses(result)
    assert len(losses) == 12 and result.best_round == min(losses, key=losses.get)
    assert raypfl.Result.load(result.run_dir).best_round == result.best_round

    best = next(row for row in result.summary(result.best_round) if row["protocol"] == "val")
    assert best["loss"] == pytest.approx(min(losses.values()))

    assert for_most_loss.best_round == max(losses, key=losses.get)


def test_without_validation_no_round_is_chosen(tmp_path):
    assert raypfl.run(experiment(tmp_path, rounds=2)).best_round is None


def expected_end(losses, patience):
    """The last and the best round of a run with this patience, if more loss is better."""
    for last in losses:
        best = max(range(1, last + 1), key=losses.get)
        if last - best >= patience:
            return last, best
    return last, best


def test_a_run_out_of_patience_stops_and_stays_stopped(tmp_path, for_most_loss):
    losses = validation_losses(for_most_loss)
    assert expected_end(losses, 1)[0] < expected_end(losses, 3)[0] < 12

    result = raypfl.run(validated(tmp_path, evaluation__patience=1, evaluation__mode="max"))
    assert status_and_rounds(result) == ("finished", *expected_end(losses, 1))
    assert status_and_rounds(raypfl.resume(result.run_dir)) == ("finished", *expected_end(losses, 1))

    longer = raypfl.resume(result.run_dir, overrides=["evaluation.patience=3"])
    assert status_and_rounds(longer) == ("finished", *expected_end(losses, 3))

    patient = raypfl.run(validated(tmp_path, evaluation__patience=3, evaluation__mode="max"))
    assert longer.weights_hash == patient.weights_hash and longer.evaluations.equals(patient.evaluations)


def test_poisoned_test_data_changes_no_choice(tmp_path, arrange_data):
    clean = raypfl.run(validated(tmp_path, evaluation__patience=2))

    def wrong_test_labels(data):
        labels = data.labels.copy()
        for client in range(data.num_clients):
            tests = data.indices(client, "test")
            labels[tests] = (labels[tests] + 1) % data.num_classes
        return labels

    arrange_data(labels=wrong_test_labels)
    with_wrong_tests = raypfl.run(validated(tmp_path, evaluation__patience=2))
    assert rows_of(with_wrong_tests, protocol="local") != rows_of(clean, protocol="local")
    assert rows_of(with_wrong_tests, protocol="val") == rows_of(clean, protocol="val")
    assert (
        status_and_rounds(with_wrong_tests) == status_and_rounds(clean)
        and with_wrong_tests.weights_hash == clean.weights_hash
    )


# ----------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("protocols", "sentence"),
    [
        (["lokal"], "evaluation.protocols has 'lokal', which is not a protocol; did you mean 'local'?"),
        ([], "evaluation.protocols is empty; it must name one or more of local, global, unseen, val, pm_v, pm_l, "),
        (["local", "local"], "evaluation.protocols has 'local' twice."),
        (["ood/corrupt/contrst"], "but there is no corruption 'contrst'; did you mean 'contrast'?"),
        (["ood/corrupt/contrast/6"], "evaluation.protocols has 'ood/corrupt/contrast/6', but severities are 1 to 5."),
        (["ood/"], "evaluation.protocols has 'ood/', which is not a protocol"),
    ],
)
def test_a_protocol_that_does_not_exist_is_refused_with_the_nearest(protocols, sentence):
    with pytest.raises(ConfigError) as refused:
        raypfl.Experiment(evaluation={"protocols": protocols})
    assert sentence in str(refused.value)


def test_patience_without_validation_is_refused():
    with pytest.raises(ConfigError, match=r"evaluation\.patience is 2, which.* add 'val' to evaluation\.protocols"):
        raypfl.Experiment(evaluation={"patience": 2})


@pytest.mark.parametrize(
    ("protocol", "sentence"),
    [
        ("ood/oddd", r"has 'ood/oddd', but data has no pool called 'oddd'; did you mean 'odd'\?"),
        ("val", r"has 'val', but no client has validation samples; set data\.val_fraction"),
        ("unseen", r"has 'unseen', but all clients take part in training; set data\.unseen_fraction"),
    ],
)
def test_protocols_without_their_data_are_refused_before_anything_runs(tmp_path, arrange_data, protocol, sentence):
    arrange_data(pools={"ood/odd": np.arange(9)})
    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(experiment(tmp_path, evaluation__protocols=[protocol]))


@pytest.mark.parametrize(
    ("data", "metric", "sentence"),
    [
        ("digits", "r2", "The metric 'r2' needs scores.target_rows, which the objective Classification does not have"),
        ("diabetes", "auc", "evaluation.metrics has 'auc', which is for several labels a sample,"),
        ("diabetes", "left_out", "evaluation.metrics has 'left_out', which is for several labels a sample"),
        ("digits", "auc", "evaluation.metrics has 'auc', which is for several labels a sample"),
        ("diabetes", "ece", "The metric 'ece' needs scores.confidence, which the objective Regression does not have"),
    ],
)
def test_a_metric_of_another_objective_is_refused_before_the_first_round(tmp_path, data, metric, sentence):
    events = []
    partition = "{name: iid, clients: 3}"
    described = experiment(
        tmp_path, method="fedavg", data=data, partition=partition, cohort__size=2, evaluation__metrics=f"[{metric}]"
    )
    with pytest.raises(ConfigError) as refused:
        raypfl.run(described, listeners=[events.append])
    assert sentence in str(refused.value) and not any(isinstance(event, RoundFinished) for event in events)


def test_a_method_without_a_model_for_unseen_clients_is_refused_or_warned_of(tmp_path, arrange_data):
    arrange_data(unseen=(3, 7))
    described = experiment(tmp_path, method="fedamp", rounds=1, evaluation__protocols=["unseen"])
    sentence = r"'unseen', but 'fedamp' has no model for clients that are never trained: .*\. "
    with pytest.raises(ConfigError, match=sentence + "Nothing would be tested; add local"):
        raypfl.run(described)
    with pytest.warns(UserWarning, match=sentence + "They are not tested"):
        result = raypfl.run(described.override(["evaluation.protocols=[local, unseen]"]))
    assert {row["protocol"] for row in rows_of(result)} == {"local"}


def test_a_pool_of_other_classes_is_refused(tmp_path, arrange_data):
    def without_first_labels(data):
        return np.where(np.arange(len(data.labels)) < 5, -1, data.labels)

    arrange_data(pools={"odd": np.arange(9)}, labels=without_first_labels)
    with pytest.raises(ConfigError, match="samples of the pool 'odd' have no known class"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["ood/odd"]))


def test_a_pool_of_other_targets_is_refused(tmp_path, arrange_data):
    def numbers_without_the_first(data):
        return np.where(np.arange(len(data.labels)) < 5, np.nan, data.labels)

    arrange_data(pools={"odd": np.arange(9)}, labels=numbers_without_the_first)
    with pytest.raises(ConfigError, match="but the pool 'odd' has other targets"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["ood/odd"]))


def test_corruptions_of_images_that_are_not_of_bytes_are_refused(tmp_path):
    """They would be rounded to 0 and 1."""
    data = {"data": "tests.support.federated_data:floating", "evaluation__protocols": "[ood/corrupt/contrast]"}
    with pytest.raises(ConfigError, match=r"which is for images in uint8, but those of '.*floating' are float32"):
        raypfl.run(experiment(tmp_path, **data))


def test_class_weights_for_samples_of_several_labels_are_refused(tmp_path, arrange_data):
    arrange_data(labels=lambda data: np.zeros((len(data.labels), 3), dtype=np.float32))
    with pytest.raises(ConfigError, match="has 'pm_v', which needs one class for each sample"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["pm_v"]))


def test_round_0_is_in_the_report_and_a_stopped_run_does_not_evaluate_it_again(tmp_path):
    changes = {"method": "fedavg", "evaluation__at_start": "true"}
    whole = raypfl.run(experiment(tmp_path, **changes))
    assert set(whole.evaluations["round"].to_pylist()) == {0, 3, 6}
    assert whole.summary(0)[0]["accuracy"] < 0.3 < 0.5 < whole.summary()[0]["accuracy"]

    (group,) = group_runs([whole])
    curve = numbers.metric_curve(group, "local", "global", "megabytes")
    assert curve.x[0] == 0 and len(curve.x) == 3

    stopped = raypfl.run(experiment(tmp_path, **changes), listeners=[Interrupt(2)])
    assert same_tables(raypfl.resume(stopped.run_dir), whole)

    replayed = [e.round for e in events_of(whole) if isinstance(e, Evaluated)]
    assert replayed == [0, 3, 6]


def test_results_are_means_over_the_number_of_last_rounds_in_the_settings(tmp_path):
    changes = {"rounds": 6, "evaluation__every": 2, "method": "ditto"}
    whole = raypfl.run(experiment(tmp_path, **changes))
    averaged = raypfl.run(experiment(tmp_path, **changes, evaluation__last=2))

    assert averaged.weights_hash == whole.weights_hash and averaged.last_rounds == [4, 6]
    for mean, before, after in zip(averaged.summary(), whole.summary(4), whole.summary(6), strict=True):
        assert (mean["protocol"], mean["model"]) == (before["protocol"], before["model"])
        assert mean["worst_decile"] == pytest.approx((before["worst_decile"] + after["worst_decile"]) / 2)

    by_client = {}
    for row in whole.evaluations.to_pylist():
        if row["protocol"] == "local" and row["model"] == "personal" and row["round"] in (4, 6):
            by_client.setdefault(row["client"], []).append(50 * row["accuracy"])

    scores = numbers.client_scores(averaged, "local", "personal")
    assert dict(zip(scores.clients.tolist(), scores.values.tolist(), strict=True)) == pytest.approx(
        {k: sum(v) for k, v in by_client.items()}
    )


@pytest.mark.usefixtures("without_rehearsal")
def test_clients_that_are_never_trained_make_no_cohort_larger(tmp_path):
    """Half of twelve clients are never trained, so a round has three, as many as an evaluation may call at a time."""
    SizesOfCohorts.sizes.clear()
    unseen = {"data__unseen_fraction": 0.5, "cohort__size": "null", "cohort__fraction": 0.5}
    grouped = {"engine__group_size": "null", "engine__executor": "vectorised", "rounds": 1}
    method = f"{__name__}:SizesOfCohorts"
    result = raypfl.run(experiment(tmp_path, method=method, **unseen, **grouped))
    assert result.rounds["clients"].to_pylist() == [3]
    assert result.metadata["group_size"] == 3
    assert SizesOfCohorts.sizes == [3, 3]


def test_a_metric_that_one_of_the_last_rounds_lacks_is_the_mean_of_the_others(tmp_path):
    metric = f"[{__name__}:ShareOfFirstClass]"
    settings = {"rounds": 2, "evaluation__every": 1, "evaluation__last": 2, "evaluation__metrics": metric}
    result = raypfl.run(experiment(tmp_path, **settings, evaluation__protocols="[local]"))
    file = result.run_dir / "evaluations.parquet"
    for lacking in (1, 2):
        table = result.evaluations.to_pydict()
        for row, round in enumerate(table["round"]):
            if round == lacking:
                table["share"][row] = None
        pq.write_table(pa.table(table, schema=result.evaluations.schema), file)
        changed = RunResult.load(result.run_dir)
        assert changed.summary()[0]["share"] == result.summary(3 - lacking)[0]["share"]
        assert changed.summary()[0]["accuracy"] == result.summary()[0]["accuracy"]
