"""Making a client's model takes exchanges like a round's, which are apart from training and leave no state."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from rich.console import Console

import raypfl
from raypfl import report
from raypfl.clients.worker import Worker
from raypfl.common.errors import MethodError, RaypflError
from raypfl.common.messages import Mean, Scatter, per_client
from raypfl.methods import FedAvg, PeFLL
from raypfl.models import Predictor
from raypfl.results.display import outcome
from raypfl.results.numbers import messages, prediction_traffic
from raypfl.results.run_groups import group_runs
from tests.support.federation import Federation, both_executors
from tests.support.runs import experiment

NEWCOMERS = {"data__unseen_fraction": 0.25, "evaluation__protocols": ["local", "global", "unseen"]}


class Shifted(FedAvg):
    """Send each client the global model, shifted by its number; on purpose, change every state that may be changed."""

    def personalize(self, server, cohort):
        shifts = torch.tensor(cohort.ids).float()[:, None] / 100
        cohort.run(self.keep, theta=Scatter(server["theta"] + shifts))
        server["theta"].zero_()
        server["more"] = torch.ones(3)

    def keep(self, clients, theta):
        clients.state["theta"] = theta

    def personal_model(self, clients, server):
        return clients.state["theta"]

    def unseen_model(self, clients, server):
        clients.state["evaluated"] = clients.state["theta"]
        return clients.state["theta"]


class ShiftedAlone(FedAvg):
    """Make the models of `Shifted` without an exchange, as a reference."""

    def personal_model(self, clients, server):
        shifts = torch.tensor(clients.ids).float()[:, None] / 100
        return server["theta"] + shifts

    unseen_model = personal_model


@both_executors
def test_known_and_new_clients_are_evaluated_with_models_from_exchanges_that_leave_no_state(tmp_path, executor):
    base = experiment(tmp_path, rounds=3, engine__executor=executor, **NEWCOMERS)
    result = raypfl.run(base.replace(method=Shifted()))
    alone = raypfl.run(base.replace(method=ShiftedAlone()))

    assert set(pc.unique(result.evaluations["model"]).to_pylist()) == {"personal", "global"}
    assert result.evaluations.equals(alone.evaluations)
    assert result.weights_hash == alone.weights_hash and result.client_state(3) == {}
    assert result.rounds["bytes_down"].equals(alone.rounds["bytes_down"]) and result.megabytes == alone.megabytes


class RecordsCohorts(Shifted):
    """Append the clients of each cohort of an evaluation to a list."""

    def personalize(self, server, cohort):
        assert bool(torch.isfinite(server["theta"]).all()) and "more" not in server
        COHORTS.append((cohort.round, cohort.unseen, cohort.ids))
        super().personalize(server, cohort)


COHORTS: list[tuple[int, bool, tuple[int, ...]]] = []


@pytest.mark.usefixtures("without_rehearsal")
def test_every_client_gets_a_model_in_cohorts_no_larger_than_in_training(tmp_path):
    COHORTS.clear()
    base = experiment(tmp_path, cohort__size=4, rounds=1, evaluation__every=1, **NEWCOMERS)
    result = raypfl.run(base.replace(method=RecordsCohorts()))

    new = set(result.evaluations.filter(pc.field("protocol") == "unseen")["client"].to_pylist())
    new_cohorts = [ids for _, unseen, ids in COHORTS if unseen is True]
    known_cohorts = [ids for _, unseen, ids in COHORTS if unseen is False]

    assert len(new) == 3 and new_cohorts == [tuple(sorted(new))]
    assert sorted(client for ids in known_cohorts for client in ids) == sorted(set(range(12)) - new)
    assert [len(ids) for ids in known_cohorts] == [3, 3, 3] and {number for number, _, _ in COHORTS} == {1}


def test_the_ledger_separates_prediction_and_a_hypernetwork_never_leaves_the_server(tmp_path, monkeypatch):
    received = set()
    tensor = Worker._shared_tensor
    monkeypatch.setattr(Worker, "_shared_tensor", lambda self, array: received.add(array.size) or tensor(self, array))

    base = experiment(tmp_path, rounds=2, evaluation__every=2, cohort__size=6, **NEWCOMERS)
    result = raypfl.run(base.replace(method=PeFLL(length=7)))

    (embed,) = received
    model = result.metadata["parameters"]
    rows = result.ledger.to_pylist()
    messages = [("down", "embed", embed), ("up", "v", 7), ("down", "theta", model)]

    prediction = [(r["direction"], r["name"], r["numbers"]) for r in rows if r["phase"] == "prediction"]
    assert prediction == messages * 3  # two cohorts of known clients, one of new ones
    assert {r["round"] for r in rows if r["phase"] == "prediction"} == {2}

    training = [(r["direction"], r["name"], r["numbers"]) for r in rows if r["phase"] == "training"]
    after_prediction = [("up", "step", model), ("down", "step", 7), ("up", "embed_step", embed)]
    assert training == [*messages, *after_prediction] * 2

    down = [sum(r["clients"] * r["bytes"] for r in rows if r["phase"] == "training" and r["direction"] == "down")]
    assert [pc.sum(result.rounds["bytes_down"]).as_py()] == down


def test_a_resumed_run_is_evaluated_as_if_it_had_never_stopped(tmp_path):
    base = experiment(tmp_path, method="pefll", rounds=2, evaluation__every=1, checkpoint__every=1)
    half = raypfl.run(base.override(["rounds=1"]))

    whole = raypfl.run(base)
    resumed = raypfl.resume(half.run_dir, overrides=["rounds=2"])
    assert resumed.evaluations.equals(whole.evaluations) and resumed.ledger.equals(whole.ledger)


class LooksAtTheServer(Shifted):
    """Read the server's state in `personal_model`, where the changes by `personalize` must not show."""

    def personal_model(self, clients, server):
        assert "theta" in server and "more" not in server
        return server["theta"] + clients.state["theta"] - clients.state["theta"]


