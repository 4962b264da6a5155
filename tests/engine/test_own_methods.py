"""What a run says of mistakes that authors of methods make on clients, on the server and in evaluations."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import raypfl
from raypfl import Each, Mean, Sum
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.common.user_warnings import user_warnings
from raypfl.engine.events import Event, RoundFinished, Warned
from tests.support.mistaken_methods import Base
from tests.support.runs import TIMED, experiment


class KeepsInAnEvaluation(Base):
    def personal_model(self, clients, server):
        server["last"] = server["theta"]


class ChangesWhatAllShare(Base):
    def personal_model(self, clients, server):
        server["theta"][:3] = 0


class StoresInAnEvaluation(Base):
    def personal_model(self, clients, server):
        clients.state["tested"] = clients.initial.repeat(len(clients), 1)


class ForgetsInAnEvaluation(Base):
    def train(self, clients, theta):
        clients.state["last"] = clients.initial.repeat(len(clients), 1)
        return super().train(clients, theta)

    def personal_model(self, clients, server):
        del clients.state["last"]


class CallsEveryoneInAnEvaluation(Base):
    def personalize(self, server, cohort):
        cohort.run_everyone(self.train, theta=server["theta"])


class ReturnsOneModel(Base):
    def personal_model(self, clients, server):
        return server["theta"]


class MisspellsTheServersState(Base):
    def personal_model(self, clients, server):
        assert "thet" not in server and server.get("thet") is None
        return server["thet"].repeat(len(clients), 1)


class ShrinksWhatIsTested(Base):
    def global_model(self, server):
        return server["theta"].mul_(0.5)


class StoresAMeanAsRows(Base):
    def start(self, task):
        return super().start(task) | {"table": torch.zeros(task.num_clients, task.model.size)}

    def round(self, server, cohort):
        super().round(server, cohort)
        server["table"] = cohort.with_rows(server["table"], server["theta"])


class LosesItsReply(Base):
    def round(self, server, cohort):
        cohort.run(self.train, theta=server["theta"])


class OnlyMeasures(LosesItsReply):
    def round(self, server, cohort):
        super().round(server, cohort)
        cohort.log(clients=float(len(cohort)))


class TrainsAlone(Base):
    def round(self, server, cohort):
        cohort.run(self.train_alone)

    def train_alone(self, clients):
        clients.state["own"] = clients.sgd(clients.loss, clients.state.get("own", default=clients.initial))


class ReturnsItsModels(Base):
    def train(self, clients, theta):
        return clients.sgd(clients.loss, theta)


class LoopsOverClients(Base):
    def train(self, clients, theta):
        return [client.loss for client in clients]


class AsksForALoader(Base):
    def train(self, clients, theta):
        return clients.dataloader


class PicksAClient(Base):
    def train(self, clients, theta):
        return clients[0].loss


class PicksOnTheServer(Base):
    def round(self, server, cohort):
        return cohort[0].loss


class AsksForTheClients(Base):
    def round(self, server, cohort):
        return [client.loss for client in cohort.clients]


class PopsItsModel(Base):
    def round(self, server, cohort):
        server.pop("theta")
        super().round(server, cohort)


class PopsWhatIsNotThere(Base):
    def round(self, server, cohort):
        server.pop("control")


class LoopsOnTheServer(Base):
    def round(self, server, cohort):
        return [client.loss for client in cohort]


class NamesNoSegment(Base):
    def train(self, clients, theta):
        clients.model.mask("head")


class StartsWithNoSegment(Base):
    def start(self, task):
        return {"theta": task.model.mask("head")}


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            KeepsInAnEvaluation,
            r"server\['last'\] cannot be set in an evaluation.*\n.*in KeepsInAnEvaluation\.p",
        ),
        (
            StoresInAnEvaluation,
            r"clients\.state\['tested'\] cannot be changed.*\n.*in StoresInAnEvaluation\.p",
        ),
        (
            ForgetsInAnEvaluation,
            r"clients\.state\['last'\] cannot be changed.*\n.*in ForgetsInAnEvaluation\.p",
        ),
        (
            CallsEveryoneInAnEvaluation,
            r"^Base\.train .* was called by cohort\.run_everyone in an evaluation",
        ),
        (
            ReturnsOneModel,
            r"^ReturnsOneModel\.personal_model .* returned \[1210\], which is one model, not one for each client; "
            r"it must return \[len\(clients\), 1210\], here \[\d, 1210\]: .* theta\.repeat\(len\(clients\), 1\)",
        ),
        (
            ChangesWhatAllShare,
            r"^ChangesWhatAllShare\.personal_model \(test_own_m.*\) changed server\[\"theta\"\] in",
        ),
        (
            MisspellsTheServersState,
            r"\n.*in MisspellsTheServersState\.p.*\n.*\n.*state has no 'thet'; did you mean 'theta'\?",
        ),
        (
            ShrinksWhatIsTested,
            r"^ShrinksWhatIsTested\.global_model \(test_own_m.*\) changed the server's 'theta' in place",
        ),
        (StoresAMeanAsRows, r"with_rows needs \[6, 1210\], a row for each .* given \[1210\].*Each.*\n.*AsRows\.round"),
        (NamesNoSegment, r"No segment of the network matches 'head'.*\n.*in NamesNoSegment\.train"),
        (ReturnsItsModels, r"^ReturnsItsModels\.train \(test_own_methods.*\) returned a tensor; it must return a dict"),
        (LoopsOverClients, r"^clients is a group .*clients\.sgd.*clients\.minibatches\(\).*\n.*in LoopsOverClients\.t"),
        (AsksForALoader, r"\n.*in AsksForALoader\.train\n.*\n.*clients has no 'dataloader';.*clients\.minibatches"),
        (LoopsOnTheServer, r"^The server has no clients to loop over: cohort\.run.*\n.*in LoopsOnTheServer\.round"),
        (PicksAClient, r"^clients is a group .*no clients\[0\]\. clients\.sgd.* clients\.ids\.\n.*in PicksAClient\.t"),
        (PicksOnTheServer, r"^The server has no clients, so there is no cohort\[0\]: cohort\.run.*\n.*OnTheServer\.r"),
        (AsksForTheClients, r"^AsksForTheClients\.round .*no 'clients', since they are not on the server: cohort\.run"),
        (PopsItsModel, r"KeyError: 'theta'\n(.*\n)*server\['theta'\] was there before: server\.pop and del remove"),
        (PopsWhatIsNotThere, r"KeyError: 'control'\n(.*\n)*The server's state has 'theta', as start returned it\."),
        (StartsWithNoSegment, r"No segment of the network matches 'head'.*\n.*in StartsWithNoSegment\.start"),
    ],
)
def test_a_mistake_is_a_sentence_with_the_authors_line_and_a_remedy(tmp_path: Path, method: type, message: str):
    with pytest.raises(RaypflError, match=message):
        raypfl.run(experiment(tmp_path, method=f"{__name__}:{method.__name__}", evaluation__every=1))


class SendsAChange(Base):
    def round(self, server, cohort):
        server["theta"] += cohort.run(self.train, theta=server["theta"])["change"]

    def train(self, clients, theta):
        return {"change": Mean(clients.sgd(clients.loss, theta) - theta)}


class SendsEachModel(Base):
    def round(self, server, cohort):
        server["theta"] = cohort.run(self.train, theta=server["theta"])["theta"].mean(0)

    def train(self, clients, theta):
        return {"theta": Each(clients.sgd(clients.loss, theta))}


@pytest.mark.parametrize("method", [KeepsInAnEvaluation, StoresInAnEvaluation, ReturnsOneModel])
def test_an_evaluation_that_would_fail_after_hours_is_refused_before_the_first_round(tmp_path: Path, method: type):
    events: list[Event] = []
    with pytest.raises(ConfigError, match=rf"in {method.__name__}\.p|{method.__name__}\.personal_model"):
        raypfl.run(experiment(tmp_path, method=f"{__name__}:{method.__name__}"), listeners=[events.append])
    assert not [event for event in events if isinstance(event, RoundFinished)]


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (SendsAChange, {"compression": "top_k"}, r"of your own, call the reply as the argument: \{\"theta\": Mean"),
        (
            SendsAChange,
            TIMED | {"asynchronous__buffer": 2},
            r"own needs one exchange .* Mean of an argument of its name after training, or Sum\(rows, counts_late=T",
        ),
        (SendsEachModel, {"aggregation": "median"}, r"A method of your own can return 'theta' as a Mean"),
    ],
)
def test_a_setting_that_does_not_suit_a_method_says_what_one_of_ones_own_would_return(
    tmp_path: Path, method: type, changes: dict, message: str
):
    with pytest.raises(RaypflError, match=message):
        raypfl.run(experiment(tmp_path, method=f"{__name__}:{method.__name__}", **changes))


class TrainsTheModelItGot(Base):
    def train(self, clients, theta):
        return {"theta": Mean(clients.sgd(lambda p, batch: clients.loss(theta, batch), theta))}


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_a_run_whose_loss_ignores_its_parameters_is_warned_of_it_once(tmp_path: Path, executor: str):
    events: list[Event] = []
    wrong = experiment(tmp_path, method=f"{__name__}:TrainsTheModelItGot", engine__executor=executor)
    raypfl.run(wrong, listeners=[events.append])
    warnings = [event.text for event in events if isinstance(event, Warned)]
    line = TrainsTheModelItGot.train.__code__.co_firstlineno + 1
    place = f"TrainsTheModelItGot.train.<lambda> (test_own_methods.py, line {line})"
    assert [text.partition(" does not depend")[0] for text in warnings] == [place]


class TrainsOnTheServerWhatItGot(Base):
    def round(self, server, cohort):
        super().round(server, cohort)
        theta = server["theta"]
        batches = cohort.pool("auxiliary").batches(16, steps=2)
        server["theta"] = cohort.sgd(lambda p, batch: cohort.task.model(theta, batch.x).sum(), theta, batches, lr=0.1)


def test_what_the_server_warns_of_is_a_warning_of_the_run(tmp_path: Path):
    events: list[Event] = []
    method = f"{__name__}:TrainsOnTheServerWhatItGot"
    raypfl.run(experiment(tmp_path, method=method, data__pools="{auxiliary: 0.3}"), listeners=[events.append])
    (warning,) = [event.text for event in events if isinstance(event, Warned)]
    assert warning.startswith("TrainsOnTheServerWhatItGot.round.<lambda> (test_own_methods.py, line ")


class WarnsInEvaluations(Base):
    def personalize(self, server, cohort):
        warnings.warn("on the server", stacklevel=1)

    def personal_model(self, clients, server):
        warnings.warn("on the clients", stacklevel=1)
        return server["theta"].repeat(len(clients), 1)


def test_what_an_evaluation_warns_of_is_a_warning_of_the_run_once(tmp_path: Path):
    events: list[Event] = []
    described = experiment(tmp_path, rounds=2, evaluation__every=1, method=f"{__name__}:WarnsInEvaluations")
    raypfl.run(described, listeners=[events.append])
    assert sorted(event.text for event in events if isinstance(event, Warned)) == ["on the clients", "on the server"]


def test_what_torch_says_of_a_function_that_vmap_does_not_know_asks_for_no_issue_on_github():
    with user_warnings() as texts:
        torch.func.vmap(lambda x: torch.nn.functional.kl_div(x, x, reduction="none"))(torch.zeros(2, 3))
    (text,) = texts
    assert text.startswith("torch.func.vmap has no rule for aten::kl_div and computes it client by client")
    assert "issue" not in text


@pytest.mark.parametrize(("method", "loses"), [(LosesItsReply, True), (OnlyMeasures, False), (TrainsAlone, False)])
def test_a_round_that_keeps_nothing_of_what_clients_did_is_warned_of_once(tmp_path: Path, method: type, loses: bool):
    events: list[Event] = []
    raypfl.run(experiment(tmp_path, rounds=3, method=f"{__name__}:{method.__name__}"), listeners=[events.append])
    warnings = [event.text for event in events if isinstance(event, Warned)]
    lost = [text for text in warnings if "Round 1 changed neither the server's state nor its clients'" in text]
    assert len(lost) == loses
    assert all("in LosesItsReply.round (test_own_methods.py, line" in text for text in lost)


class AddsModelsUp(Base):
    def train(self, clients, theta):
        return {"theta": Sum(clients.sgd(clients.loss, theta))}


class DividesTheSum(AddsModelsUp):
    def round(self, server, cohort):
        super().round(server, cohort)
        server["theta"] /= len(cohort)


@pytest.mark.parametrize(("method", "grows"), [(AddsModelsUp, True), (DividesTheSum, False), (Base, False)])
def test_a_sum_of_models_where_their_mean_was_meant_is_warned_of_in_the_first_round(
    tmp_path: Path, method: type, grows: bool
):
    events: list[Event] = []
    raypfl.run(experiment(tmp_path, rounds=1, method=f"{__name__}:{method.__name__}"), listeners=[events.append])
    warnings = [event.text for event in events if isinstance(event, Warned)]
    (finished,) = [event for event in events if isinstance(event, RoundFinished)]
    growth = f'made server["theta"] about {finished.clients} times as large'
    assert [growth in text and "return Mean" in text for text in warnings] == [True] * grows
