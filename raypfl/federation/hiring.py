"""When another client actor is started in place of one that died: the policy alone, without actors or a clock."""

from __future__ import annotations

PAUSE = 0.5
"""Seconds until another actor is started after one has died while it was set up; each further one doubles them."""

LONGEST = 8.0
"""Seconds that such a pause takes at most."""

STILLBORN = 3
"""Actors that must have died while they were set up before there is no hope."""

PATIENCE = 60.0
"""Seconds for which none must have come up before there is no hope."""


class Hiring:
    """Counts actors that died while they were set up, as for lack of memory, since the last finished group."""

    def __init__(self) -> None:
        self.stillborn = 0
        self._since = 0.0
        self._next = 0.0

    def lost(self, now: float) -> None:
        """An actor has died while it was set up."""
        if not self.stillborn:
            self._since = now
        self._next = now + min(PAUSE * 2**self.stillborn, LONGEST)
        self.stillborn += 1

    def worked(self) -> None:
        """A group was finished."""
        self.stillborn, self._next = 0, 0.0

    def may(self, now: float) -> bool:
        """Whether another one may be started."""
        return now >= self._next

    def is_hopeless(self, now: float) -> bool:
        """Whether to give up, if no other actor is there that can work."""
        return self.stillborn >= STILLBORN and now - self._since >= PATIENCE
