"""The replay of measured times on simulated actors."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.head import Answerer
from benchmarks.scheduling import JOBS, idle, longest_first
from raypfl.federation.work import Value


def test_the_slower_the_server_handles_replies_the_longer_actors_idle():
    fast, slow = (idle(replace(JOBS["cnn"], reply=reply), actors=64)[0] for reply in (0.0, 0.005))
    assert fast < slow


def test_no_schedule_leaves_less_idle_than_one_that_knows_all_times_and_costs_nothing():
    share, bound, groups = idle(replace(JOBS["mlp"], reply=0.0), actors=64)
    assert share >= bound and groups == 20


def test_longest_first_fills_the_actor_that_is_free_first():
    assert longest_first([3.0, 3.0, 2.0, 2.0, 2.0], actors=2) == 7.0


def test_the_reply_that_is_timed_is_a_mean_of_one_vector():
    (value,) = Answerer().reply(10).values.values()
    assert isinstance(value, Value) and value.kind == "mean" and value.array.shape == (10,)
