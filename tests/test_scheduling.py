"""The replay of measured times on simulated actors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypfl
from benchmarks.head import HERE, Answerer, at_once, experiment
from benchmarks.scheduling import JOBS, longest_first, rounds
from raypfl.clients.worker import Value


def test_the_slower_the_server_handles_replies_the_longer_actors_idle():
    fast, slow = (rounds(replace(JOBS["cnn"], reply=reply), actors=64).idle for reply in (0.0, 0.005))
    assert fast < slow


def test_no_schedule_leaves_less_idle_than_one_that_knows_all_times_and_costs_nothing():
    replayed = rounds(replace(JOBS["mlp"], reply=0.0), actors=64)
    assert replayed.idle >= replayed.bound and replayed.groups == 20


def test_a_cut_from_more_clients_has_fewer_groups():
    engine, coarse = (rounds(JOBS["cnn"], 8, largest) for largest in (None, 8))
    assert engine.groups == 333 and coarse.groups == 222


def test_longest_first_fills_the_actor_that_is_free_first():
    assert longest_first([3.0, 3.0, 2.0, 2.0, 2.0], actors=2) == 7.0


def test_the_reply_that_is_timed_is_a_mean_of_one_vector():
    (value,) = Answerer().reply(10).values.values()
    assert isinstance(value, Value) and value.kind == "mean" and value.array.shape == (10,)


def test_sleepers_run_and_say_when_they_slept(tmp_path):
    method = {"name": f"{HERE}:Sleeper"}
    result = raypfl.run(experiment(str(tmp_path), 2, rounds=1, method=method, engine={"backend": "inline"}))
    state = result.server_state()
    assert state["at_once"] == [1] and state["slept"][0] > 0.2


@pytest.mark.parametrize(
    ("times", "most"), [([[0, 1], [1, 2]], 1), ([[0, 3], [1, 2], [2, 4]], 2), ([[0, 3], [1, 3], [2, 3], [4, 5]], 3)]
)
def test_sleepers_at_a_time_are_counted(times, most):
    assert at_once(torch.tensor(times, dtype=torch.float64)) == most
