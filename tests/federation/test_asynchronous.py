"""Asynchronous rounds: what a late reply counts, and that clients which train at once get what they would alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raypfl.clients.replies.turns import Turns, values_by_round
from raypfl.common.errors import MethodError
from raypfl.common.messages import Each, Mean, Scatter, Sum
from raypfl.engine.backends.inline import Inline
from raypfl.federation.asynchronous.batches import groups_that_fit
from raypfl.federation.asynchronous.rounds import AsynchronousRounds
from raypfl.federation.asynchronous.schedule import Schedule, ScheduledClients, make_schedule
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.methods import METHODS, FedAvg, Method
from tests.support.federation import Federation

SIZES = (7, 4, 11, 7, 2, 9, 5, 8)
SECONDS = np.array([1.0, 2.3, 0.7, 3.1, 1.9, 0.4, 5.2, 1.1])


def rounds_of(
    federation: Federation, settings: AsynchronousSettings, schedule: Schedule, together: bool = False
) -> AsynchronousRounds:
    clients = np.arange(len(federation.sizes))
    method = federation.method
    assert method is not None and settings.buffer is not None
    return AsynchronousRounds(settings, schedule, clients, method, federation.runner, lambda round: 0.1, together)


def run(federation: Federation, rounds: AsynchronousRounds, first: int = 1, last: int | None = None) -> list[Any]:
    """Run rounds as the server does; return the server's model after each."""
    method = federation.method
    federation.server = federation.server or method.start(federation.task)
    models = []
    for number in range(first, (last or rounds.schedule.num_rounds) + 1):
        cohort = rounds.cohort(number, federation.server, {})
        method.round(federation.server, cohort)
        federation.cohorts.append(cohort)
        rounds.commit(number)
        federation.states.commit()
        model = method.global_model(federation.server)
        models.append(None if model is None else model.clone())
    return models


def run_asynchronous(method: Method, settings: AsynchronousSettings, together: bool = False) -> Federation:
    federation = Federation(sizes=SIZES, method=method)
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 8, federation.seed, settings.buffer)
    run(federation, rounds_of(federation, settings, schedule, together))
    return federation


class Counter(Method):
    """The server's model is a number, to which each client adds 1."""

    def start(self, task):
        return {"x": torch.zeros(1, dtype=torch.float64)}

    def round(self, server, cohort):
        server["x"] = cohort.run(self.add, x=server["x"])["x"]

    def add(self, clients, x):
        return {"x": Mean((x + 1).expand(len(clients), 1))}

    def global_model(self, server):
        return server["x"]


class CountsItself(Counter):
    """A counter whose clients also send their numbers, under the name of an argument."""

    def round(self, server, cohort):
        reply = cohort.run(self.add, x=server["x"], ids=torch.zeros(1))
        server["x"] = reply["x"]
        server.setdefault("sums", []).append(reply["ids"])

    def add(self, clients, x, ids):
        numbers = torch.tensor(clients.ids, dtype=torch.float64)[:, None]
        return super().add(clients, x) | {"ids": Sum(numbers, counts_late=True)}


def schedule_of(rounds: list[int], joins: list[int], num_rounds: int) -> Schedule:
    """Return a schedule in which client i has turn i."""
    turns = np.arange(len(rounds))
    joins_of_turn = np.array(joins)
    replies = turns[joins_of_turn > 0][np.argsort(joins_of_turn[joins_of_turn > 0], kind="stable")]
    return Schedule(
        clients=turns,
        rounds=np.array(rounds),
        joins=joins_of_turn,
        drops=np.zeros(len(rounds), bool),
        begins=np.zeros(len(rounds)),
        ends=joins_of_turn.astype(float),
        replies=replies,
        round_ends=np.arange(1.0, num_rounds + 1),
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # FedBuff: two fresh replies, then one that is late by a model together with a fresh one.
        ({}, 1 + (2**-0.5 + 1) / 2),
        ({"staleness": "constant"}, 2.0),
        # FedAsync: x <- (1 - alpha s) x + alpha s y. All are met at once where several make a model.
        ({"mixing": 0.6}, 0.6 + 0.6 * ((2**-0.5 * (1 - 0.6)) + 1) / 2),
    ],
)
def test_a_late_reply_counts_as_in_the_papers(settings, expected):
    federation = Federation(sizes=SIZES, method=Counter())
    schedule = schedule_of(rounds=[1, 1, 1, 2], joins=[1, 1, 2, 2], num_rounds=2)
    models = run(federation, rounds_of(federation, AsynchronousSettings(buffer=2, **settings), schedule))
    assert models[1].item() == pytest.approx(expected, rel=1e-12)


