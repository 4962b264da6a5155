"""Malicious clients and robust rules in whole rounds and runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError, MethodError
from raypfl.engine.prepared import Prepared
from raypfl.federation.robustness import Aggregation, LabelAttack, UpdateAttack, Updates, Wire
from raypfl.federation.robustness.attacks import Boost, InnerProduct, SignFlip, poisoned_labels
from raypfl.federation.robustness.rules import Clipping, Krum, Median
from raypfl.federation.settings import FailureSettings
from raypfl.methods import IFCA, FedAvg
from raypfl.methods.clustered_models.models_of_clusters import best_models
from raypfl.results.run_groups import group_runs
from raypfl.results.table import legend
from raypfl.runs.driver import check
from tests.support.federation import Federation
from tests.support.runs import ON_RAY, Interrupt, experiment, same_tables

GLOBAL = -1
"""The client's number in a row on the global model and everybody's test data."""

MALICIOUS = np.array([False, True, False, False, True])


class Remembering(FedAvg):
    """FedAvg whose clients remember what an honest one would send."""

    def train(self, clients, theta):
        reply = super().train(clients, theta)
        clients.state["trained"] = reply["theta"].rows
        return reply


class MixedKinds(FedAvg):
    """Sends its update as a mean, a sum and a row each."""

    def train(self, clients, theta):
        trained = clients.sgd(clients.loss, theta)
        return {
            "theta": raypfl.Mean(trained),
            "moved": raypfl.Sum(trained - theta),
            "step": raypfl.Each(trained - theta),
            "count": raypfl.Each(clients.num_samples.long()),
            "nothing": raypfl.Each(trained[:, :0]),
        }

    def round(self, server, cohort):
        server["reply"] = cohort.run(self.train, theta=server["theta"])
        server["theta"] = server["reply"]["theta"]


def federation(method: FedAvg, **options: Any) -> Federation:
    return Federation(sizes=(7, 4, 11, 7, 2), method=method, **options)


@pytest.mark.parametrize("group_size", [None, 1, 2])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_with_an_attack_is_the_mean_of_what_honest_and_malicious_clients_send(group_size, weighting):
    wire = Wire(SignFlip(scale=3.0), None, MALICIOUS)
    fed = federation(Remembering(weighting=weighting), wire=wire, group_size=group_size)
    before = fed.method.start(fed.task)["theta"].clone()
    theta = fed.run_rounds(None)["theta"]

    sizes = np.array(fed.sizes, dtype=float) if weighting == "samples" else np.ones(5)
    expected = np.zeros(len(before))
    for client in range(5):
        message = fed.state_of(client)["trained"].astype(float)
        if MALICIOUS[client]:
            message = before.numpy() - 3.0 * (message - before.numpy())
        expected += sizes[client] / sizes.sum() * message
    assert theta.numpy() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_an_attack_that_sends_the_honest_update_changes_nothing_but_rounding():
    honest = federation(FedAvg()).run_rounds(None, [0, 1, 3])["theta"]
    boosted = federation(FedAvg(), wire=Wire(Boost(factor=1.0), None, MALICIOUS)).run_rounds(None, [0, 1, 3])["theta"]
    assert torch.allclose(boosted, honest, rtol=1e-12, atol=1e-14)


def test_krum_sends_on_one_clients_model_to_the_bit():
    fed = federation(Remembering(), wire=Wire(SignFlip(scale=50.0), Krum(fraction=0.4), MALICIOUS))
    theta = fed.run_rounds(None)["theta"]
    chosen = [client for client in range(5) if np.array_equal(theta.numpy(), fed.state_of(client)["trained"])]
    assert len(chosen) == 1 and not MALICIOUS[chosen[0]]


def test_clipping_bounds_by_how_much_a_round_moves_the_model():
    fed = federation(FedAvg(), wire=Wire(Boost(factor=1e6), Clipping(radius=0.01), MALICIOUS))
    before = fed.method.start(fed.task)["theta"].clone()
    assert 0 < (fed.run_rounds(None)["theta"] - before).norm() <= 0.01 * (1 + 1e-9)


def test_every_kind_of_message_is_attacked_and_numbers_that_are_no_floats_are_not():
    honest = federation(MixedKinds()).run_rounds(None)["reply"]
    fed = federation(MixedKinds(), wire=Wire(SignFlip(), None, MALICIOUS), group_size=2)
    reply = fed.run_rounds(None)["reply"]

    step = honest["step"].clone()
    step[torch.from_numpy(MALICIOUS)] *= -1
    assert torch.allclose(reply["step"], step, rtol=1e-12)
    assert torch.allclose(reply["moved"], step.sum(0), rtol=1e-9, atol=1e-12)
    assert torch.allclose(reply["theta"], fed.method.start(fed.task)["theta"] + step.mean(0), rtol=1e-12)
    assert torch.equal(reply["count"], honest["count"])


def test_messages_without_numbers_are_not_attacked():
    class Checking(UpdateAttack):
        def forge(self, updates: Updates) -> torch.Tensor:
            assert updates.malicious.numel() > 0
            return updates.malicious

    reply = federation(MixedKinds(), wire=Wire(Checking(), None, MALICIOUS)).run_rounds(None)["reply"]
    assert reply["nothing"].shape == (5, 0)


def test_models_that_a_client_did_not_train_are_in_no_attackers_honest_mean():
    fed = federation(IFCA(clusters=2, weighting="uniform"), wire=Wire(InnerProduct(scale=0.5), None, MALICIOUS))
    plain = federation(IFCA(clusters=2, weighting="uniform"))
    models = plain.method.start(plain.task)["models"]
    _, choice = best_models(plain.clients(), models)
    assert set(choice.tolist()) == {0, 1}
    rows = plain.method.train(plain.clients(), models)

    # Their update of a model is all of it: it has no argument of its name.
    attacked = fed.run_rounds(None)["models"]
    for number in range(len(models)):
        members = choice.as_subclass(torch.Tensor) == number
        honest = rows[f"model_{number}"].rows.as_subclass(torch.Tensor)[members & ~torch.from_numpy(MALICIOUS)]
        num_malicious = int((members & torch.from_numpy(MALICIOUS)).sum())
        expected = (honest.sum(0) - 0.5 * num_malicious * honest.mean(0)) / members.sum()
        assert torch.allclose(attacked[number], expected, rtol=1e-12, atol=1e-14)


def test_a_client_that_failed_is_neither_honest_nor_malicious():
    class Counting(UpdateAttack):
        def forge(self, updates: Updates) -> torch.Tensor:
            assert (len(updates.honest), len(updates.malicious)) == (2, 1)
            return updates.malicious

    class Fails(FedAvg):
        def train(self, clients, theta):
            if {1, 2} & set(clients.ids):
                raise RuntimeError("a client without power")
            return super().train(clients, theta)

    failures = FailureSettings(retries=0, on_client_failure="skip", min_success_fraction=0.1)
    fed = federation(Fails(), wire=Wire(Counting(), Median(), MALICIOUS), group_size=1, failures=failures)
    assert fed.run_rounds(None)["theta"].isfinite().all() and len(fed.cohorts[0].failed) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "fednh", "aggregation": "median"}, "'means' as a sum"),
        ({"method": "fedamp", "aggregation": "median"}, "'model' as a row"),
        ({"method": "fednova", "aggregation": "median"}, "counts all clients equally, but FedNova needs its clients'"),
        ({"method": "q-ffl", "aggregation": "median"}, "QFFL needs its clients' weights"),
        ({"method": "fedas", "aggregation": "median"}, "FedAS needs its clients' weights"),
        (
            {"aggregation": "{name: krum, select: 7}", "cohort__size": 6},
            "aggregation.select is 7, but a cohort has 6 clients; average fewer, since",
        ),
    ],
)
def test_a_rule_that_does_not_fit_the_method_or_the_cohort_is_refused_before_the_run(tmp_path, changes, message):
    described = experiment(tmp_path, rounds=1, **changes)
    with pytest.raises(ConfigError, match=message):
        raypfl.run(described)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("attack", ["label_flip", "random_labels"])
def test_label_attacks_change_the_training_labels_of_malicious_clients_and_no_others(tmp_path, attack):
    described = experiment(tmp_path, attack=attack, attack__fraction=0.25)
    data = described.load_data()
    prepared = Prepared(described, data)
    labels = np.asarray(prepared.context.samples.labels)
    assert prepared.is_malicious.sum() == 3

    poisoned = np.zeros(len(labels), dtype=bool)
    for client in np.flatnonzero(prepared.is_malicious):
        poisoned[data.indices(client, "train")] = True
    assert np.array_equal(labels[~poisoned], data.labels[~poisoned])
    if attack == "label_flip":
        assert np.array_equal(labels[poisoned], 9 - data.labels[poisoned])
    else:
        assert 0.05 < (labels[poisoned] == data.labels[poisoned]).mean() < 0.2
        assert set(labels[poisoned]) == set(range(10))


def test_evaluations_are_of_honest_clients_and_the_record_names_the_others(tmp_path):
    result = raypfl.run(experiment(tmp_path, attack="sign_flip", rounds=1, evaluation__every=1))
    malicious = result.metadata["malicious_clients"]
    evaluated = set(result.evaluations["client"].to_pylist()) - {GLOBAL}
    assert len(malicious) == 2 and evaluated == set(range(12)) - set(malicious)
    assert legend(group_runs([result])) == ["2 of 12 clients attack (sign_flip); scores are of the honest ones."]


def test_personal_and_global_models_are_tested_on_the_same_data_of_honest_clients(tmp_path):
    described = experiment(
        tmp_path,
        method="ditto",
        attack="sign_flip",
        rounds=1,
        evaluation__protocols="[global, pm_v, ood/corrupt/jpeg/1]",
    )
    result = raypfl.run(described)
    data = described.load_data()
    sizes = data.sizes("test")
    num_honest = int(sizes.sum() - sizes[result.metadata["malicious_clients"]].sum())
    table = result.evaluations.to_pydict()
    for protocol, model, samples in zip(table["protocol"], table["model"], table["samples"], strict=True):
        assert samples == num_honest or (protocol == "pm_v" and samples < num_honest), (protocol, model)


def test_a_run_that_an_attack_makes_diverge_ends_with_the_attacks_name_and_a_remedy(tmp_path):
    described = experiment(tmp_path, attack="{name: boost, factor: 1e9}")
    with pytest.raises(
        raypfl.RaypflError, match=r"The attack 'boost' may be the cause: try a robust .*aggregation=med"
    ):
        raypfl.run(described)


def test_rules_withstand_what_ruins_the_mean(tmp_path):
    def accuracy(**changes: Any) -> float:
        described = experiment(
            tmp_path,
            method="fedavg",
            rounds=8,
            training__batch_size=10,
            partition="{name: iid, clients: 10}",
            cohort__size=10,
            attack="{name: sign_flip, fraction: 0.3, scale: 5}",
            evaluation__protocols="[global]",
            **changes,
        )
        (row,) = raypfl.run(described).summary()
        return row["accuracy"]

    assert accuracy() < 0.5
    for rule in ("median", "{name: trimmed_mean, fraction: 0.3}", "{name: krum, fraction: 0.3, select: 4}"):
        assert accuracy(aggregation=rule) > 0.8


@pytest.mark.usefixtures("ray_cluster")
def test_an_attacked_run_has_the_same_bits_on_actors_and_after_a_stop(tmp_path):
    attacked = {"attack": "gaussian", "aggregation": "{name: krum, select: 3}", "rounds": 4}
    expected = raypfl.run(experiment(tmp_path, **attacked))
    on_actors = raypfl.run(experiment(tmp_path, **attacked, **ON_RAY))
    assert on_actors.weights_hash == expected.weights_hash and same_tables(on_actors, expected)

    stopped = raypfl.run(experiment(tmp_path, **attacked), listeners=[Interrupt(3)])
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == expected.weights_hash and same_tables(resumed, expected)


def test_without_attack_and_rule_clients_send_sums(tmp_path):
    described = experiment(tmp_path)
    data = described.load_data()
    assert not Prepared(described, data).context.sends_rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attack": "sign_flip", "privacy__secure_aggregation": True},
            "attack needs each client's message, but with privacy",
        ),
        (
            {"aggregation": "krum", "asynchronous__buffer": 3, "devices__hardware": "lognormal"},
            "with asynchronous.buffer the server has only their sums; leave aggregation or asynchronous.buffer out",
        ),
        (
            {"attack__fraction": 0.3},
            r"^attack has options \(fraction\), but no name; add one of these, as in attack=alie: alie, backdoor,",
        ),
        (
            {"aggregation__select": 3},
            r"^aggregation has options \(select\), but no name; .* as in aggregation=krum: krum\.",
        ),
        ({"attack": "sign_flop"}, "did you mean 'sign_flip'"),
        ({"attack": "{name: sign_flip, fraction: 1.5}"}, "attack.fraction is 1.5; it must be above 0 and below 1"),
        ({"aggregation": "{name: trimmed_mean, fraction: 0.5}"}, "aggregation.fraction is 0.5; it must be at least 0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, method="fedavg", **changes)


@pytest.mark.parametrize("changes", [{"aggregation": "median"}, {"privacy__secure_aggregation": True}])
def test_messages_that_come_after_a_warm_up_are_refused_before_it(tmp_path, changes):
    described = experiment(tmp_path, method="pfedsim", rounds=100, **changes)
    with pytest.raises(ConfigError, match=r"PFedSim.train_own .* returns 'model' as a row for each client"):
        check([described])


@pytest.mark.parametrize("method", [{"method": "local"}, {"method": "partial", "method__personal": "*"}])
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"aggregation": "median"}, "aggregation"),
        ({"privacy__secure_aggregation": True}, "privacy.secure_aggregation"),
        ({"privacy__noise": 1.0, "privacy__unit": "client"}, "privacy.unit=client"),
    ],
)
def test_what_concerns_messages_is_warned_of_where_clients_send_none(tmp_path, method, changes, setting):
    """It is no error: a comparison may have another method that sends some."""
    with pytest.warns(UserWarning, match=f"clients of .* send nothing to the server, so {setting} has no effect on"):
        run = raypfl.run(experiment(tmp_path, rounds=1, **method, **changes))
    assert run.status == "finished"


def test_labels_that_are_no_classes_are_refused(tmp_path):
    (tmp_path / "people.csv").write_text("age,income\n" + "\n".join(f"{20 + i},{1000.5 * i}" for i in range(12)))
    table = f"{{name: table, root: {tmp_path}, target: income}}"
    described = experiment(tmp_path, method="fedavg", data=table, attack="label_flip", cohort__size=2)
    with pytest.raises(ConfigError, match="attack changes labels, which are one class a sample"):
        check([described.override(["partition={name: iid, clients: 2}"])])


def test_a_rule_that_bounds_updates_needs_what_all_clients_were_sent():
    class Scattered(FedAvg):
        def round(self, server, cohort):
            rows = server["theta"].expand(len(cohort), -1)
            server["theta"] = cohort.run(self.train, theta=raypfl.Scatter(rows))["theta"]

    fed = federation(Scattered(), wire=Wire(InnerProduct(), Clipping(radius=1.0), MALICIOUS))
    with pytest.raises(MethodError, match="aggregation is Clipping, which bounds changes"):
        fed.run_rounds(None)


def test_an_attack_of_a_users_own_is_told_what_it_must_return(tmp_path):
    class Silent(UpdateAttack):
        def forge(self, updates):
            return None

    class OneLabel(LabelAttack):
        def poison(self, labels, num_classes, generator):
            return np.zeros(1)

    with pytest.raises(MethodError, match=r"Silent\.forge \(test_attacks\.py, line \d+\) returned a NoneType; it must"):
        federation(FedAvg(), wire=Wire(Silent(), None, MALICIOUS)).run_rounds(None)
    with pytest.raises(MethodError, match=r"OneLabel\.poison \(test_attacks\.py, line \d+\) returned \[1\]; it must"):
        poisoned_labels(OneLabel(), np.zeros(9), np.arange(4), 10, seed=0)


def test_a_rule_that_returns_rows_is_told_what_to_return():
    class Rows(Aggregation):
        def combine(self, rows, before):
            return rows

    with pytest.raises(
        MethodError, match=r"Rows\.combine \(test_attacks\.py, line \d+\) returned \[5, \d+\]; it must return one row"
    ):
        federation(FedAvg(), wire=Wire(None, Rows())).run_rounds(None)
