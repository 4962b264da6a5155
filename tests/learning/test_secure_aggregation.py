"""Masks cancel exactly in the sum, hide every client's message, and refuse methods that need more than sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from raypfl import Experiment, Mean, Sum, per_client
from raypfl.common.errors import ConfigError, PrivacyError, RaypflError
from raypfl.federation import cohort as module
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.learning.privacy import Masks, PrivacySettings, unmasked
from raypfl.learning.privacy.masks import FRACTION_BITS
from raypfl.methods import Ditto, FedAvg, FedPTR, PerAda, PFedHN, Scaffold
from tests.support.federation import CLASSES, FP32, Federation, assert_close, run_method
from tests.support.runs import experiment

SECURE = PrivacySettings(secure_aggregation=True)


def fixed(rows: Tensor) -> np.ndarray:
    return (rows.double() * 2**FRACTION_BITS).round().long().numpy().view(np.uint64)


def test_masks_cancel_exactly_in_the_sum_over_the_cohort_and_in_no_smaller_sum():
    rows = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    cohort = (1, 4, 5, 8, 9)
    masks = Masks(cohort, 0, "mask", 7)
    sent = np.stack([masks.sum_of((client,), rows[k : k + 1]) for k, client in enumerate(cohort)])

    for part in range(1, 2**5 - 1):
        chosen = [k for k in range(5) if part >> k & 1]
        assert (sent[chosen].sum(0) != fixed(rows[chosen]).sum(0)).all()

    assert (sent.sum(0) == fixed(rows).sum(0)).all()
    assert (masks.sum_of((1, 8, 9), rows[[0, 3, 4]]) == sent[[0, 3, 4]].sum(0)).all()
    assert_close(unmasked(sent.sum(0), torch.float64), rows.double().sum(0), 5 * 2.0**-FRACTION_BITS)


def test_what_is_sent_is_uniform_and_new_for_every_message_round_and_seed():
    zeros = torch.zeros(1, 4000)
    base = Masks((0, 1, 2), 0, "theta", 1)
    sent = [
        masks.sum_of((1,), zeros)
        for masks in (base, replace(base, purpose="control"), replace(base, round=2), replace(base, seed=1))
    ]
    shares = np.stack(sent) / 2.0**64

    assert abs(shares.mean(1) - 0.5).max() < 0.02 and abs(shares.var(1) - 1 / 12).max() < 0.004
    assert abs(np.corrcoef(shares) - np.eye(4)).max() < 0.07


@pytest.mark.parametrize("method", [FedAvg(), Ditto(), Scaffold(), PerAda(steps=0)], ids=lambda m: type(m).__name__)
def test_a_run_under_masks_is_the_run_without_up_to_fixed_point_and_the_same_bits_however_it_is_cut(method):
    runs = [run_method(method, privacy=SECURE, group_size=size).server["theta"] for size in (1, 2, None)]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert_close(runs[0], run_method(method).server["theta"], 1e-5)


def test_the_server_never_sees_an_unmasked_update(monkeypatch):
    seen = []

    class Watched(ReplyAggregator):
        def add(self, group, values, subtrees=None):
            seen.append((group.clients, values["theta"].array if "theta" in values else None))
            super().add(group, values, subtrees)

    monkeypatch.setattr(module, "ReplyAggregator", Watched)
    fed = Federation(method=FedAvg(weighting="uniform"), privacy=SECURE, group_size=1, training=FP32)
    fed.run_rounds(None)
    clients = fed.clients()
    updates = fixed(clients.sgd(clients.loss, fed.method.start(fed.task)["theta"]).as_subclass(Tensor))
    received = {clients[0]: array for clients, array in seen if array is not None}

    assert received.keys() == {0, 1, 2, 3}

    for client, array in received.items():
        assert array.dtype == np.uint64 and (array != updates[client]).all()
        assert (array - updates[client] > 2**40).mean() > 0.99, "a mask is small"

    assert {entry.bytes // entry.numbers for entry in fed.ledger.entries if entry.direction == "up"} == {8}


def test_a_method_that_needs_more_than_sums_is_refused():
    with pytest.raises(RaypflError, match=r"returns .step. as a row for each client.*only sums over the cohort"):
        Federation(method=PFedHN(), privacy=SECURE).run_rounds(None)


def test_peradas_server_needs_sums_only_if_clients_send_the_logits_too_which_are_then_charged():
    method = PerAda(steps=2, batch_size=4)
    secure = run_method(method, privacy=SECURE)
    plain = run_method(method)
    assert_close(secure.server["theta"], plain.server["theta"], 1e-3)
    sent = {entry.name: entry.numbers for entry in secure.ledger.entries if entry.direction == "up"}
    assert sent == {"theta": secure.model.size, "logits": 8 * CLASSES}


class Exposed(FedAvg):
    """FedAvg in which client 2 alone sends a number, in one of three ways."""

    way: str = ""

    def train(self, clients, theta):
        alone = per_client(torch.tensor([float(client == 2) for client in clients.ids]))
        ways = {"sum": Sum(5 * alone), "mean": Mean(clients.num_samples, weight=alone), "group": Sum(alone + 1)}
        reply = {"number": ways[self.way]} if self.way != "group" or 2 in clients.ids else {}
        return super().train(clients, theta) | reply


@pytest.mark.parametrize("group_size", [1, None])
@pytest.mark.parametrize("way", ["sum", "mean", "group"])
def test_a_sum_that_is_one_clients_own_message_is_refused(way, group_size):
    method = Exposed(way=way)
    messages = {
        "sum": r"returned 'number' with zeros, or a weight of zero, for all clients of the cohort but one",
        "mean": r"returned 'number' with zeros, or a weight of zero, for all clients of the cohort but one",
        "group": r"returned 'number' for 1 of the cohort's 4 clients",
    }

    if way == "group" and group_size is None:
        run_method(method, None, privacy=SECURE, group_size=None)  # there is a number of every client
        return

    with pytest.raises(PrivacyError, match=messages[way]):
        run_method(method, None, privacy=SECURE, group_size=group_size)
    run_method(method, None, group_size=group_size)


def test_fedptr_sends_sums_only_also_where_one_client_alone_matches():
    method = FedPTR(lam=0.5, per_class=1, outer_steps=2, inner_steps=3, window=1, image_lr=10.0)
    rounds = [[0, 1], [0, 2], [0, 3]]  # client 0 alone has a full window in the last one
    secure, plain = (run_method(method, *rounds, privacy=privacy) for privacy in (SECURE, PrivacySettings()))
    assert_close(secure.server["theta"], plain.server["theta"], 1e-5)
    assert plain.cohorts[-1].logged.values["matching_failed"] == 0


def test_what_masks_cannot_hide_or_hold_is_refused(tmp_path):
    fed = Federation(method=FedAvg(), privacy=SECURE)
    with pytest.raises(RaypflError, match=r"has only one client, so the sum is that client"):
        fed.run_rounds([2])
    with pytest.raises(RaypflError, match=r"3e\+09 is too large a number for privacy\.secure_aggregation: with 4"):
        Masks((0, 1, 2, 3), 0, "theta", 1).sum_of((0,), torch.full((1, 2), 3e9))
    with pytest.raises(ConfigError, match=r"the masks of a client that is skipped would not cancel"):
        Experiment().override(["privacy.secure_aggregation=true", "failures.on_client_failure=skip"])
    assert experiment(tmp_path, privacy__secure_aggregation=True).privacy == SECURE
