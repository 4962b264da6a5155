"""How a cohort is drawn and cut into groups."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypfl.devices import Availability, ClientTurns, Holdings
from raypfl.devices.availability_models import UniformChances
from raypfl.federation.cohort_draw import draw_cohort
from raypfl.federation.exchange.grouping import cut_into_groups, evaluation_group_sizes, even_sizes, group_sizes
from raypfl.federation.settings import CohortSettings


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=80),
    st.integers(1, 20),
    st.sampled_from(["vectorised", "sequential"]),
)
def test_every_client_is_in_exactly_one_group_and_the_costliest_group_comes_first(costs, count, executor):
    costs = np.array(costs, dtype=float)
    sizes = even_sizes(len(costs), count)
    groups = cut_into_groups(costs, sizes, executor)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(costs)))
    totals = [costs[g].sum() for g in groups]
    assert totals == sorted(totals, reverse=True) and sorted(map(len, groups)) == sorted(sizes)


def test_equal_sequential_groups_cost_about_the_same_and_vectorised_ones_hold_clients_of_similar_cost():
    costs = np.random.default_rng(0).lognormal(3, 1, 64)
    dealt = [costs[g].sum() for g in cut_into_groups(costs, even_sizes(64, 8), "sequential")]
    assert max(dealt) < 1.6 * np.mean(dealt)
    for group in cut_into_groups(costs, even_sizes(64, 4), "vectorised"):
        inside = (costs >= costs[group].min()) & (costs <= costs[group].max())
        assert inside.sum() == len(group)


@given(st.integers(1, 2000), st.sampled_from(["vectorised", "sequential"]))
def test_groups_cover_the_cohort_and_stay_within_their_size(cohort, executor):
    sizes = group_sizes(cohort, executor)
    assert sum(sizes) == cohort and min(sizes) >= 1
    assert max(sizes) <= (6 if executor == "sequential" else 75)
    if executor == "sequential":
        assert len(sizes) >= min(cohort, 6)


def test_sequential_groups_shrink_so_that_any_number_of_actors_ends_together():
    sizes = group_sizes(1000, "sequential")
    assert sizes[0] == 5 and sizes[-1] == 1
    costs = np.random.default_rng(0).lognormal(3, 0.5, 1000)
    groups = cut_into_groups(costs, sizes, "sequential")

    for actors in (2, 3, 7, 16, 50):
        busy = np.zeros(actors)
        for group in groups:
            busy[busy.argmin()] += costs[group].sum()
        assert busy.max() < 1.05 * busy.mean()


@pytest.mark.parametrize(("cohort", "groups"), [(1, 1), (20, 1), (50, 1), (100, 2), (1000, 20)])
def test_the_number_of_vectorised_groups_follows_from_the_cohort(cohort, groups):
    assert len(group_sizes(cohort, "vectorised")) == groups


def chances(low: float, high: float) -> Availability:
    """Clients that can be reached with chances between these, drawn anew in each round."""
    holdings = Holdings(seed=0, num_samples=np.zeros(0, np.int64), labels_held=lambda: np.zeros((0, 0), bool))
    return UniformChances(low=low, high=high).availability(holdings, unit=1.0)


def test_cohorts_are_drawn_without_replacement_uniformly_and_by_seed():
    settings = CohortSettings(size=8)
    cohorts = [draw_cohort(settings, 40, 0, r).clients for r in range(400)]
    assert all(len(set(cohort)) == 8 and list(cohort) == sorted(cohort) for cohort in cohorts)
    shares = np.bincount(np.concatenate(cohorts), minlength=40) / 400
    assert abs(shares.mean() - 0.2) < 1e-9 and shares.min() > 0.12 and shares.max() < 0.28
    assert cohorts[:5] == [draw_cohort(settings, 40, 0, r).clients for r in range(5)]
    assert cohorts[:5] != [draw_cohort(settings, 40, 1, r).clients for r in range(5)]


def test_a_fraction_of_the_clients_is_drawn_if_no_size_is_given():
    assert len(draw_cohort(CohortSettings(fraction=0.25), 40, 0, 0).clients) == 10
    assert len(draw_cohort(CohortSettings(fraction=1e-9), 40, 0, 0).clients) == 1
    assert len(draw_cohort(CohortSettings(fraction=0.1), 25, 0, 0).clients) == 3
    assert len(draw_cohort(CohortSettings(fraction=0.1), 30, 0, 0).clients) == 3


def test_a_cohort_is_uniform_over_reachable_clients_and_takes_all_of_them_if_they_are_few():
    some = ClientTurns(availability=chances(0.3, 0.3))
    cohorts = [draw_cohort(CohortSettings(size=10), 40, 0, r, some).clients for r in range(600)]
    assert {len(cohort) for cohort in cohorts} <= set(range(11)) and sum(len(cohort) == 10 for cohort in cohorts) > 300
    shares = np.bincount(np.concatenate(cohorts), minlength=40) / 600
    assert shares.min() > 0.16 and shares.max() < 0.29  # 0.22 in the mean
    everybody = draw_cohort(CohortSettings(size=40), 40, 0, 0, ClientTurns(availability=chances(1.0, 1.0)))
    assert everybody.clients == tuple(range(40))


def test_clients_drop_out_with_the_set_chance():
    draws = [draw_cohort(CohortSettings(size=20), 40, 0, r, ClientTurns(dropout=0.3)) for r in range(200)]
    assert all(
        len(cohort.clients) + len(cohort.dropped) == 20 and not set(cohort.clients) & set(cohort.dropped)
        for cohort in draws
    )
    assert abs(sum(len(cohort.dropped) for cohort in draws) / 4000 - 0.3) < 0.03


def test_a_draw_from_a_billion_clients_takes_memory_for_the_cohort_only():
    tracemalloc.start()
    turns = ClientTurns(availability=chances(0.2, 0.9), dropout=0.1)
    cohort = draw_cohort(CohortSettings(size=1000), 10**9, 0, 0, turns)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(cohort.clients) + len(cohort.dropped) == 1000 and peak < 2e6


def test_vectorised_groups_are_larger_in_evaluation_if_there_are_enough_clients():
    assert evaluation_group_sizes(1000, "vectorised") == [100] * 10
    assert evaluation_group_sizes(100, "vectorised") == group_sizes(100, "vectorised")
    assert len(evaluation_group_sizes(400, "vectorised")) == 8

    for count in (1, 7, 950, 2345):
        assert (
            sum(evaluation_group_sizes(count, "vectorised"))
            == sum(evaluation_group_sizes(count, "sequential"))
            == count
        )

    assert evaluation_group_sizes(300, "sequential") == group_sizes(300, "sequential")
