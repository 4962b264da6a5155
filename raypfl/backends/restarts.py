"""When another client actor is started in place of one that died: the policy alone, without actors or a clock."""

from __future__ import annotations

PAUSE = 0.5
"""Seconds until another actor is started after one has died while it was set up; each further one doubles them."""

LONGEST = 8.0
"""Seconds that such a pause takes at most."""

STILLBORN = 3
"""Actors whose setting up must have failed before there is no hope: the next one's would fail too."""

PATIENCE = 300.0
"""Seconds for which those that are set up must have been killed before there is no hope: memory may be free again."""


class Hiring:
    """Counts actors that died while they were set up, as for lack of memory, since the last finished group."""

    def __init__(self) -> None:
        self.stillborn = 0
        self._failed = 0
        self._since = 0.0
        self._next = 0.0

    def lost(self, now: float, failed: bool) -> None:
        """An actor has died while it was set up, because that `failed` or because its process was killed."""
        if not self.stillborn:
            self._since = now
        self._next = now + min(PAUSE * 2**self.stillborn, LONGEST)
        self.stillborn += 1
        self._failed += failed

    def worked(self) -> None:
        """A group was finished."""
        self.stillborn, self._failed, self._next = 0, 0, 0.0

    def may(self, now: float) -> bool:
        """Whether another one may be started."""
        return now >= self._next

    def is_hopeless(self, now: float) -> bool:
        """Whether to give up, if no other actor is there that can work."""
        return self._failed >= STILLBORN or now - self._since >= PATIENCE
