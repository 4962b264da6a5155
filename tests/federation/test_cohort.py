"""The arguments and results of ``cohort.run`` are what crosses the wire, and what the ledger counts."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from raypfl.common.errors import ClientError, Diverged, EmptyCohort, MethodError
from raypfl.common.messages import Broadcast, Each, Mean, PerClient, Scatter, Sum, per_client, unmarked
from raypfl.engine.evaluator import EvaluationCohort
from raypfl.engine.state.run_state import RunState
from raypfl.federation.ledger import LedgerEntry
from raypfl.federation.settings import FailureSettings
from raypfl.learning.privacy import PrivacySettings
from raypfl.methods import FedAvg, Method
from raypfl.runs.driver import check
from tests.support.federation import Federation, sent_per_client
from tests.support.runs import experiment

SIZES = (7, 4, 11, 7, 2)
GROUPS = [None, 1, 2, 3]


class Probe(Method):
    """Answers with whatever `answer` says."""

    answer: Callable[..., Mapping[str, Any] | None]

    def reply(self, clients, **arguments):
        return self.answer(clients, **arguments)


def federation(answer: Callable[..., Mapping[str, Any] | None], **options: Any) -> Federation:
    return Federation(sizes=SIZES, method=Probe(answer=answer), **options)


class TrainsOnTests(Probe):
    """A method that says that its rounds read test samples."""

    test_data_in_training: ClassVar[bool] = True


def exchange(fed: Federation, ids=None, **arguments: Any) -> dict[str, torch.Tensor]:
    return fed.cohort(ids).run(fed.method.reply, **arguments)


def ids_of(clients) -> torch.Tensor:
    return torch.tensor(clients.ids, dtype=torch.float64)


def rows_of(clients, width: int = 3) -> torch.Tensor:
    """Numbers that only this client has: ``[K, width]``."""
    return torch.sin(ids_of(clients)[:, None] * 10 + torch.arange(width))


ROWS = np.sin(np.arange(5)[:, None] * 10 + np.arange(3))


@pytest.mark.parametrize("group_size", GROUPS)
def test_a_mean_is_weighted_over_the_cohort_however_it_is_cut(group_size):
    fed = federation(
        lambda clients: {
            "even": Mean(rows_of(clients)),
            "by_size": Mean(rows_of(clients), weight=clients.num_samples),
            "scalar": Mean(rows_of(clients)[:, 0], weight=ids_of(clients)),
        },
        group_size=group_size,
    )
    reply = exchange(fed)

    np.testing.assert_allclose(reply["even"], ROWS.mean(0), rtol=1e-12)
    np.testing.assert_allclose(reply["by_size"], np.average(ROWS, axis=0, weights=SIZES), rtol=1e-12)
    np.testing.assert_allclose(reply["scalar"], np.average(ROWS[:, 0], weights=range(5)), rtol=1e-12)


@pytest.mark.parametrize("group_size", GROUPS)
def test_a_sum_is_over_the_cohort_however_it_is_cut(group_size):
    fed = federation(lambda clients: {"total": Sum(rows_of(clients))}, group_size=group_size)
    np.testing.assert_allclose(exchange(fed)["total"], ROWS.sum(0), rtol=1e-12)
    np.testing.assert_allclose(exchange(fed, [1, 4])["total"], ROWS[[1, 4]].sum(0), rtol=1e-12)


@pytest.mark.parametrize("group_size", GROUPS)
def test_rows_arrive_in_cohort_order_and_scattered_rows_reach_their_clients(group_size):
    def answer(clients, scattered, shared, name):
        assert isinstance(scattered, PerClient) and not isinstance(shared, PerClient)
        return {
            "rows": Each(rows_of(clients)),
            "back": Each(scattered * shared),
            "ids": Each(unmarked(ids_of(clients)).long()),
        }

    fed = federation(answer, group_size=group_size)
    for ids in (range(5), [0, 2, 3, 4]):
        scattered = torch.arange(2.0 * len(ids)).reshape(len(ids), 2)
        reply = exchange(fed, ids, scattered=Scatter(scattered), shared=torch.tensor([2.0, 3.0]), name="x")
        np.testing.assert_allclose(reply["rows"], ROWS[list(ids)], rtol=1e-12)
        assert torch.equal(reply["back"], scattered * torch.tensor([2.0, 3.0]))
        assert reply["ids"].tolist() == list(ids)
        assert not isinstance(reply["back"], PerClient) and reply["ids"].dtype == torch.int64


def test_every_message_is_counted_once_for_each_client_that_it_reaches_or_leaves():
    def answer(clients, theta, scattered, name, number):
        return {
            "mean": Mean(rows_of(clients).float(), weight=clients.num_samples),
            "total": Sum(rows_of(clients, 7)),
            "rows": Each(torch.zeros(len(clients), 2, 2, dtype=torch.int64)),
            "teacher": Mean(rows_of(clients, 50), charged=False),
            "hint": Sum(rows_of(clients, 50), charged=False),
            "score": Each(rows_of(clients, 50), charged=False),
        }

    fed = federation(answer, group_size=2)
    cohort = fed.cohort([0, 1, 3], dropped=(2,))
    for _ in range(2):
        reply = cohort.run(
            fed.method.reply,
            theta=torch.zeros(10, 2),
            scattered=Scatter(torch.zeros(3, 6, dtype=torch.float64)),
            name="x",
            number=1,
        )

    assert set(reply) == {"mean", "total", "rows", "teacher", "hint", "score"}
    expected = []
    for number, receivers in ((0, 4), (1, 3)):
        expected += [
            LedgerEntry(0, number, "down", "theta", receivers, 20, 80),
            LedgerEntry(0, number, "down", "scattered", receivers, 6, 48),
            LedgerEntry(0, number, "up", "mean", 3, 3, 12),
            LedgerEntry(0, number, "up", "total", 3, 7, 56),
            LedgerEntry(0, number, "up", "rows", 3, 4, 32),
        ]

    assert fed.ledger.entries == expected
    assert fed.ledger.total("down", round=0) == 7 * (80 + 48)
    assert fed.ledger.total("up", round=0) == 6 * (12 + 56 + 32)
    assert fed.ledger.total("up", round=1) == 0
    assert sent_per_client(fed.ledger, 0) == {
        ("down", "theta"): 40, ("down", "scattered"): 12, ("up", "mean"): 6, ("up", "total"): 14, ("up", "rows"): 8
    }  # fmt: skip

    fed.ledger.cut(3)
    assert fed.ledger.entries == expected[:3]


def test_a_cohort_of_which_everybody_drops_out_is_charged_as_its_clients_would_be():
    fed = federation(lambda clients, **arguments: {})
    with pytest.raises(EmptyCohort):
        fed.cohort([], dropped=(2, 4)).run(
            fed.method.reply,
            theta=torch.zeros(10),
            known=Broadcast(torch.zeros(50), charged=False),
            part=Broadcast(torch.zeros(50), charged=7),
            row=Scatter(torch.zeros(0, 6), charged=False),
        )
    assert fed.ledger.entries == [
        LedgerEntry(0, 0, "down", "theta", 2, 10, 40),
        LedgerEntry(0, 0, "down", "part", 2, 7, 28),
    ]


def test_what_clients_log_and_who_fails_in_an_exchange_with_everyone_is_kept():
    def answer(clients):
        if 4 in clients.ids:
            raise ClientError("Client 4 has no power.", [4], repeatable=True)
        clients.log(number=ids_of(clients))
        return {"rows": Each(rows_of(clients))}

    fed = federation(answer, group_size=1, failures=FailureSettings(on_client_failure="skip", retries=0))
    cohort = fed.cohort([0, 4])
    cohort.run_everyone(fed.method.reply)
    assert cohort.logged.values == {"number": 1.5}
    assert cohort.failed == {4: "Client 4 has no power."}
    assert cohort.present.tolist() == [True, False]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_a_mean_of_whole_numbers_keeps_weights_that_are_not_whole(dtype, masked):
    def answer(clients):
        votes = (ids_of(clients) % 2).to(dtype)[:, None]
        return {"weighted": Mean(votes, weight=0.25 + ids_of(clients)), "even": Mean(votes)}

    fed = federation(answer, group_size=2, privacy=PrivacySettings(secure_aggregation=masked))
    reply = exchange(fed)
    weights = 0.25 + np.arange(5)
    assert reply["weighted"].item() == pytest.approx(np.average([0, 1, 0, 1, 0], weights=weights))
    assert reply["even"].item() == pytest.approx(0.4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float16, torch.bfloat16])
def test_what_clients_send_in_a_small_type_is_summed_without_overflow_and_charged_as_it_is_sent(dtype):
    large = {torch.uint8: 200, torch.int16: 30_000, torch.float16: 60_000, torch.bfloat16: 60_160}[dtype]

    def answer(clients):
        rows = torch.full((len(clients), 7), large, dtype=dtype)
        return {
            "even": Mean(rows),
            "weighted": Mean(rows, weight=2049 + ids_of(clients)),
            "sum": Sum(rows),
            "each": Each(rows),
        }

    fed = federation(answer, group_size=2)
    reply = exchange(fed)
    for name, expected in (("even", large), ("weighted", large), ("sum", 5 * large), ("each", large)):
        assert reply[name].double().numpy() == pytest.approx(expected, rel=1e-6)
    assert {entry.bytes for entry in fed.ledger.entries} == {7 * dtype.itemsize}


def test_a_model_that_the_last_step_made_infinite_is_said_to_be_the_trouble_and_not_its_finite_loss():
    def answer(clients):
        return {"theta": Mean(clients.sgd(clients.loss, clients.initial, steps=1, lr=float("inf")))}

    fed = federation(answer)
    with pytest.raises(ClientError, match=r"diverged on client 0 in round 0: its model is not finite\."):
        exchange(fed)


def test_rows_that_clients_send_partly_are_counted_by_size():
    def answer(clients):
        return {"rows": Sum(rows_of(clients, 7), charged=ids_of(clients) % 3 * 2)}

    fed = federation(answer, group_size=2)
    reply = exchange(fed)
    plainly = exchange(federation(lambda clients: {"rows": Sum(rows_of(clients, 7))}, group_size=2))
    assert torch.equal(reply["rows"], plainly["rows"])

    size = fed.ledger.entries[0].bytes // fed.ledger.entries[0].numbers
    # clients 0 and 3 send nothing, 1 and 4 two numbers, 2 four
    assert fed.ledger.entries == [
        LedgerEntry(0, 0, "up", "rows", 1, 4, 4 * size),
        LedgerEntry(0, 0, "up", "rows", 2, 2, 2 * size),
    ]
    assert sent_per_client(fed.ledger, 0) == {("up", "rows"): 8 / 3}
    assert fed.ledger.total("up", 0) == 8 * size


@pytest.mark.parametrize("charged", [*map(torch.tensor, ([1, 8], [-1, 1], [1], [2.7, 1], [math.nan, 1])), 2.7])
def test_no_client_is_charged_for_more_than_a_row(charged):
    fed = federation(lambda clients: {"rows": Sum(rows_of(clients, 7), charged=charged)}, group_size=2)
    with pytest.raises(MethodError, match=r"charged of 'rows' must be a whole number from 0 to 7"):
        exchange(fed, ids=[0, 1])


def test_a_broadcast_is_charged_as_declared():
    fed = federation(lambda clients, **arguments: {"sum": Sum(sum(arguments.values()) * torch.ones(len(clients), 4))})
    four = torch.ones(4)
    rows = torch.arange(12.0).reshape(3, 4)
    cohort = fed.cohort([0, 1, 3], dropped=(2,))
    reply = cohort.run(
        fed.method.reply,
        bare=four,
        whole=Broadcast(four),
        known=Broadcast(four, charged=False),
        half=Broadcast(four, charged=2),
        theirs=Broadcast(four, charged=torch.tensor([0, 3, 1])),
        of_all=Broadcast(four, charged=torch.tensor([0, 3, 2, 1, 4])),
        nothing=Scatter(rows, charged=False),
        some=Scatter(rows, charged=torch.tensor([1, 1, 4])),
    )

    assert torch.equal(reply["sum"], 6 * 3 * four + 2 * rows.sum(0))
    down = [(e.name, e.clients, e.numbers, e.bytes) for e in fed.ledger.entries if e.direction == "down"]
    assert down == [
        ("bare", 4, 4, 16),
        ("whole", 4, 4, 16),
        ("half", 4, 2, 8),
        ("theirs", 2, 3, 12),  # one of them dropped out, and may have had as much as any
        ("theirs", 1, 1, 4),
        ("of_all", 1, 3, 12),
        ("of_all", 1, 2, 8),  # client 2, which dropped out
        ("of_all", 1, 1, 4),
        ("some", 2, 4, 16),
        ("some", 2, 1, 4),
    ]


@pytest.mark.parametrize("charged", [5, -1, torch.tensor([1, 2])])
def test_no_client_is_charged_for_more_than_was_sent_down(charged):
    fed = federation(lambda clients, theta: None)
    for message in (Broadcast(torch.zeros(4), charged), Scatter(torch.zeros(5, 4), charged)):
        with pytest.raises(MethodError, match=r"charged of 'theta' must be a whole number from 0 to 4"):
            exchange(fed, theta=message)
    assert fed.ledger.entries == []


def test_messages_without_a_reply_are_counted_too():
    fed = federation(lambda clients, theta: None)
    assert exchange(fed, theta=torch.zeros(4)) == {}
    assert fed.ledger.entries == [LedgerEntry(0, 0, "down", "theta", 5, 4, 16)]


def test_each_client_gets_back_the_state_it_left():
    def answer(clients):
        seen = clients.state.get("rounds", default=ids_of(clients).new_zeros(2))
        clients.state["rounds"] = seen + 1 + ids_of(clients)[:, None]
        if 1 in clients.ids:
            clients.state["other"] = ids_of(clients)
        return {"seen": Each(seen)}

    fed = federation(answer, group_size=2)
    for ids in ([0, 1, 2], [1, 3], [1, 2, 4]):
        cohort = fed.cohort(ids)
        reply = cohort.run(fed.method.reply)
        fed.states.commit()

    assert reply["seen"][:, 0].tolist() == [4.0, 3.0, 0.0]
    assert {c: fed.state_of(c)["rounds"][1] for c in range(5)} == {0: 1, 1: 6, 2: 6, 3: 4, 4: 5}
    assert float(fed.state_of(1)["other"]) == 1


def test_a_state_that_a_round_does_not_touch_is_kept():
    def answer(clients, name):
        clients.state[name] = rows_of(clients) + len(name)

    fed = federation(answer, group_size=2)
    for ids, name in (([1, 2, 4], "a"), ([0, 1, 2, 3, 4], "bb"), ([2, 4], "ccc")):
        exchange(fed, ids, name=name)
        fed.states.commit()

    assert [set(fed.state_of(c)) for c in range(5)] == [
        {"bb"},
        {"a", "bb"},
        {"a", "bb", "ccc"},
        {"bb"},
        {"a", "bb", "ccc"},
    ]

    for client in range(5):
        for name, row in fed.state_of(client).items():
            np.testing.assert_allclose(row, ROWS[client] + len(name), rtol=1e-12)


def test_states_of_a_round_that_is_given_up_do_not_count():
    fed = federation(lambda clients: clients.state.update(rows=rows_of(clients)))
    exchange(fed)
    assert fed.state_of(3)
    fed.states.abandon()
    assert not fed.state_of(3)


def test_a_state_that_a_client_function_deletes_is_gone():
    def answer(clients):
        if "rows" in clients.state:
            del clients.state["rows"]
            clients.state["other"] = ids_of(clients)
        else:
            clients.state["rows"] = rows_of(clients)

    fed = federation(answer)
    exchange(fed)
    exchange(fed)
    assert set(fed.state_of(0)) == {"other"}


def test_a_state_needs_a_row_for_each_client_and_a_value_before_it_is_read():
    clients = federation(lambda clients: None).clients()
    with pytest.raises(ValueError, match=r"state\['x'\] needs one row for each of the group's 5 clients"):
        clients.state["x"] = torch.zeros(4)
    with pytest.raises(KeyError, match=r"no 'x' yet; give clients\.state\.get a default"):
        clients.state["x"]
    assert clients.state.get("x") is None
    clients.state["x"] = torch.ones(5, 2)
    assert list(clients.state) == ["x"] and clients.state["x"].shape == (5, 2)


HALF = torch.zeros(5, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda fed: exchange(fed, x=HALF), "What the server sends as 'x'"),
        (lambda fed: exchange(fed, x=Scatter(HALF)), "What the server sends as 'x'"),
        (lambda fed: fed.clients().state.update(x=HALF), r"clients\.state\['x'\]"),
    ],
    ids=["broadcast", "scatter", "state"],
)
def test_a_type_that_numpy_lacks_is_refused_where_it_would_be_sent_or_stored(use, what):
    with pytest.raises(MethodError, match=rf"^{what} is of the type torch\.bfloat16, which NumPy lacks.*x\.half"):
        use(federation(lambda clients, x: None))


def test_a_servers_state_of_any_type_is_hashed_by_its_bytes():
    state = RunState(federation(lambda clients: None).runner)
    step = torch.tensor(7)
    state.server = {"half": HALF.t(), "step": step}
    assert state.weights_hash() == hashlib.sha256(b"half" + bytes(40) + b"step" + step.numpy().tobytes()).hexdigest()


def test_a_random_batch_of_a_split_that_a_client_lacks_is_refused_in_a_sentence():
    # The support's clients have no validation samples.
    sentence = r"^Client 0 has no samples in its val split\. Give .* by data\.val_fraction, such as 0\.2\.$"
    with pytest.raises(ClientError, match=sentence):
        exchange(federation(lambda clients: clients.batches(3, "some", split="val")))


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda clients: {"x": torch.zeros(5)}, "returned 'x' as a bare tensor; wrap it in Mean, Sum or Each"),
        (lambda clients: {"x": clients.num_samples}, "returned 'x' as a bare tensor; wrap"),
        (lambda clients: {"x": 1.0}, "returned 'x' as a float; wrap it"),
        (lambda clients: {"x": Mean(torch.zeros(4, 2))}, "returned 'x' of shape (4, 2), but the group has"),
        (lambda clients: {"x": Sum(torch.tensor(1.0))}, "returned 'x' of shape (), but the group has"),
        (lambda clients: {3: Sum(clients.num_samples)}, "returned a value named 3; names in a reply are text, such"),
    ],
)
def test_a_reply_without_an_aggregation_is_refused(answer, sentence):
    with pytest.raises(MethodError, match=re.escape(sentence)):
        exchange(federation(answer))


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (torch.zeros(5), "returned Mean 'x' with weights that sum to 0 over the cohort"),
        (torch.tensor([1.0, 1, -1, 1, 1]), "must be a finite, non-negative number for each of the group's 5 clients"),
        (
            torch.tensor([1.0, 1, math.nan, 1, 1]),
            "must be a finite, non-negative number for each of the group's 5 clients",
        ),
        (
            torch.tensor([1.0, 1, math.inf, 1, 1]),
            "must be a finite, non-negative number for each of the group's 5 clients",
        ),
        (torch.ones(4), "must be a finite, non-negative number for each of the group's 5 clients"),
    ],
)
def test_a_means_weights_must_be_usable(weight, sentence):
    fed = federation(lambda clients: {"x": Mean(rows_of(clients), weight=weight)})
    with pytest.raises(MethodError, match=re.escape(sentence)):
        exchange(fed)


def test_arguments_that_cannot_be_sent_are_refused_before_anything_is_counted():
    fed = federation(lambda clients, **arguments: None)
    with pytest.raises(
        MethodError, match=r"Scatter for 'scattered' has the shape \[4, 2\], but the cohort of round 0 has 5 clients"
    ):
        exchange(fed, scattered=Scatter(torch.zeros(4, 2)))
    with pytest.raises(MethodError, match=r"Scatter for 'scattered' has the shape \[\], but"):
        exchange(fed, scattered=Scatter(torch.tensor(1.0)))
    for value, kind in (
        (["a"], "list"),
        (Scatter(np.zeros((5, 2))), "Scatter of a ndarray"),  # type: ignore[arg-type]
        (Broadcast(np.zeros(2)), "Broadcast of a ndarray"),  # type: ignore[arg-type]
    ):
        with pytest.raises(MethodError, match=f"cannot send 'x', a {kind}; send tensors, bare or in a Broadcast"):
            exchange(fed, x=value)
    with pytest.raises(MethodError, match="a client function of the method, as in"):
        fed.cohort().run(lambda clients: None)
    assert fed.ledger.entries == []


@pytest.mark.parametrize("group_size", [1, None])
def test_a_broadcast_that_a_client_function_changes_in_place_is_refused(group_size):
    def answer(clients, theta):
        theta += 1

    theta = torch.zeros(3)
    with pytest.raises(MethodError, match=re.escape("changed theta in place, but all clients share it")):
        exchange(federation(answer, group_size=group_size), theta=theta)
    assert torch.equal(theta, torch.zeros(3))


@pytest.mark.parametrize("group_size", [1, None])
def test_the_initial_model_stays_although_a_client_function_changes_it_in_place(group_size):
    def answer(clients):
        start = clients.initial
        start[0] = 5
        return {"initial": Mean(clients.initial.repeat(len(clients), 1))}

    fed = federation(answer, group_size=group_size)
    before = fed.context.initial.clone()
    with pytest.raises(MethodError, match=re.escape("changed clients.initial in place, but all clients share it")):
        exchange(fed)
    assert torch.equal(fed.context.initial, before)


@pytest.mark.parametrize("group_size", [1, None])
def test_a_default_made_from_a_broadcast_is_the_groups_own(group_size):
    def answer(clients, theta):
        clients.state.get("x", default=theta)[0, 0] = 5
        return {"theta": Each(clients.state.get("x", default=theta))}

    reply = exchange(federation(answer, group_size=group_size), theta=torch.zeros(3))
    assert torch.equal(reply["theta"], torch.zeros(5, 3))


def test_rows_of_a_scatter_are_the_functions_own():
    def answer(clients, scattered):
        scattered += 1
        return {"scattered": Each(scattered)}

    rows = torch.zeros(5, 2)
    assert torch.equal(exchange(federation(answer), scattered=Scatter(rows))["scattered"], torch.ones(5, 2))
    assert torch.equal(rows, torch.zeros(5, 2))


def failing(*culprits: int) -> Callable[..., Mapping[str, Any]]:
    def answer(clients):
        for culprit in culprits:
            if culprit in clients.ids:
                raise ZeroDivisionError(f"nothing left on {culprit}")
        return {"rows": Each(rows_of(clients) + 1), "mean": Mean(rows_of(clients), weight=clients.num_samples)}

    return answer


@pytest.mark.parametrize("group_size", GROUPS)
def test_a_failing_client_is_named_with_its_round(group_size):
    fed = federation(failing(3), group_size=group_size)
    fed.round = 8
    with pytest.raises(ClientError, match=r"(?s)^Client 3 failed in round 8:.*Error: nothing left on 3"):
        exchange(fed)


@pytest.mark.parametrize("group_size", GROUPS)
def test_a_skipped_client_is_left_out_of_means_and_gets_a_row_of_zeros(group_size):
    fed = federation(failing(3), group_size=group_size, failures=FailureSettings(on_client_failure="skip", retries=1))
    cohort = fed.cohort()
    reply = cohort.run(fed.method.reply)
    survivors = [0, 1, 2, 4]

    np.testing.assert_allclose(reply["rows"][survivors], ROWS[survivors] + 1, rtol=1e-12)
    assert torch.equal(reply["rows"][3], torch.zeros(3))
    expected = np.average(ROWS[survivors], axis=0, weights=np.array(SIZES)[survivors])
    np.testing.assert_allclose(reply["mean"], expected, rtol=1e-12)
    assert cohort.present.tolist() == [True, True, True, False, True]
    assert list(cohort.failed) == [3] and "nothing left on 3" in fed.warnings[0]
    assert {e.clients for e in fed.ledger.entries} == {4}

    again = cohort.run(fed.method.reply)
    assert torch.equal(again["rows"], reply["rows"])


@pytest.mark.parametrize("group_size", GROUPS)
def test_scattered_rows_reach_their_clients_after_others_were_skipped(group_size):
    def answer(clients, scattered):
        if 1 in clients.ids:
            raise ZeroDivisionError
        clients.state["scattered"] = scattered
        return {"scattered": Each(scattered), "ids": Each(ids_of(clients))}

    fed = federation(answer, group_size=group_size, failures=FailureSettings(on_client_failure="skip", retries=0))
    cohort = fed.cohort()
    for first in (10.0, 20.0):
        scattered = first + torch.arange(5.0)
        reply = cohort.run(fed.method.reply, scattered=Scatter(scattered[:, None]))
        expected = scattered.clone()
        expected[1] = 0
        assert torch.equal(reply["scattered"][:, 0], expected)
        assert reply["ids"].tolist() == [0, 0, 2, 3, 4]

    fed.states.commit()
    assert [float(fed.state_of(c)["scattered"][0]) for c in (0, 2, 3, 4)] == [20, 22, 23, 24]
    assert not fed.state_of(1)


def test_too_many_failures_stop_the_run_even_if_failures_are_skipped():
    fed = federation(failing(1, 3, 4), failures=FailureSettings(on_client_failure="skip", retries=0))
    with pytest.raises(ClientError, match=r"Only 2 of 5 clients of round 0 succeeded.*min_success_fraction = 0\.5"):
        exchange(fed)


@pytest.mark.parametrize(("culprit", "kind"), [(0, Diverged), (3, ClientError)])
def test_too_many_failures_are_a_divergence_if_all_of_the_clients_diverged(culprit, kind):
    def answer(clients):
        diverged = [client for client in clients.ids if client != culprit or kind is Diverged]
        if diverged:
            raise Diverged("The loss is not finite.", diverged[:1], repeatable=True)
        raise OSError("a hiccup")

    skip = FailureSettings(on_client_failure="skip", retries=0, min_success_fraction=0.1)
    fed = federation(answer, group_size=1, failures=skip)
    with pytest.raises(ClientError, match="Only 0 of 5 clients of round 0 succeeded") as caught:
        exchange(fed)
    assert type(caught.value) is kind


def test_retrying_a_passing_failure_gives_the_same_result():
    tries = []

    def answer(clients):
        tries.append(clients.ids)
        if len(tries) < 3:
            raise OSError("a hiccup")
        return failing()(clients)

    fed = federation(answer, failures=FailureSettings(retries=2))
    np.testing.assert_allclose(exchange(fed)["rows"], ROWS + 1, rtol=1e-12)
    assert len(tries) == 3


@pytest.mark.parametrize("arguments", [{}, {"scattered": Scatter(torch.zeros(0, 4))}])
def test_an_empty_cohort_is_an_error_that_says_so(arguments):
    fed = federation(lambda clients, **arguments: None)
    with pytest.raises(EmptyCohort, match="No client is left in the cohort of round 0"):
        fed.cohort([], dropped=(2,)).run(fed.method.reply, **arguments)
    assert [(e.clients, e.bytes) for e in fed.ledger.entries] == [(1, 16)] * len(arguments)


def test_the_warnings_of_client_functions_reach_the_server():
    def answer(clients):
        warnings.warn("slow today", stacklevel=1)

    fed = federation(answer)
    exchange(fed)
    assert fed.warnings == ["slow today"]


def test_training_losses_are_recorded_by_client():
    def answer(clients):
        clients.sgd(
            lambda p, batch, by: clients.loss(p, batch) * 0 + by, clients.initial, by=per_client(ids_of(clients))
        )

    fed = federation(answer, group_size=2, failures=replace(FailureSettings(), retries=0))
    cohort = fed.cohort([0, 2, 3])
    cohort.run(fed.method.reply)
    assert cohort.losses == pytest.approx({0: 0.0, 2: 2.0, 3: 3.0})


READS_TEST = {
    "evaluate": lambda clients: clients.evaluate(clients.initial, "test"),
    "batches": lambda clients: clients.batches(3, "some", split="test"),
    "label_counts": lambda clients: clients.label_counts("test"),
    "class_means": lambda clients: clients.class_means(lambda p, x: x.flatten(1), clients.initial, split="test"),
}


@pytest.mark.parametrize("name", READS_TEST)
def test_training_reads_test_samples_only_if_the_method_declares_it_and_evaluation_always_may(name):
    seen = []

    def answer(clients):
        seen.append(READS_TEST[name](clients))

    fed = federation(answer)
    fed.context.split = lambda client, split: fed.split[client]
    with pytest.raises(MethodError, match=r"'reply' asks for clients' test samples in training, so evaluating"):
        exchange(fed)
    assert not seen

    EvaluationCohort(fed.runner, range(5), 1, 0.1, unseen=False).run(fed.method.reply)
    declared = Federation(sizes=SIZES, method=TrainsOnTests(answer=answer))
    declared.context.split = lambda client, split: declared.split[client]
    exchange(declared)

    assert len(seen) == 2


def test_an_evaluation_by_a_method_must_name_its_split():
    with pytest.raises(Exception, match=r"missing 1 required positional argument: 'split'"):
        exchange(federation(lambda clients: clients.evaluate(clients.initial)))


class AveragesOnTests(FedAvg):
    """FedAvg that says that its rounds read test samples."""

    test_data_in_training: ClassVar[bool] = True


def test_a_run_warns_that_its_method_trains_on_what_it_is_tested_on(tmp_path):
    with pytest.warns(UserWarning, match="AveragesOnTests declares test_data_in_training: its rounds may read"):
        check([experiment(tmp_path, method="tests.federation.test_cohort:AveragesOnTests")])
