"""What groups are expected to take, learned from what they took."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from raypfl.clients.worker import Group


class Timings:
    """Expected durations of groups, from their durations so far.

    A client that took twice as long as its cost suggests is expected to do so again.

    `costs` : ``float[num_clients]`` expected duration of each client's turn, in any unit.
    """

    def __init__(self, costs: np.ndarray):
        self._costs = costs
        self._slowness = np.ones(len(costs), dtype=np.float32)
        self._rates: dict[Hashable, float] = {}

    def length(self, clients: Sequence[int] | np.ndarray) -> float:
        """Return the expected duration of a group of these clients, in any unit."""
        members = np.asarray(clients)
        return max(float((self._slowness[members] * self._costs[members]).sum()), 1e-9)

    def seconds(self, function: Hashable, clients: Sequence[int] | np.ndarray) -> float:
        """Return the expected seconds of a function on a group of these clients; 0 if the function was never timed."""
        return self._rates.get(function, 0.0) * self.length(clients)

    def note(self, function: Hashable, clients: Sequence[int], seconds: float) -> None:
        """Learn from a group of these clients that took `seconds`."""
        length = self.length(clients)
        rate = self._rates.setdefault(function, seconds / length)

        # Half of the way each time (a square root), since one slow group may have met a busy machine.
        surprise = seconds / (rate * length)
        self._slowness[list(clients)] *= min(max(surprise**0.5, 0.25), 4.0)
        self._rates[function] = 0.9 * rate + 0.1 * seconds / length


class Speeds:
    """Learns how much longer one place takes than another for the same group.

    A place is any hashable value, such as the actors of one kind on one node.
    """

    def __init__(self) -> None:
        self._slowness: dict[Hashable, float] = {}
        self._rates: dict[Hashable, float] = {}

    def slowness(self, place: Hashable) -> float:
        """Return the expected duration of a group at this place, relative to other places."""
        return self._slowness.setdefault(place, 1.0)

    def note(self, place: Hashable, function: Hashable, group: Group, seconds: float) -> float:
        """Learn from a group that took `seconds`; return how long it would have taken where the slowness is 1."""
        seconds = max(seconds, 1e-9)
        slowness = self.slowness(place)
        if len(self._slowness) == 1:  # nothing to compare with
            return seconds / slowness

        rate = self._rates.setdefault(function, seconds / slowness / group.length)
        # A third of the way each time (a cube root): the group's clients, or other programs, may have been the reason.
        surprise = seconds / (rate * group.length * slowness)
        slowness *= float(np.clip(surprise, 0.1, 10.0)) ** (1 / 3)
        self._slowness[place] = slowness
        self._rates[function] = 0.9 * rate + 0.1 * seconds / slowness / group.length
        return seconds / slowness