class FirstCounts(Counter):
    """A counter to which client 0 alone adds."""

    def round(self, server, cohort):
        server["x"] = cohort.run(self.add, x=server["x"]).get("x", server["x"])

    def add(self, clients, x):
        weight = (torch.tensor(clients.ids) == 0).double()
        return {"x": Mean((x + 1).expand(len(clients), 1), weight, can_be_empty=True)}


@pytest.mark.parametrize(("mixing", "expected"), [(None, 1.0), (0.6, 0.6)])
def test_a_mean_that_can_be_empty_may_be_so_in_a_round_of_mixed_models_too(mixing, expected):
    federation = Federation(sizes=SIZES, method=FirstCounts())
    schedule = schedule_of(rounds=[1, 1, 2, 2], joins=[1, 1, 2, 2], num_rounds=2)
    models = run(federation, rounds_of(federation, AsynchronousSettings(buffer=2, mixing=mixing), schedule))
    assert [model.item() for model in models] == pytest.approx([expected] * 2)


@pytest.mark.parametrize("mixing", [None, 0.6])
@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
def test_a_sum_that_counts_late_is_of_whole_replies_whatever_their_staleness(together, mixing):
    federation = run_asynchronous(CountsItself(), AsynchronousSettings(buffer=2, mixing=mixing), together)
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 8, federation.seed, 2)
    assert schedule.staleness.max() >= 2
    sums = [schedule.clients[schedule.joining(number, number)].sum() for number in range(1, 9)]
    assert [total.item() for total in federation.server["sums"]] == sums


@pytest.mark.parametrize(
    ("method", "of_server", "of_client", "settings"),
    [
        ("scaffold", "c", "c", AsynchronousSettings(buffer=2)),
        ("scaffold", "c", "c", AsynchronousSettings(buffer=2, mixing=0.6)),
        ("feddyn", "h", "linear", AsynchronousSettings(buffer=2, staleness="constant")),
    ],
)
def test_the_servers_term_stays_the_mean_of_its_clients_terms(method, of_server, of_client, settings):
    federation = run_asynchronous(METHODS.get(method)(), settings)
    mean = torch.zeros_like(federation.server[of_server])
    for client in range(len(SIZES)):
        state = federation.state_of(client)
        if state:
            mean += torch.from_numpy(np.array(state[of_client])) / len(SIZES)
    assert mean.norm() > 0
    torch.testing.assert_close(federation.server[of_server], mean, rtol=1e-9, atol=1e-12)


class Trainer(FedAvg):
    """FedAvg that keeps a personal model, trains in groups of one model each, and logs."""

    def train(self, clients, theta):
        clients.log(size=clients.num_samples)
        clients.state["theta"] = clients.sgd(clients.loss, theta)
        return {"theta": Mean(clients.state["theta"], weight=clients.weights(self.weighting))}


@pytest.mark.parametrize("together", [True, False], ids=["together", "apart"])
@pytest.mark.parametrize("mixing", [None, 0.6])
def test_models_are_those_of_a_server_that_trains_one_client_at_a_time(mixing, together):
    """The reference dispatches and trains each client by itself, at the moment at which its turn begins."""
    settings = AsynchronousSettings(buffer=2, mixing=mixing)
    federation = run_asynchronous(Trainer(server_lr=0.5), settings, together)
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 8, federation.seed, 2)

    alone = Federation(sizes=SIZES, method=Trainer())
    theta = alone.model.init(alone.seed)
    trained: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for number in range(1, 9):
        for turn in schedule.sent_in(number):
            group = alone.clients([int(schedule.clients[turn])], round=number)
            trained[int(turn)] = (theta, group.sgd(group.loss, theta)[0])

        turns = schedule.joining(number, number)
        weights = np.array([SIZES[schedule.clients[turn]] for turn in turns], dtype=float)
        weights /= weights.sum()
        step = torch.zeros_like(theta)
        for turn, weight in zip(turns, weights, strict=True):
            sent, reply = trained[int(turn)]
            tau = number - schedule.rounds[turn]
            if mixing is None:
                step += weight * (1 + tau) ** -0.5 * (reply - sent)
            else:
                step += weight * mixing * (1 + tau) ** -0.5 * (reply - theta)
        theta = theta + 0.5 * step

    assert schedule.staleness.max() >= 2
    torch.testing.assert_close(federation.server["theta"], theta, rtol=1e-9, atol=1e-12)

    logged = federation.cohorts[-1].logged.values["size"]
    sizes = [SIZES[schedule.clients[turn]] for turn in schedule.joining(8, 8)]
    assert logged == pytest.approx(np.mean(sizes))
    assert set(federation.cohorts[-1].losses) == {int(schedule.clients[turn]) for turn in schedule.joining(8, 8)}


