"""Ctrl-C and SIGTERM as a request that the run answers at a safe point."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


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
        """Within: SIGINT and SIGTERM make the request. Outside the main thread, signals are not ours to take."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        insists = self.made
        self.made = True
        if not insists:  # the lock in it is not one to enter twice
            self._noticed.set()
        if insists or self._interruptible:
            raise KeyboardInterrupt
