"""Ctrl-C, SIGTERM and SIGHUP as a request to stop, which a run obeys at a safe point; a message if it is killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to stop: by a person, a scheduler, a terminal that is closed."""

_WATCH = 'read -r over || printf "%s\\n" "$0" >&2'


class StopRequest:
    """Whether the run was asked to stop. A second signal raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.made = False
        self._interruptible = False
        self._noticed = threading.Event()

    def __call__(self) -> bool:
        return self.made

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While active, the first signal raises KeyboardInterrupt too, since no work would be lost."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def acknowledged(self, tell: Callable[[], None]) -> Iterator[None]:
        """While active, `tell` is called in another thread as soon as the request is made: this one may be busy."""
        over = threading.Event()

        def wait() -> None:
            self._noticed.wait()
            if not over.is_set():
                tell()

        watch = threading.Thread(target=wait, name="raypfl-stopping", daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            self._noticed.set()
            watch.join()

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """While active, SIGINT, SIGTERM and SIGHUP make the request."""
        with _handled(self._receive):
            yield self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        insists = self.made
        self.made = True
        if not insists:  # the event's lock is not reentrant
            self._noticed.set()
        if insists or self._interruptible:
            raise KeyboardInterrupt


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While active, signals that ask to stop are held back; they are raised at the end."""
    came: list[int] = []
    with _handled(lambda number, frame: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """While active, signals that are ignored or would end this process silently raise KeyboardInterrupt instead.

    A shell script starts what goes on in the background with SIGINT ignored.
    """
    with _handled(signal.default_int_handler, instead_of=(signal.SIG_DFL, signal.SIG_IGN)):
        yield


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """While active, SIGHUP is ignored; processes that are started meanwhile ignore it for good.

    A terminal that is closed sends it to all of them, and Ray's would end before the run is saved.
    """
    with _handled(signal.SIG_IGN, (signal.SIGHUP,)):
        yield


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """At the end, restore the handlers of signals that ask to stop, which a library may have changed."""
    with _handled():
        yield


@contextlib.contextmanager
def _handled(by: Any = None, numbers: Iterable[int] = ASKING, instead_of: Collection[Any] = ()) -> Iterator[None]:
    """While active, signals go to `by`, except for SIGHUP if it is ignored, as under nohup.

    With `instead_of`, only signals whose handler is one of these. Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    left = (signal.SIGHUP, signal.SIG_IGN)
    replaced = instead_of or before.values()
    mine = {n: handler for n, handler in before.items() if (n, handler) != left and handler in replaced}
    try:
        for number, handler in mine.items():
            signal.signal(number, handler if by is None else by)
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def message_if_killed(how_to_continue: str) -> Iterator[None]:
    """While active, another process prints a message on stderr if this one is killed or exits in a library's C++ code.

    Parameters
    ----------
    how_to_continue : the end of the message.
    """
    reason = "killed, out of memory, or by Ray after one of its processes died"
    message = f"raypfl was ended from outside: {reason}. {how_to_continue}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the run is worth starting even if there is no room for one more process
            # A session of its own keeps signals to our process group away from it.
            watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, message], stdin=subprocess.PIPE, start_new_session=True
            )
            stack.callback(watcher.communicate, b"over\n")
        yield
