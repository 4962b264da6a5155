"""Rounds in simulated time: who counts, when they end, and what they cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raypfl.common.errors import ConfigError
from raypfl.devices import ClientTurns, Devices, Exchange, Spans, Training, Turn
from raypfl.federation.cohort_draw import CohortDraw, draw_cohort
from raypfl.federation.settings import CohortSettings

CLIENTS = 10


def turns(**changes) -> ClientTurns:
    """Client i computes for 10 i + 1 seconds, after a second of download and before two of upload, at i watts."""
    devices = Devices(
        ms_per_sample=100.0 * np.arange(CLIENTS) + 10,
        down_kbps=np.full(CLIENTS, 8.0),
        up_kbps=np.full(CLIENTS, 8.0),
        watts=np.arange(CLIENTS, dtype=float),
    )
    turn = Turn((Exchange((Training(batch_size=10),), down_bytes=1000, up_bytes=2000),))
    settings = {"devices": devices, "turn": turn, "num_samples": np.full(CLIENTS, 100)}
    return ClientTurns(**settings | changes)


def seconds(client: int, share: float = 1.0) -> float:
    return 1 + share * (10 * client + 1) + 2


def draw(round: int = 1, time: float = 0.0, of: ClientTurns | None = None, **settings) -> CohortDraw:
    return draw_cohort(CohortSettings(**{"size": 6} | settings), CLIENTS, 0, round, of or turns(), time=time)


def test_a_round_ends_at_its_slowest_and_costs_what_all_use():
    for round in range(1, 20):
        cohort = draw(round, time=100.0)
        assert len(cohort.clients) == 6 and cohort.late == cohort.dropped == () and cohort.work is None
        assert cohort.begins == 100 and cohort.seconds == pytest.approx(max(map(seconds, cohort.clients)))
        assert cohort.joules == pytest.approx(sum(client * seconds(client) for client in cohort.clients))


def test_over_selection_keeps_the_first_to_finish_and_stops_the_others():
    cohort = draw(size=6, over_selection=1.5)
    everyone = sorted((*cohort.clients, *cohort.late))
    assert len(everyone) == 9 and cohort.clients == tuple(everyone[:6]) and cohort.late == tuple(everyone[6:])
    assert cohort.seconds == pytest.approx(seconds(everyone[5]))
    busy = [min(seconds(client), cohort.seconds) for client in everyone]
    assert cohort.joules == pytest.approx(np.dot(everyone, busy))
    # 6 x 1.3 is 7.8: eight are sent the model, and no more than there are.
    assert len((lambda c: (*c.clients, *c.late))(draw(size=6, over_selection=1.3))) == 8
    assert len((lambda c: (*c.clients, *c.late))(draw(size=9, over_selection=2.0))) == CLIENTS


def test_a_deadline_loses_those_that_are_late_unless_the_quorum_needs_them():
    cohort = draw(size=10, deadline=seconds(4))
    assert cohort.clients == (0, 1, 2, 3, 4) and cohort.late == (5, 6, 7, 8, 9)
    assert cohort.seconds == pytest.approx(seconds(4))

    quorum = draw(size=10, deadline=seconds(4), quorum=0.8)
    assert quorum.clients == tuple(range(8)) and quorum.seconds == pytest.approx(seconds(7))

    nobody = draw(size=10, deadline=0.5)
    assert nobody.clients == () and len(nobody.late) == 10 and nobody.seconds == 0.5

    relaxed = draw(size=10, deadline=1e6)
    assert relaxed.clients == tuple(range(10)) and relaxed.seconds == pytest.approx(seconds(9))


def test_a_client_that_would_be_late_sends_what_it_has_done_if_partial_work_counts():
    deadline = seconds(4)
    cohort = draw(size=10, deadline=deadline, late="partial")
    assert cohort.clients == tuple(range(10)) and cohort.seconds == pytest.approx(deadline)
    for client, share in enumerate(cohort.work):
        assert seconds(client, share) <= deadline + 1e-9
        assert share == 1 if client <= 4 else seconds(client, share) == pytest.approx(deadline)

    # Download and upload alone take three seconds.
    assert draw(size=10, deadline=2.9, late="partial").clients == ()


def test_clients_that_drop_out_are_noticed_after_their_download_and_do_not_delay_the_round():
    cohorts = [draw(round, of=turns(dropout=0.5)) for round in range(1, 60)]
    for cohort in cohorts:
        assert len(cohort.clients) + len(cohort.dropped) == 6
        assert cohort.seconds == pytest.approx(max(map(seconds, cohort.clients), default=1.0))
        expected = sum(client * seconds(client) for client in cohort.clients) + sum(cohort.dropped)
        assert cohort.joules == pytest.approx(expected)
    assert any(not cohort.clients for cohort in cohorts)


def test_nobody_waits_for_a_slow_download_of_a_client_that_drops_out_longer_than_for_its_reply():
    # Client 1 downloads for 1000 seconds; in this round it drops out, and client 0 does not.
    bandwidth = np.array([8.0, 0.008])
    devices = Devices(np.full(2, 10.0), bandwidth, np.full(2, 8.0), np.ones(2))
    pair = turns(dropout=0.5, devices=devices)

    def draw_pair(**settings) -> CohortDraw:
        cohort = draw_cohort(CohortSettings(**settings), 2, pair.seed, 1, pair)
        assert cohort.clients == (0,) and cohort.dropped == (1,)
        return cohort

    patient = draw_pair(size=2)
    assert patient.seconds == pytest.approx(1000) and patient.joules == pytest.approx(seconds(0) + 1000)
    hurried = draw_pair(size=2, deadline=20.0)
    assert hurried.seconds == 20 and hurried.joules == pytest.approx(seconds(0) + 20)
    replaced = draw_pair(size=1, over_selection=2.0)
    assert replaced.seconds == pytest.approx(seconds(0)) and replaced.joules == pytest.approx(2 * seconds(0))


def test_a_share_of_the_clients_does_a_part_of_its_work_in_a_part_of_the_time():
    parts = []
    for round in range(1, 200):
        cohort = draw(round, of=turns(partial_work=0.5))
        work = np.ones(6) if cohort.work is None else cohort.work
        expected = max(seconds(client, share) for client, share in zip(cohort.clients, work, strict=True))
        assert cohort.seconds == pytest.approx(expected)
        parts += work.tolist()
    partial = np.array(parts)[np.array(parts) < 1]
    assert abs(len(partial) / len(parts) - 0.5) < 0.06 and abs(partial.mean() - 0.5) < 0.06


def test_all_wait_for_the_slowest_after_each_exchange():
    download = Exchange(down_bytes=1000.0)
    compute = Exchange((Training(batch_size=10),))
    fast_link = np.array([8.0, 1.0])
    devices = Devices(np.array([100.0, 10.0]), fast_link, fast_link, np.ones(2))
    two = ClientTurns(devices=devices, turn=Turn((download, compute)), num_samples=np.array([100, 100]))
    cohort = draw_cohort(CohortSettings(size=2), 2, 0, 1, two)
    # The first client downloads for 1 s and computes for 10 s; the second for 8 s and 1 s.
    assert cohort.seconds == pytest.approx(8 + 10)


def test_a_round_begins_when_somebody_can_be_reached():
    clients = np.arange(CLIENTS)
    nights = Spans(clients, 50.0 + clients, 60.0 + clients, 100.0, CLIENTS)
    cohort = draw(time=270.0, of=turns(availability=nights))
    assert cohort.begins == 350.0 and cohort.clients == (0,) and cohort.ends == pytest.approx(350 + seconds(0))
    assert draw(time=255.0, of=turns(availability=nights)).clients == (0, 1, 2, 3, 4, 5)

    nobody = Spans(np.zeros(0, int), np.zeros(0), np.zeros(0), 100.0, CLIENTS)
    with pytest.raises(ConfigError, match="From 270 simulated seconds on, no client can ever be reached"):
        draw(time=270.0, of=turns(availability=nobody))


def test_time_never_runs_back_and_each_round_takes_some():
    time = 0.0
    clients = np.arange(CLIENTS)
    hours = Spans(clients, 10.0 * clients, 10.0 * clients + 25, 100.0, CLIENTS)
    settings = {"over_selection": 1.3, "deadline": 40.0, "quorum": 0.3, "late": "partial"}
    for round in range(1, 300):
        of = turns(availability=hours, dropout=0.3, partial_work=0.3)
        cohort = draw(round, time, of, **settings)
        assert cohort.begins >= time and cohort.seconds > 0 and math.isfinite(cohort.joules)
        drawn = (*cohort.clients, *cohort.lost)
        assert len(set(drawn)) == len(drawn) <= 8 and hours.is_available(np.array(drawn), cohort.begins).all()
        time = cohort.ends
