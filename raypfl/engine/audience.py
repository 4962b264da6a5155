"""Those who are told what happens in a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from raypfl.common.errors import ListenerError
from raypfl.common.user_code import framed
from raypfl.engine.events import Evaluated, Event, Listener, RoundFinished, RunStarted, Warned


class Audience:
    """Passes each event on to the listeners once, although a restarted server repeats some rounds.

    One event at a time, from any thread.

    The event of a run's start has the seconds since the audience was made, as ``startup_seconds`` of its metadata.

    Attributes
    ----------
    round : the last finished one.
    """

    def __init__(self, listeners: Sequence[Listener]):
        self._listeners = listeners
        self._one_at_a_time = threading.RLock()  # reentrant: a restart emits a warning
        self.round = -1
        self._evaluated = -1
        self._started = False
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        with self._one_at_a_time:
            if self._is_news(event):
                if isinstance(event, RunStarted):
                    took = round(time.perf_counter() - self._began, 3)
                    event = replace(event, metadata={**event.metadata, "startup_seconds": took})
                for listener in self._listeners:
                    with framed(f"as a listener, told of {type(event).__name__}", ListenerError, listener):
                        listener(event)

    def _is_news(self, event: Event) -> bool:
        if isinstance(event, RunStarted):
            first, self._started = not self._started, True
            if not first:
                self(Warned(f"The server was restarted and continues from round {event.first_round}."))
            return first
        if isinstance(event, RoundFinished):
            news, self.round = event.round > self.round, max(event.round, self.round)
            return news
        if isinstance(event, Evaluated):
            news, self._evaluated = event.round > self._evaluated, max(event.round, self._evaluated)
            return news
        return True
