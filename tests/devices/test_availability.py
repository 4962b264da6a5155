"""Availability: spans and draws against loops over them, and FLGo's models against their formulas."""

from __future__ import annotations

import numpy as np
import pytest

from raypfl.common.errors import ConfigError
from raypfl.devices.availability import Always, Chances, Spans
from raypfl.devices.availability_models import AVAILABILITY_MODELS, Holdings
from tests.support.tiers import with_quick

HELD = np.array([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1]], dtype=bool)
HOLDINGS = Holdings(seed=0, num_samples=np.array([4, 16, 100]), labels_held=lambda: HELD)


def random_spans(seed: int) -> tuple[Spans, list[tuple[int, float, float]], np.ndarray]:
    """Spans of six clients, of which the last has none, and those that wrap around the period."""
    generator = np.random.default_rng(seed)
    periods = generator.uniform(50, 100, 6)
    spans = []
    for client in range(5):
        edges = np.sort(generator.uniform(0, periods[client], 2 * client + 2))
        spans += [(client, *pair) for pair in edges[2:].reshape(-1, 2)]
        spans.append((client, edges[-1] + 1e-3, periods[client] + edges[0])) if client else None
    clients, starts, ends = (np.array(column) for column in zip(*spans, strict=True))
    keep = (starts < periods[clients]) & (ends <= starts + periods[clients]) & (ends - starts > 1e-3)
    spans = [span for span, kept in zip(spans, keep, strict=True) if kept]
    return Spans(clients[keep], starts[keep], ends[keep], periods, 6), spans, periods


@pytest.mark.parametrize("seed", range(3))
def test_spans_answer_as_a_loop_over_all_spans_does_when_time_jumps_back_and_forth(seed):
    spans, listed, periods = random_spans(seed)
    times = np.random.default_rng(seed).uniform(0, 1000, 300)
    for time in times:
        expected = [
            any(
                start <= time % periods[client] + shift < end
                for owner, start, end in listed
                for shift in (0, periods[client])
                if owner == client
            )
            for client in range(6)
        ]
        assert spans.is_available(np.arange(6), time).tolist() == expected
        assert [spans.is_one_available(client, time) for client in range(6)] == expected


def test_an_answer_does_not_depend_on_what_was_asked_before():
    spans = Spans(np.zeros(4, int), np.array([0.0, 10, 20, 30]), np.array([5.0, 15, 25, 35]), 40.0, 1)
    answers = [bool(spans.is_available(np.array([0]), 32.0)[0]) for _ in range(3)]
    assert answers == [True, True, True]


