"""The schedule of asynchronous rounds: times, staleness, who is drawn, and the waves that train at once."""

from __future__ import annotations

import numpy as np
import pytest

from raypfl.common.errors import ConfigError
from raypfl.devices import Availability
from raypfl.federation.asynchronous.schedule import Schedule, ScheduledClients, make_schedule
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.cohort_draw import draw_cohort
from raypfl.federation.settings import CohortSettings


class Shifts(Availability):
    """Even clients can be reached in even seconds, odd ones in odd seconds."""

    def is_available(self, clients: np.ndarray, time: float) -> np.ndarray:
        return np.asarray(clients) % 2 == int(time) % 2

    def next_available(self, clients: np.ndarray, time: float) -> np.ndarray:
        return np.where(self.is_available(clients, time), time, int(time) + 1.0)


def lognormal(num_clients: int) -> np.ndarray:
    return np.random.default_rng(5).lognormal(0, 1, num_clients)


def in_flight_after(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    """Count the turns that have begun before or at each of these times, and end after it."""
    begun = np.searchsorted(schedule.begins, times, side="right")
    return begun - ended_until(schedule, times)


def begun_before(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    return np.searchsorted(schedule.begins, times, side="left")


def ended_until(schedule: Schedule, times: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(schedule.ends), times, side="right")


@pytest.mark.parametrize(
    "limits", [{"buffer": 7}, {"buffer": 1}, {"buffer": 500, "window": 0.3}, {"buffer": 7, "window": 0.3}], ids=str
)
@pytest.mark.parametrize("case", ["plain", "dropping", "shifts", "small"])
def test_events_are_in_order_and_no_client_is_in_two_places(case, limits):
    scheduled = {
        "plain": ScheduledClients(lognormal(500), 20),
        "dropping": ScheduledClients(lognormal(500), 20, dropout=0.3),
        "shifts": ScheduledClients(lognormal(500), 20, availability=Shifts()),
        "small": ScheduledClients(lognormal(60), 20),
    }
    schedule = make_schedule(scheduled[case], 60, 1, **limits)

    assert (np.diff(schedule.begins) >= 0).all() and (np.diff(schedule.round_ends) >= 0).all()
    np.testing.assert_array_equal(schedule.ends, schedule.begins + scheduled[case].seconds[schedule.clients])
    arrivals = schedule.ends[schedule.replies]
    assert (np.diff(arrivals) >= 0).all() and (schedule.staleness >= 0).all()
    assert in_flight_after(schedule, schedule.begins).max() <= 20

    # A round has its replies by the time it ends, and those sent a message in it are sent it between its two ends.
    joins = schedule.joins[schedule.replies]
    assert (arrivals <= schedule.round_ends[joins - 1]).all()
    starts = np.concatenate([[0.0], schedule.round_ends])[schedule.rounds - 1]
    assert (starts <= schedule.begins).all() and (schedule.begins <= schedule.round_ends[schedule.rounds - 1]).all()
    lengths = np.diff(schedule.round_ends, prepend=0.0)
    is_full = np.bincount(joins)[1:] == limits["buffer"]
    if "window" in limits:
        # A round ends early if it is full, and late if its first reply is late.
        has_one = np.bincount(joins)[1:] == 1
        assert (is_full | has_one | np.isclose(lengths, 0.3)).all() and (is_full | (lengths > 0.3 - 1e-9)).all()
        assert np.isclose(lengths, 0.3).sum() > 5
    else:
        assert is_full.all()

    # A client begins again only once its last reply is part of a round, or it dropped out.
    free_at = np.where(schedule.joins > 0, schedule.round_ends[schedule.joins - 1], schedule.ends)
    for client in np.unique(schedule.clients):
        turns = np.flatnonzero(schedule.clients == client)
        assert (free_at[turns[:-1]] <= schedule.begins[turns[1:]]).all()
    if case == "shifts":
        assert Shifts().is_available(schedule.clients, 0)[schedule.begins.astype(int) % 2 == 0].all()


def test_mean_staleness_is_what_is_in_flight_at_the_end_of_rounds():
    """Each new model makes each client that is under way one model staler: sum over replies = sum over rounds."""
    for scheduled, limits in [
        (ScheduledClients(lognormal(3000), 100), {"buffer": 10}),
        (ScheduledClients(lognormal(3000), 100, dropout=0.2), {"buffer": 10}),
        (ScheduledClients(lognormal(130), 100), {"buffer": 100, "window": 0.4}),
    ]:
        schedule = make_schedule(scheduled, 2000, 2, **limits)
        under_way = begun_before(schedule, schedule.round_ends) - ended_until(schedule, schedule.round_ends)
        # Those that dropped out, or are under way at the end, got stale as well.
        others = np.flatnonzero(schedule.joins == 0)
        made = np.searchsorted(schedule.round_ends, schedule.ends[others], side="left")
        lost_staleness = made + 1 - schedule.rounds[others]
        assert schedule.staleness.sum() + lost_staleness.sum() == under_way.sum()
        if scheduled.dropout == 0 and "window" not in limits:
            # The reply that ends a round is not under way any more.
            assert schedule.staleness.mean() == pytest.approx(99 / 10, rel=0.02)


def test_equal_durations_and_a_buffer_of_a_cohort_are_synchronous_rounds():
    schedule = make_schedule(ScheduledClients(np.full(40, 2.5), 8), 5, 7, buffer=8)
    assert (schedule.staleness == 0).all()
    np.testing.assert_array_equal(schedule.round_ends, [2.5, 5.0, 7.5, 10.0, 12.5])
    for number in range(1, 6):
        cohort = draw_cohort(CohortSettings(size=8), 40, 7, number).clients
        assert tuple(schedule.clients[schedule.joining(number, number)]) == cohort
        assert schedule.wave_from(number) == number


@pytest.mark.parametrize("num_clients", [9, 40, 400])
@pytest.mark.parametrize("lengths", ["different", "some equal", "mostly equal"])
def test_a_window_that_no_round_reaches_changes_nothing(num_clients: int, lengths: str):
    """Without one, replies that come alone are taken in by a loop of their own."""
    seconds = lognormal(num_clients)
    if lengths != "different":
        seconds = np.ceil(seconds * (4 if lengths == "some equal" else 1))
    for size, buffer in ((3, 1), (8, 3), (8, 8), (2, 1)):
        scheduled = ScheduledClients(seconds, size)
        schedule = make_schedule(scheduled, 60, 6, buffer)
        windowed = make_schedule(scheduled, 60, 6, buffer, window=1e9)
        for name, expected in vars(windowed).items():
            np.testing.assert_array_equal(getattr(schedule, name), expected)


def test_a_longer_schedule_begins_like_a_shorter_one():
    scheduled = ScheduledClients(lognormal(300), 30, dropout=0.1)
    short = make_schedule(scheduled, 20, 4, buffer=5)
    long = make_schedule(scheduled, 50, 4, buffer=5)
    for name in ("clients", "rounds", "begins", "ends"):
        expected = getattr(long, name)[: len(short.clients)]
        np.testing.assert_array_equal(getattr(short, name), expected)
    np.testing.assert_array_equal(short.round_ends, long.round_ends[:20])


def test_waves_need_only_models_that_are_finished_and_hold_each_client_once():
    schedule = make_schedule(ScheduledClients(lognormal(400), 50), 200, 5, buffer=5)
    first = 1
    sizes = []
    while first <= 200:
        last = schedule.wave_from(first)
        turns = schedule.joining(first, last)
        assert schedule.rounds[turns].max() <= first
        assert len(set(schedule.clients[turns])) == len(turns)
        if last < 200:
            # This client cannot train with the one that ended the wave before, so there are no fewer waves than these.
            assert schedule.rounds[schedule.joining(last + 1, last + 1)].max() > first
        sizes.append(len(turns))
        first = last + 1
    assert sum(sizes) == 1000 and np.mean(sizes) > 5


def test_a_round_that_can_never_get_its_replies_is_refused():
    with pytest.raises(ConfigError, match="after 10 replies of round 1 no client is left"):
        make_schedule(ScheduledClients(np.ones(10), 4), 3, 0, buffer=11)


def test_weights_of_stale_replies_are_those_of_the_papers():
    tau = np.array([0, 1, 4, 5, 8])
    polynomial = AsynchronousSettings(buffer=1).weights(tau)
    np.testing.assert_allclose(polynomial, [1, 2**-0.5, 5**-0.5, 6**-0.5, 1 / 3])
    hinge = AsynchronousSettings(buffer=1, staleness="hinge", tolerance=4, slope=10.0).weights(tau)
    np.testing.assert_allclose(hinge, [1, 1, 1, 1 / 11, 1 / 41])
    np.testing.assert_array_equal(AsynchronousSettings(buffer=1, staleness="constant").weights(tau), 1)
