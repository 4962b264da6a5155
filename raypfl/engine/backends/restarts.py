"""What follows the deaths of client actors: the policy alone, without actors or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

PAUSE = 0.5
"""Seconds before a replacement is started after an actor died in its set-up; doubled for each further death."""

MAX_PAUSE = 8.0
"""Seconds that such a pause takes at most."""

MAX_SETUP_FAILURES = 3
"""Actors whose set-up must have raised an error before the backend gives up: the next one's would raise it too."""

PATIENCE = 300.0
"""Seconds for which actors must have been killed in their set-up before the backend gives up: memory may be freed."""


class RestartPolicy:
    """Counts deaths since the last finished group: of actors in their set-up, and of actors at work, by their group.

    While groups finish, deaths say little: somebody kills processes, or memory is short for a while.
    """

    def __init__(self) -> None:
        self.setup_deaths = 0
        self._deaths_at_work: Counter[Hashable] = Counter()
        self._setup_failures = 0
        self._since = 0.0
        self._next_start = 0.0

    def died_in_setup(self, now: float, failed: bool) -> None:
        """An actor died in its set-up: because that `failed`, or because its process was killed."""
        if not self.setup_deaths:
            self._since = now
        self._next_start = now + min(PAUSE * 2**self.setup_deaths, MAX_PAUSE)
        self.setup_deaths += 1
        self._setup_failures += failed

    def group_finished(self) -> None:
        """A group was finished, so actors do work."""
        self.setup_deaths = 0
        self._setup_failures = 0
        self._next_start = 0.0
        self._deaths_at_work.clear()

    def died_at_work(self, group: Hashable) -> int:
        """An actor died that ran this group alone; returns how often that has happened since a group was finished."""
        self._deaths_at_work[group] += 1
        return self._deaths_at_work[group]

    def may_start(self, now: float) -> bool:
        """Whether a replacement may be started."""
        return now >= self._next_start

    def is_hopeless(self, now: float) -> bool:
        """Whether to give up if no other actor is left."""
        return self._setup_failures >= MAX_SETUP_FAILURES or now - self._since >= PATIENCE