def test_the_next_span_begins_where_the_loop_finds_it_and_a_client_without_spans_is_never_available():
    spans, listed, periods = random_spans(1)
    for time in np.random.default_rng(5).uniform(0, 1000, 200):
        following = spans.next_available(np.arange(6), time)
        assert np.isinf(following[5]) or any(owner == 5 for owner, _, _ in listed)
        for client in range(6):
            starts = [
                start + k * periods[client]
                for owner, start, _ in listed
                for k in range(int(time // periods[client]) - 1, int(time // periods[client]) + 3)
                if owner == client
            ]
            if spans.is_available(np.array([client]), time)[0]:
                assert following[client] == time
            elif starts:
                expected = min(start for start in starts if start >= time - 1e-9)
                assert following[client] == pytest.approx(expected, abs=1e-6)


def test_a_next_span_that_rounds_to_just_before_its_start_does_not_loop():
    # 0.1 is not a number of the machine: times mod the period end a little before a span's start.
    generator = np.random.default_rng(0)
    starts = generator.uniform(0.01, 0.05, 1000)
    clients = np.arange(1000)
    spans = Spans(clients, starts, starts + 0.01, np.full(1000, 0.1) + generator.uniform(0, 0.01, 1000), 1000)
    for time in (*generator.uniform(0, 1e7, 50), 0.0, 1e9):
        following = spans.next_available(clients, time)
        assert (following >= time).all()
        assert spans.is_available(clients, following).all()
        assert (spans.next_available(clients, following) == following).all()


def test_spans_that_overlap_or_leave_their_period_are_refused():
    two = np.zeros(2, int)
    with pytest.raises(ConfigError, match=r"Client 0 is available from 4\.0 s to 6\.0 s, which overlaps"):
        Spans(two, np.array([0.0, 4.0]), np.array([5.0, 6.0]), 10.0, 1)
    with pytest.raises(ConfigError, match="which overlaps the one before"):
        Spans(two, np.array([0.0, 8.0]), np.array([5.0, 11.0]), 10.0, 1)
    with pytest.raises(ConfigError, match="not within the period"):
        Spans(two, np.array([0.0, 11.0]), np.array([5.0, 12.0]), 10.0, 1)
    with pytest.raises(ConfigError, match="shorter than a millisecond"):
        Spans(two, np.array([0.0, 5.0]), np.array([1.0, 5.0]), 10.0, 1)


def test_a_draw_holds_for_its_hour_and_the_next_success_is_the_first():
    chances = Chances(lambda clients, draws: np.full(len(clients), 0.2), every=0.1, seed=0)
    clients = np.arange(40)
    for time in (0.0, 12.34, 1e5 + 0.1):
        following = chances.next_available(clients, time)
        assert chances.is_available(clients, following).all() and (following >= time).all()
        middle_of_draws = (np.floor(time / 0.1) + np.arange(100)) * 0.1 + 0.05
        for client in clients:
            alone = np.array([client])
            hits = [bool(chances.is_available(alone, moment)[0]) for moment in middle_of_draws]
            expected = middle_of_draws[hits.index(True)] - 0.05
            assert following[client] == pytest.approx(max(expected, time), abs=1e-6)


def test_a_client_without_a_chance_is_never_available():
    never = Chances(lambda clients, draws: np.zeros(len(clients)), every=1.0, seed=0)
    assert np.isinf(never.next_available(np.arange(2), 5.0)).all()
    assert (Always().next_available(np.arange(2), 5.0) == 5.0).all()


FORMULAS = {
    "idl": (lambda t: [1, 1, 1]),
    "homo": (lambda t: [0.8, 0.8, 0.8]),
    "ymf": (lambda t: [0.9, 0.1 * 2 / 3 + 0.9, 0.1 * 1 / 3 + 0.9]),
    "yff": (lambda t: [0.2 * 2 / 4 + 0.8, 0.2 * 1 / 4 + 0.8, 0.2 * 3 / 4 + 0.8]),
    "mdf": (lambda t: [0.04**1e-4, 0.16**1e-4, 1]),
    "ldf": (lambda t: [1, 0.5, 0.2]),
    # 24 hours for four labels: six for each.
    "yc": (lambda t: [0.5 + 0.5 * HELD[client, t // 6] for client in range(3)]),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("hour", with_quick([0, 7, 23], {7}))
def test_flgos_models_reach_clients_as_often_as_their_formulas_say(name, hour):
    days = 4000
    availability = AVAILABILITY_MODELS.get(name)().availability(HOLDINGS, unit=3600.0)
    clients = np.arange(3)
    reached = np.zeros(3)
    for day in range(days):
        reached += availability.is_available(clients, (24 * day + hour) * 3600.0 + 1)
    chances = np.array(FORMULAS[name](hour))
    deviation = np.sqrt(np.maximum(chances * (1 - chances), 1e-12) * days)
    assert (np.abs(reached - days * chances) <= 4.5 * deviation + 0.5).all()


def test_log_normal_chances_have_their_spread_and_swing_with_the_sine():
    many = Holdings(seed=1, num_samples=np.ones(50_000, int), labels_held=lambda: HELD)
    constant = AVAILABILITY_MODELS.get("ln")(beta=0.3).constant(many)
    assert constant.max() == 1.0
    assert np.log(constant).std() == pytest.approx(-np.log(0.7), rel=0.02)

    swinging = AVAILABILITY_MODELS.get("sln")(beta=0.3).chances(many)
    clients = np.arange(len(constant))
    for hour, factor in ((0, 0.5), (6, 0.9), (18, 0.1), (30, 0.9)):
        assert swinging(clients, np.full(len(clients), hour)) == pytest.approx(factor * constant)


def test_diurnal_clients_are_there_for_their_hours_around_the_start():
    many = Holdings(seed=1, num_samples=np.ones(20_000, int), labels_held=lambda: HELD)
    availability = AVAILABILITY_MODELS.get("diurnal")(hours=6, start=22, spread=1).availability(many, unit=3600.0)
    clients = np.arange(20_000)
    shares = [availability.is_available(clients, (3 * 24 + hour + 0.5) * 3600).mean() for hour in range(24)]
    assert np.mean(shares) == pytest.approx(6 / 24, abs=0.01)
    assert shares[0] > 0.99 and shares[12] == 0.0