class ThreeActors(Inline):
    """A backend that says that three groups run at a time, and runs the last first."""

    num_actors = 3

    def run(self, call, groups):
        self.exchanges = [*getattr(self, "exchanges", []), [group.clients for group in groups]]
        return super().run(call, list(reversed(groups)))


@pytest.mark.parametrize("mixing", [None, 0.6])
def test_some_clients_train_before_they_are_needed_if_actors_would_wait_and_no_bit_depends_on_it(mixing):
    settings = AsynchronousSettings(buffer=3, mixing=mixing)
    federations = []
    for backend in (Inline, ThreeActors):
        federation = Federation(sizes=SIZES, method=Trainer(), executor="sequential", group_size=1, backend=backend)
        schedule = make_schedule(ScheduledClients(SECONDS, 5), 8, federation.seed, settings.buffer)
        run(federation, rounds_of(federation, settings, schedule))
        federations.append(federation)
    inline, three = federations

    # Of a round's three groups, some have trained in the exchange of an earlier round.
    trained = [len(groups) for groups in three.runner.backend.exchanges]
    trained += [0] * (schedule.num_rounds - len(trained))  # a round all of whose groups have trained has no exchange
    assert sum(trained) == 3 * schedule.num_rounds and max(trained) > 3 and min(trained) < 3
    assert torch.equal(three.server["theta"], inline.server["theta"])
    for client in range(len(SIZES)):
        assert [*three.state_of(client)] == [*inline.state_of(client)]
        for name, array in inline.state_of(client).items():
            np.testing.assert_array_equal(three.state_of(client)[name], array)
    assert [cohort.losses for cohort in three.cohorts] == [cohort.losses for cohort in inline.cohorts]
    assert [cohort.logged.values for cohort in three.cohorts] == [cohort.logged.values for cohort in inline.cohorts]


@pytest.mark.parametrize(
    ("required", "further", "actors", "places"),
    [
        ([4.0, 4.0], [1.0, 1.0], 2, []),
        ([4.0], [3.0, 2.0, 1.0], 2, [0, 2]),
        ([4.0, 1.0], [5.0, 3.3, 3.0], 2, [1]),
        ([2.0, 2.0], [1.0] * 9, 4, [0, 1, 2, 3]),
        ([2.0, 2.0], [1.0], 1, []),
    ],
)
def test_actors_take_what_they_can_finish_while_others_are_busy(required, further, actors, places):
    assert groups_that_fit(required, further, actors) == places


TOGETHER = "apfl ditto fedavg fedbabu feddyn fednh fedper fedprox fedproto fedrod local moon per-fedavg pfedme scaffold"


@pytest.mark.parametrize("name", TOGETHER.split())
def test_clients_that_were_sent_several_models_train_together_as_apart(name):
    settings = AsynchronousSettings(buffer=2)
    together = run_asynchronous(METHODS.get(name)(), settings, together=True)
    apart = run_asynchronous(METHODS.get(name)(), settings)

    torch.testing.assert_close(together.server, apart.server, rtol=1e-9, atol=1e-11)
    for client in range(len(SIZES)):
        state = apart.state_of(client)
        assert together.state_of(client).keys() == state.keys()
        for entry in state:
            np.testing.assert_allclose(together.state_of(client)[entry], state[entry], rtol=1e-8, atol=1e-10)


def test_a_state_is_the_clients_own_only_when_its_reply_is_met():
    federation = Federation(sizes=SIZES, method=Trainer())
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 6, federation.seed, 2)
    rounds = rounds_of(federation, AsynchronousSettings(buffer=2), schedule)
    seen: set[int] = set()
    was_ahead = False
    for number in range(1, 7):
        run(federation, rounds, number, number)
        seen |= set(schedule.clients[schedule.joining(number, number)].tolist())
        was_ahead |= len(rounds.held_states()) > 0
        assert {client for client in range(8) if federation.state_of(client)} == seen
    assert was_ahead


