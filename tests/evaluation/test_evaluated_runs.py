"""What whole runs are judged on, which round they choose, when they stop, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

import raypfl
from raypfl.clients.worker import Worker
from raypfl.common.errors import ConfigError
from raypfl.data import load_federated
from raypfl.engine.events import Evaluated, RoundFinished
from raypfl.evaluation import Measures, summarise
from raypfl.methods import METHODS, Ditto, FedAvg, FedAvgFT, Local
from raypfl.results import numbers
from raypfl.results.groups import group_runs
from raypfl.runs.result import events_of
from tests.support.federation import EXECUTORS
from tests.support.runs import Interrupt, experiment, same_tables


# -------------------------------------------------------------------------------------------------------- whole runs
@pytest.fixture
def arranged(monkeypatch):
    """Arranges a data set as a run finds it: its pools, its unseen clients, its labels."""

    def arrange(unseen=(), pools=None, labels=None):
        def load(*args, **kwargs):
            data = replace(load_federated(*args, **kwargs), unseen=np.array(unseen, dtype=np.int64))
            if pools is not None:
                data = replace(data, pools=tuple(pools), _pools=pools)
            return data if labels is None else replace(data, labels=labels(data))

        monkeypatch.setattr("raypfl.runs.preparing.load_federated", load)

    return arrange


def rows_of(result, **wanted):
    return [row for row in result.evaluations.to_pylist() if all(row[name] == value for name, value in wanted.items())]


class Adapting(FedAvg):
    """Gives a new client the global model trained on that client's data for two epochs."""

    def unseen_model(self, clients, server):
        clients.state["touched"] = clients.initial.repeat(len(clients), 1)
        return clients.sgd(clients.loss, server["theta"], epochs=2)


def test_unseen_clients_are_never_drawn_and_get_the_global_model(tmp_path, arranged):
    arranged(unseen=(3, 7))
    result = raypfl.run(experiment(tmp_path, method="fedavg", evaluation__protocols=["local", "unseen", "global"]))
    drawn = {client for cohort in result.rounds["cohort"].to_pylist() for client in cohort}
    assert drawn == set(range(12)) - {3, 7}
    assert {row["client"] for row in rows_of(result, protocol="unseen", round=6)} == {3, 7}
    assert {row["model"] for row in rows_of(result, protocol="unseen")} == {"global"}
    assert {row["client"] for row in rows_of(result, protocol="local", round=6)} == set(range(12)) - {3, 7}
    tests = sum(row["samples"] for row in rows_of(result, protocol="local", round=6))
    assert rows_of(result, protocol="global", round=6)[0]["samples"] == tests


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_method_that_adapts_to_unseen_clients_is_judged_with_what_it_makes_of_them(tmp_path, arranged, executor):
    arranged(unseen=(3, 7))
    base = experiment(tmp_path, evaluation__protocols=["unseen"], engine__executor=executor)
    result = raypfl.run(base.replace(method=Adapting()))
    rows = {(row["client"], row["model"]): row["loss"] for row in rows_of(result, round=6)}
    assert set(rows) == {(3, "personal"), (7, "personal"), (3, "global"), (7, "global")}
    assert rows[3, "personal"] != rows[3, "global"]
    assert result.client_state(3) == {}
    plain = raypfl.run(base.replace(method=FedAvg()))
    assert result.weights_hash == plain.weights_hash


def test_runs_are_judged_on_pools_and_on_corrupted_tests_with_both_models(tmp_path, arranged):
    arranged(pools={"ood/odd": np.arange(100)})
    protocols = ["ood/odd", "ood/corrupt/gaussian_noise/5", "ood/corrupt/contrast", "global"]
    result = raypfl.run(experiment(tmp_path, evaluation__protocols=protocols))
    summary = {(row["protocol"], row["model"]): row for row in result.summary()}
    assert set(summary) == {(protocol, model) for protocol in protocols for model in ("personal", "global")}
    assert [len(rows_of(result, protocol="ood/odd", model=model, round=6)) for model in ("personal", "global")] == [
        12,
        1,
    ]
    tests = rows_of(result, protocol="global", model="global", round=6)[0]["samples"]
    assert rows_of(result, protocol="ood/corrupt/contrast", model="global", round=6)[0]["samples"] == 5 * tests
    clean, noisy = summary["global", "global"], summary["ood/corrupt/gaussian_noise/5", "global"]
    assert noisy["loss"] != clean["loss"]


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


