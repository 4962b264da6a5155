"""When client actors that died are replaced, and when to give up: the policy alone, without actors or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

PAUSE = 0.5
"""Seconds to wait for a replacement after an actor died in its set-up; doubled for each further death."""

MAX_PAUSE = 8.0
"""Seconds of the longest such wait."""

MAX_SETUP_FAILURES = 3
"""Actors whose set-up raised an error before the backend gives up: the next one's would raise it too."""

PATIENCE = 300.0
"""Seconds of actors being killed in their set-up before the backend gives up: until then, memory may be freed."""


class RestartPolicy:
    """Counts deaths since the last finished group: of actors in their set-up, and of actors at work, by their group.

    While groups finish, deaths say little: somebody kills processes, or memory is short for a while.
    """

    def __init__(self) -> None:
        self.setup_deaths = 0
        self._deaths_at_work: Counter[Hashable] = Counter()
        self._setup_failures = 0
        self._first_setup_death = 0.0
        self._next_start = 0.0

    def died_in_setup(self, now: float, failed: bool) -> None:
        """Note that an actor died in its set-up: either its set-up `failed`, or its process was killed."""
        if not self.setup_deaths:
            self._first_setup_death = now
        self._next_start = now + min(PAUSE * 2**self.setup_deaths, MAX_PAUSE)
        self.setup_deaths += 1
        self._setup_failures += failed

    def group_finished(self) -> None:
        """Note that a group was finished, so actors do work."""
        self.setup_deaths = 0
        self._setup_failures = 0
        self._next_start = 0.0
        self._deaths_at_work.clear()

    def died_at_work(self, group: Hashable) -> int:
        """Note that an actor died that ran this group alone; return how often since a group was last finished."""
        self._deaths_at_work[group] += 1
        return self._deaths_at_work[group]

    def may_start(self, now: float) -> bool:
        """Return whether a replacement may be started."""
        return now >= self._next_start

    def is_hopeless(self, now: float) -> bool:
        """Return whether to give up if no other actor is left."""
        return self._setup_failures >= MAX_SETUP_FAILURES or now - self._first_setup_death >= PATIENCE