def test_a_round_that_is_given_up_leaves_its_replies_and_states_to_a_checkpoint():
    federation = Federation(sizes=SIZES, method=Trainer(), executor="vectorised")
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 6, federation.seed, 2)
    rounds = rounds_of(federation, AsynchronousSettings(buffer=2), schedule)
    run(federation, rounds, 1, 2)
    # The clients of round 3 have trained with those of round 2.
    replies = rounds.saved(2)["replies"]
    assert [*replies] == [3] and len(rounds.held_states()) == 2

    rounds.cohort(3, federation.server, {})
    federation.states.abandon()
    assert rounds.saved(2)["replies"] == replies and len(rounds.held_states()) == 2

    run(federation, rounds, 3, 3)
    assert not rounds.saved(3)["replies"] and not len(rounds.held_states())
    assert all(federation.state_of(client) for client in replies[3]["clients"])


def test_messages_are_charged_in_the_rounds_in_which_they_are_sent():
    federation = run_asynchronous(FedAvg(), AsynchronousSettings(buffer=2))
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 8, federation.seed, 2)
    clients = {"down": np.zeros(9, int), "up": np.zeros(9, int)}
    for entry in federation.ledger.entries:
        assert entry.numbers == federation.model.size and entry.name == "theta"
        clients[entry.direction][entry.round] += entry.clients
    np.testing.assert_array_equal(clients["down"], np.bincount(schedule.rounds, minlength=9))
    np.testing.assert_array_equal(clients["up"][1:], 2)


class Unmet(Method):
    """A method whose late replies cannot be used."""

    kind: str = "other name"

    def start(self, task):
        return {"x": torch.zeros(1)}

    def round(self, server, cohort):
        if self.kind == "no exchange":
            return
        x = Scatter(torch.zeros(len(cohort), 1)) if self.kind == "rows" else server["x"]
        cohort.run(self.reply, x=x)
        if self.kind == "two exchanges":
            cohort.run(self.reply, x=x)
        if self.kind == "everyone":
            cohort.run_everyone(self.reply, x=x)

    def reply(self, clients, x):
        rows = torch.zeros(len(clients), 1)
        if self.kind == "other name":
            return {"y": Mean(rows)}
        if self.kind == "sum":
            return {"x": Sum(rows)}
        return {"x": Each(rows) if self.kind == "each" else Mean(rows)}


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("other name", "returns 'y', which is not the mean of an argument of that name"),
        ("sum", "returns 'x', which is not the mean of an argument"),
        ("each", "returns 'x', which is not the mean of an argument"),
        ("two exchanges", "more than one exchange"),
        ("everyone", r"by cohort\.run_everyone, but in an asynchronous run, some clients are still at work"),
        ("rows", "gets 'x' as a Scatter"),
        ("no exchange", "returned without calling cohort.run"),
    ],
)
def test_a_method_whose_late_replies_mean_nothing_is_refused(kind, problem):
    federation = Federation(sizes=SIZES, method=Unmet(kind=kind))
    schedule = make_schedule(ScheduledClients(SECONDS, 4), 2, 0, 2)
    with pytest.raises(MethodError, match=problem):
        run(federation, rounds_of(federation, AsynchronousSettings(buffer=2), schedule))


class AsksForRound(Trainer):
    """A method whose clients ask for the round."""

    def train(self, clients, theta):
        clients.log(round=torch.full((len(clients),), float(clients.round)))
        return super().train(clients, theta)


def test_a_round_that_differs_between_clients_is_no_number():
    with pytest.raises(MethodError, match=r"clients\.round is not one number"):
        run_asynchronous(AsksForRound(), AsynchronousSettings(buffer=2), together=True)
    run_asynchronous(AsksForRound(), AsynchronousSettings(buffer=2))


@pytest.mark.parametrize("mixes_models", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32])
def test_late_means_of_any_type_keep_their_shares_and_are_charged_as_they_are_sent(dtype, mixes_models):
    turns = Turns(
        np.array([1, 2]), np.array([3, 3]), np.array([0.5, 0.25]), np.array([False, False]), 0.1, mixes_models
    )
    rows = torch.tensor([[14, 20], [12, 28]], dtype=dtype)
    received = torch.tensor([10, 20], dtype=dtype)
    value = values_by_round("reply", {"counts": Mean(rows)}, {"counts": received}, turns)["3 counts"]

    moved = rows.double() - (0 if mixes_models else received.double())
    assert value.array.tolist() == (0.5 * moved[0] + 0.25 * moved[1]).tolist()
    assert value.num_bytes.tolist() == [2 * dtype.itemsize] * 2