def test_a_model_from_exchanges_may_need_the_servers_state_too(tmp_path):
    base = experiment(tmp_path, rounds=2)
    rows = raypfl.run(base.replace(method=LooksAtTheServer())).evaluations.to_pylist()

    accuracies = {"global": [], "personal": []}
    for row in rows:
        if row["protocol"] == "local":
            accuracies[row["model"]].append(row["accuracy"])
    assert accuracies["global"] == accuracies["personal"] != []


class Diverges(Shifted):
    """Train with a step size at which the loss overflows."""

    def keep(self, clients, theta):
        clients.state["theta"] = clients.sgd(clients.loss, theta, lr=1e30)


class MistakenOnTheServer(Shifted):
    def personalize(self, server, cohort):
        cohort.run(self.keep, theta=Scatter(server["theta"].expand(len(cohort), -1)))
        server["speed"] += 1


class Adrift(Diverges):
    def keep(self, clients, theta):
        super().keep(clients, theta)
        return {"theta": Mean(theta)}


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (Diverges(), r"Training diverged on client \d+ in round 1: .* Lower training.lr"),
        (MistakenOnTheServer(), r"(?s)failed in the evaluation after round 1:.*'speed'.*keep"),
    ],
)
def test_a_failure_while_models_are_made_is_reported_in_a_sentence(tmp_path, method, text):
    with pytest.raises(RaypflError, match=text):
        raypfl.run(experiment(tmp_path, rounds=1).replace(method=method))


def test_a_client_without_its_model_ends_the_run_rather_than_being_left_out_of_the_mean(tmp_path):
    skipping = experiment(tmp_path, rounds=1, failures__on_client_failure="skip", failures__retries=0)
    with pytest.raises(RaypflError, match=r"Client \d+ could not be given its model. Training diverged on client"):
        raypfl.run(skipping.replace(method=Adrift()))


class Hiccups(Shifted):
    """Raise at the first try of each group that gets its models."""

    def keep(self, clients, theta):
        if (clients.round, clients.ids) not in TRIED:
            TRIED.append((clients.round, clients.ids))
            raise OSError("a hiccup")
        super().keep(clients, theta)


TRIED: list[tuple[int, tuple[int, ...]]] = []


@pytest.mark.usefixtures("without_rehearsal")
def test_clients_that_fail_to_get_their_models_are_tried_again(tmp_path):
    TRIED.clear()
    base = experiment(tmp_path, rounds=1, **NEWCOMERS)
    retried = raypfl.run(base.replace(method=Hiccups()))
    smooth = raypfl.run(base.replace(method=Shifted()))

    assert sorted(client for _, ids in TRIED for client in ids) == list(range(12))
    assert retried.evaluations.equals(smooth.evaluations) and retried.ledger.equals(smooth.ledger)