class Laden(FedAvg):
    """Has much on its server that no client needs."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


class LadenDitto(Ditto):
    """The same, with personal models that need nothing of the server's."""

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


class LadenFT(FedAvgFT):
    """The same, whose clients train the server's model on in each evaluation."""

    finetune_epochs: int = 0

    def start(self, task):
        return super().start(task) | {"hypernetwork": torch.zeros(100_000)}


@pytest.mark.parametrize(("method", "sent"), [(Laden(), 1), (LadenDitto(), 1), (LadenFT(), 2), (Local(), 0)])
def test_an_entry_of_the_server_that_no_client_asks_for_is_not_transferred(tmp_path, monkeypatch, method, sent):
    taken, take = [], Worker._writable
    monkeypatch.setattr(Worker, "_writable", lambda self, array: taken.append(array.size) or take(self, array))
    raypfl.run(experiment(tmp_path, rounds=1).replace(method=method))
    trained_on = 0 if isinstance(method, Local) else 1
    assert len(taken) == trained_on + sent and 100_000 not in taken


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


def chosen(result):
    return result.status, result.round, result.best_round


def validation_losses(result):
    """By round, of the personal models."""
    rows = {round: rows_of(result, protocol="val", model="personal", round=round) for round in range(1, 13)}
    return {round: np.mean([row["loss"] for row in found]) for round, found in rows.items() if found}


def test_the_best_round_is_the_one_with_the_best_validation_metric(tmp_path):
    result = raypfl.run(validated(tmp_path))
    losses = validation_losses(result)
    assert len(losses) == 12 and result.best_round == min(losses, key=losses.get)
    assert raypfl.Result.load(result.run_dir).best_round == result.best_round
    best = next(row for row in result.summary(result.best_round) if row["protocol"] == "val")
    assert best["loss"] == pytest.approx(min(losses.values()))
    worst = raypfl.run(validated(tmp_path, evaluation__mode="max"))
    assert worst.best_round == max(losses, key=losses.get)


def test_without_validation_no_round_is_chosen(tmp_path):
    assert raypfl.run(experiment(tmp_path, rounds=2)).best_round is None


def ending(losses, patience):
    """The round that a run with this patience ends with if more loss is better, and the best one until then."""
    for last in losses:
        best = max(range(1, last + 1), key=losses.get)
        if last - best >= patience:
            return last, best
    return last, best


def test_a_run_stops_when_its_patience_is_at_its_end_and_stays_stopped(tmp_path):
    losses = validation_losses(raypfl.run(validated(tmp_path, evaluation__mode="max")))
    assert ending(losses, 1)[0] < ending(losses, 3)[0] < 12
    result = raypfl.run(validated(tmp_path, evaluation__patience=1, evaluation__mode="max"))
    assert chosen(result) == ("finished", *ending(losses, 1))
    assert chosen(raypfl.resume(result.run_dir)) == ("finished", *ending(losses, 1))
    longer = raypfl.resume(result.run_dir, overrides=["evaluation.patience=3"])
    assert chosen(longer) == ("finished", *ending(losses, 3))
    patient = raypfl.run(validated(tmp_path, evaluation__patience=3, evaluation__mode="max"))
    assert longer.weights_hash == patient.weights_hash and longer.evaluations.equals(patient.evaluations)


