"""The events of a run that its server keeps for the driver."""

from __future__ import annotations

from typing import Any

from raypfl.engine.backends.server_actor import _EventStream
from raypfl.engine.events import Checkpointed, Warned


def test_an_event_that_is_added_while_received_ones_are_dropped_has_yet_to_be_received():
    stream = _EventStream("run")
    still_awaited = []

    class Events(list[Any]):
        """Calls the run's thread in the middle of the driver's request."""

        def __delitem__(self, key: Any) -> None:
            super().__delitem__(key)
            stream.add(Checkpointed(1, "here"))
            still_awaited.append(stream.num_added)

    stream.events = Events()
    stream.add(Warned("a"))
    stream.add(Warned("b"))
    assert stream.after(2) == [Checkpointed(1, "here")]
    assert still_awaited == [3] and stream.num_received == 2