@pytest.mark.usefixtures("without_figures")
def test_the_table_and_the_report_show_the_messages_of_prediction(tmp_path):
    base = experiment(tmp_path, rounds=2, evaluation__every=1, **NEWCOMERS)
    result = raypfl.run(base.replace(method=PeFLL(length=7)))
    plain = raypfl.run(base.replace(method=FedAvg()))

    (embed,) = pc.unique(result.ledger.filter(pc.field("name") == "embed")["numbers"]).to_pylist()
    down = 4 * (embed + result.metadata["parameters"]) / 1e3
    console = Console(record=True, width=100)
    outcome.show(console, [result, plain], {}, ["digits"], tmp_path)
    text = " ".join(console.export_text().split())

    assert text.count("takes another") == 1 and f"takes another 0.03 kB up and {down:,.2f} kB down" in text

    sent = [message for group in group_runs([result]) for message in messages(group)]
    assert [message.phase for message in sent] == ["training"] * 6 + ["prediction"] * 3
    training = sum(message.megabytes for message in sent if message.phase == "training")
    assert training == pytest.approx(sum(result.megabytes))

    pages = [report.write([run], tmp_path / "page.html").read_text() for run in (result, plain)]
    assert ["Messages of prediction give clients" in page for page in pages] == [True, False]
    assert [page.count("<small>prediction</small>") for page in pages] == [3, 0]


def test_the_messages_of_prediction_are_a_mean_over_clients_of_which_new_ones_need_more(tmp_path):
    evaluation = {"evaluation__every": 0, "evaluation__protocols": "[local, unseen]", "data__unseen_fraction": 0.25}
    base = experiment(tmp_path, rounds=1, method="pfedhn", method__adapt_rounds=3, **evaluation)
    result = raypfl.run(base)

    # Nine trained clients get a model. Three new ones also send three steps, and get a model for each.
    model = 4 * result.metadata["parameters"] / 1e3
    traffic = prediction_traffic(group_runs([result])[0])
    assert traffic == pytest.approx((3 * 3 * model / 12, (9 + 3 * 4) * model / 12))


# ------------------------------------------------------------------------------- predictors that are no vector
class Wrapped(ShiftedAlone):
    """Make the same models as predictors: the mean of a vector's outputs and those of an equal `clients.other`."""

    def personal_model(self, clients, server):
        theta = server["theta"]
        shift = per_client(torch.tensor(clients.ids) / 100)
        twin = clients.other(theta + shift[:, None])

        def mean(x, theta, shift, twin):
            return (clients.model(theta + shift, x) + twin(x)) / 2

        return Predictor(mean, theta=theta, shift=shift, twin=twin)

    unseen_model = personal_model


PROTOCOLS = ["local", "global", "unseen", "pm_l", "ood/corrupt/brightness/2"]


@both_executors
def test_a_predictor_of_the_network_scores_as_the_network(tmp_path, executor):
    changes = NEWCOMERS | {"evaluation__protocols": PROTOCOLS}
    base = experiment(tmp_path, rounds=1, engine__executor=executor, **changes)
    a = raypfl.run(base.replace(method=Wrapped())).evaluations.to_pylist()
    b = raypfl.run(base.replace(method=ShiftedAlone())).evaluations.to_pylist()

    assert [row["accuracy"] for row in a] == [row["accuracy"] for row in b]
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], rel=1e-5)
    assert {row["protocol"] for row in a} == set(PROTOCOLS)


def test_a_trained_predictor_is_used_like_any_network(tmp_path):
    result = raypfl.run(experiment(tmp_path, method="knn-per", rounds=2, evaluation__every=2))

    models = raypfl.trained_models(result.run_dir)
    data = models.outline.data
    rows = result.evaluations.filter((pc.field("protocol") == "local") & (pc.field("model") == "personal")).to_pylist()
    assert rows

    for row in rows:
        indices = data.indices(row["client"], "test")
        network = models.personal_model(row["client"])
        guesses = network(torch.from_numpy(data.inputs[indices])).argmax(1).numpy()
        assert (guesses == data.labels[indices]).mean() == pytest.approx(row["accuracy"], abs=1e-9)


@both_executors
def test_mistakes_in_a_predictor_are_reported_in_a_sentence(executor):
    fed = Federation(executor=executor, method=FedAvg())
    clients = fed.clients()
    fed.context.split = lambda client, name: np.arange(4)
    theta = clients.initial
    rows = per_client(torch.zeros(len(clients), 1, dtype=torch.float64))

    def predict(x, theta, rows):
        return clients.model(theta, x).mean(0)

    with pytest.raises(MethodError, match=r"needs extras with one row for each client.*marked so are none"):
        Predictor(predict, theta=theta)
    with pytest.raises(MethodError, match=r"marked so are \{'theta': 1, 'rows': 4\}"):
        Predictor(predict, theta=per_client(theta[None]), rows=rows)
    with pytest.raises(MethodError, match=r"predict .* returned \[3\] for 4 samples"):
        clients.evaluate(Predictor(predict, theta=theta, rows=rows), "test")
    with pytest.raises(MethodError, match=r"the function of a Predictor: Predictor\(function, memory=rows\)"):
        clients.evaluate(
            Predictor(lambda x, theta, bias: clients.model(theta, x) + rows, theta=theta, bias=rows), "test"
        )
