"""How long the rest of a run takes, judged by the rounds and evaluations that it has done."""

from __future__ import annotations

from collections import deque
from statistics import fmean

_WARM_UP = 3
"""Rounds that take longer than later ones: processes start, memory is taken, and steps are compared and recorded.

Ditto with the CNN on digits took 0.61, 0.84 and 0.67 s in them, and 0.36 s in each later one.
"""

_LONG_ROUND = 10.0
"""Seconds of a round of which a warm-up is a small part, so that it is taken as it is."""

_RECENT = 10
"""Rounds over which the pace is averaged: cohorts differ, and so does the machine's load."""


class Pace:
    """The pace of a run, in seconds of any clock.

    Parameters
    ----------
    start : when the run started.
    """

    def __init__(self, start: float):
        self._last_event = start
        self._rounds = 0
        self._last_round = 0.0
        self._settled: deque[float] = deque(maxlen=_RECENT)
        self._evaluation = 0.0

    def round_ended(self, now: float) -> None:
        self._last_round = now - self._last_event
        self._last_event = now
        self._rounds += 1
        if self._rounds > _WARM_UP:
            self._settled.append(self._last_round)

    def evaluation_ended(self, now: float) -> None:
        self._evaluation = now - self._last_event
        self._last_event = now

    def seconds_left(self, rounds: int, evaluations: int) -> float | None:
        """Return the time that as many further rounds and evaluations take; None: it is too early to say."""
        if self._settled:
            a_round = fmean(self._settled)
        elif self._rounds > 1 and self._last_round >= _LONG_ROUND:
            a_round = self._last_round
        else:
            return None
        return rounds * a_round + evaluations * self._evaluation
