"""Ctrl-C, SIGTERM and SIGHUP as a request that the run answers at a safe point."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a run to stop: from a person, from a scheduler, from a terminal that is closed."""


class StopRequest:
    """Whether the run was asked to stop. A second signal insists: it raises KeyboardInterrupt wherever it finds us."""

    def __init__(self) -> None:
        self.made = False
        self._interruptible = False
        self._noticed = threading.Event()

    def __call__(self) -> bool:
        return self.made

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within: nothing is at stake, so a signal ends the work at once, with KeyboardInterrupt."""
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    @contextlib.contextmanager
    def acknowledged(self, tell: Callable[[], None]) -> Iterator[None]:
        """Within: `tell` is called as soon as the request is made, from another thread, since this one may be busy."""
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
        """Within: SIGINT, SIGTERM and SIGHUP make the request."""
        with _handled(self._receive):
            yield self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        insists = self.made
        self.made = True
        if not insists:  # the lock in it is not one to enter twice
            self._noticed.set()
        if insists or self._interruptible:
            raise KeyboardInterrupt


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within: signals that ask to stop wait, so that what is begun comes to its end; they are raised afterwards."""
    came: list[int] = []
    with _handled(lambda number, frame: came.append(number)):
        yield
    for number in came:
        signal.raise_signal(number)


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Within: what would end this process without a word raises KeyboardInterrupt, as Ctrl-C does."""
    with _handled(signal.default_int_handler, where=signal.SIG_DFL):
        yield


@contextlib.contextmanager
def hangups_ignored() -> Iterator[None]:
    """Within: SIGHUP is ignored, also by processes that are started here, for good.

    A terminal that is closed tells them all, and those that are Ray's would end before the run is saved.
    """
    with _handled(signal.SIG_IGN, (signal.SIGHUP,)):
        yield


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Afterwards, signals that ask to stop are handled as before, whatever a library has done to that."""
    with _handled():
        yield


@contextlib.contextmanager
def _handled(by: Any = None, numbers: Iterable[int] = ASKING, where: Any = None) -> Iterator[None]:
    """Within: signals go to `by`, except for SIGHUP where it is ignored, as under nohup.

    With `where`, only those that went there before. Outside the main thread, signals are not ours to take.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    left = (signal.SIGHUP, signal.SIG_IGN)
    mine = {n: handler for n, handler in before.items() if (n, handler) != left and where in (None, handler)}
    try:
        for number, handler in mine.items():
            signal.signal(number, handler if by is None else by)
        yield
    finally:
        for number, handler in mine.items():
            signal.signal(number, handler)
