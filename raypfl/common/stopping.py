"""Requests to stop (Ctrl-C, SIGTERM, SIGHUP), which a run obeys at a safe point, and a message if it is killed."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to stop: from a person, from a scheduler, and from a terminal that is closed."""

_WATCH = 'read -r over || printf "%s\\n" "$0" >&2'
"""Shell script that prints the message unless this process writes a line before it ends."""


class StopRequest:
    """Whether the run was asked to stop. A second signal raises KeyboardInterrupt at once.

    Attributes
    ----------
    received : whether the request was made.
    """

    def __init__(self) -> None:
        self.received = False
        self._interruptible = False
        self._watchers: list[queue.SimpleQueue[None]] = []

    def __call__(self) -> bool:
        return self.received

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While active, the first signal raises KeyboardInterrupt too, since no work would be lost."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def acknowledged(self, acknowledge: Callable[[], None]) -> Iterator[None]:
        """While active, call `acknowledge` in another thread as soon as the request is made: this one may be busy."""
        # A signal handler may wait for ever for the lock of an event; a simple queue's put never blocks.
        wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        is_over = threading.Event()

        def wait() -> None:
            wakes.get()
            if not is_over.is_set():
                acknowledge()

        watcher = threading.Thread(target=wait, name="raypfl-stopping", daemon=True)
        watcher.start()
        self._watchers.append(wakes)
        try:
            yield
        finally:
            is_over.set()
            wakes.put(None)
            watcher.join()

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While active, SIGINT, SIGTERM and SIGHUP make the request."""
        with _handled(self._receive):
            yield self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_second = self.received
        self.received = True
        for wakes in self._watchers:
            wakes.put(None)
        if is_second or self._interruptible:
            raise KeyboardInterrupt


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """While active, signals that ask to stop wait; they are raised at the end."""
    received: list[int] = []
    with _handled(lambda number, frame: received.append(number)):
        yield
    for number in received:
        signal.raise_signal(number)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """While active, signals that are ignored or would end this process silently raise KeyboardInterrupt instead.

    A shell script starts background processes with SIGINT ignored.
    """
    with _handled(signal.default_int_handler, instead_of=(signal.SIG_DFL, signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """While active, SIGHUP is ignored; processes that are started meanwhile ignore it for good.

    A terminal that is closed sends it to all its processes, and Ray's would end before the run is saved.
    """
    with _handled(signal.SIG_IGN, (signal.SIGHUP,)):
        yield


@contextlib.contextmanager
def handlers_restored() -> Iterator[None]:
    """At the end, restore the handlers of signals that ask to stop, which a library may have changed."""
    with _handled():
        yield


@contextlib.contextmanager
def _handled(
    handler: Any = None, numbers: Iterable[int] = STOP_SIGNALS, instead_of: Collection[Any] = ()
) -> Iterator[None]:
    """While active, signals go to `handler` (None: the handler that they have). At the end, restore their handlers.

    SIGHUP is left alone if it is ignored, as under nohup. With `instead_of`, only signals whose handler is one of these
    are changed. Outside the main thread, where Python sets no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {}
    for number in numbers:
        earlier = signal.getsignal(number) or signal.SIG_DFL
        ignores_hangups = number == signal.SIGHUP and earlier == signal.SIG_IGN
        if not ignores_hangups and (not instead_of or earlier in instead_of):
            before[number] = earlier
    try:
        for number, earlier in before.items():
            signal.signal(number, earlier if handler is None else handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def message_if_killed(how_to_continue: str) -> Iterator[None]:
    """While active, another process prints a message on stderr if this one is killed or exits in a library's C++ code.

    `how_to_continue` : the last sentence of the message.
    """
    reason = "killed, out of memory, or by Ray after one of its processes died"
    message = f"raypfl was ended from outside: {reason}. {how_to_continue}"
    with contextlib.ExitStack() as stack:
        # The run is worth starting even if there can be no further process.
        with contextlib.suppress(OSError):
            # In a session of its own, it gets no signals that are sent to this process group.
            watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, message], stdin=subprocess.PIPE, start_new_session=True
            )
            stack.callback(watcher.communicate, b"over\n")
        yield
