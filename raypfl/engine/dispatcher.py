"""How the events of a run reach its listeners."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from raypfl.common.errors import ListenerError
from raypfl.common.user_code import explain_user_errors
from raypfl.engine.events import Evaluated, Event, Listener, RoundFinished, RunStarted, Warned


class EventDispatcher:
    """Passes each event on to the listeners once, although a restarted server repeats some rounds.

    Any thread may call it; listeners get one event at a time. The metadata of the run's start get ``startup_seconds``,
    the seconds since this dispatcher was made.

    Attributes
    ----------
    round : the last finished round.
    has_started : whether the run has started.
    """

    def __init__(self, listeners: Sequence[Listener]):
        self._listeners = listeners
        # Reentrant: a restart emits a warning while its RunStarted is being handled.
        self._one_at_a_time = threading.RLock()
        self.round = -1
        self._evaluated_round = -1
        self.has_started = False
        self._start = time.perf_counter()

    def __call__(self, event: Event) -> None:
        with self._one_at_a_time:
            if not self._is_news(event):
                return

            if isinstance(event, RunStarted):
                startup_seconds = round(time.perf_counter() - self._start, 3)
                event = replace(event, metadata={**event.metadata, "startup_seconds": startup_seconds})
            for listener in self._listeners:
                with explain_user_errors(f"as a listener, told of {type(event).__name__}", ListenerError, listener):
                    listener(event)

    def _is_news(self, event: Event) -> bool:
        """Note an event; return whether it is new, or repeats one from before a restart."""
        if isinstance(event, RunStarted):
            is_restart = self.has_started
            self.has_started = True
            if is_restart:
                self(Warned(f"The server was restarted and continues from round {event.first_round}."))
            return not is_restart

        if isinstance(event, RoundFinished):
            is_new = event.round > self.round
            self.round = max(event.round, self.round)
            return is_new

        if isinstance(event, Evaluated):
            is_new = event.round > self._evaluated_round
            self._evaluated_round = max(event.round, self._evaluated_round)
            return is_new

        return True