def test_poisoned_test_data_changes_no_choice(tmp_path, arranged):
    honest = raypfl.run(validated(tmp_path, evaluation__patience=2))

    def poisoned(data):
        labels = data.labels.copy()
        for client in range(data.num_clients):
            tests = data.indices(client, "test")
            labels[tests] = (labels[tests] + 1) % data.num_classes
        return labels

    arranged(labels=poisoned)
    misled = raypfl.run(validated(tmp_path, evaluation__patience=2))
    assert rows_of(misled, protocol="local") != rows_of(honest, protocol="local")
    assert rows_of(misled, protocol="val") == rows_of(honest, protocol="val")
    assert chosen(misled) == chosen(honest) and misled.weights_hash == honest.weights_hash


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
def test_what_the_data_does_not_have_is_refused_before_anything_runs(tmp_path, arranged, protocol, sentence):
    arranged(pools={"ood/odd": np.arange(9)})
    with pytest.raises(ConfigError, match=sentence):
        raypfl.run(experiment(tmp_path, evaluation__protocols=[protocol]))


def test_a_pool_of_other_classes_is_refused(tmp_path, arranged):
    arranged(
        pools={"odd": np.arange(9)}, labels=lambda data: np.where(np.arange(len(data.labels)) < 5, -1, data.labels)
    )
    with pytest.raises(ConfigError, match="samples of the pool 'odd' have no known class"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["ood/odd"]))


def test_class_weights_for_samples_of_several_labels_are_refused(tmp_path, arranged):
    arranged(labels=lambda data: np.zeros((len(data.labels), 3), dtype=np.float32))
    with pytest.raises(ConfigError, match="has 'pm_v', which needs one class for each sample"):
        raypfl.run(experiment(tmp_path, evaluation__protocols=["pm_v"]))


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"partial"}))
def test_evaluation_before_the_first_round_is_of_the_models_that_a_run_begins_with(tmp_path, method):
    short = {"rounds": 1, "partition__clients": 4, "cohort__size": 2, "evaluation__every": 0}
    without = raypfl.run(experiment(tmp_path, method=method, **short))
    events = []
    result = raypfl.run(
        experiment(tmp_path, method=method, **short, evaluation__at_start="true"), listeners=[events.append]
    )
    begun = result.evaluations.filter(pc.field("round") == 0)
    assert result.evaluations.slice(begun.num_rows).equals(without.evaluations)
    trained = pc.field("phase") == "training"
    assert result.weights_hash == without.weights_hash
    assert result.ledger.filter(trained).equals(without.ledger.filter(trained))
    assert [type(e) for e in events if isinstance(e, RoundFinished | Evaluated)] == [
        Evaluated,
        RoundFinished,
        Evaluated,
    ]
    keys = ["client", "protocol", "model", "samples"]
    assert begun.select(keys).equals(without.evaluations.select(keys))


def test_round_0_is_in_the_report_and_a_stopped_run_does_not_evaluate_it_again(tmp_path):
    changes = {"method": "fedavg", "evaluation__at_start": "true"}
    whole = raypfl.run(experiment(tmp_path, **changes))
    assert set(whole.evaluations["round"].to_pylist()) == {0, 3, 6}
    assert whole.summary(0)[0]["accuracy"] < 0.3 < 0.5 < whole.summary()[0]["accuracy"]
    (one,) = group_runs([whole])
    curve = numbers.metric_curve(one, "local", "global", "megabytes")
    assert curve.x[0] == 0 and len(curve.x) == 3
    stopped = raypfl.run(experiment(tmp_path, **changes), listeners=[Interrupt(2)])
    assert same_tables(raypfl.resume(stopped.run_dir), whole)
    replayed = [e.round for e in events_of(whole) if isinstance(e, Evaluated)]
    assert replayed == [0, 3, 6]


def test_results_are_means_over_as_many_of_the_last_evaluated_rounds_as_the_settings_say(tmp_path):
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
    ids, scores = numbers.client_scores(averaged, "local", "personal")
    assert dict(zip(ids.tolist(), scores.tolist(), strict=True)) == pytest.approx(
        {k: sum(v) for k, v in by_client.items()}
    )
