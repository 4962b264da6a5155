"""What a process has once on Ray: its connection, which one thread uses at a time, and a session's spare server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raypfl.common.errors import ConfigError


@dataclass
class SpareServer:
    """The server actor, with its client actors, that a session keeps for its next run of the same kind.

    Attributes
    ----------
    shared : whether a session is active, so that a run's server is kept.
    kind : what the server was started with; a run of another kind needs another one.
    server : the server actor, if there is one.
    """

    shared: bool = False
    kind: Any = None
    server: Any = None

    def take(self, ray: Any, kind: Any) -> Any:
        """Take the spare server if it is of this kind; one of another kind is released."""
        if self.kind != kind:
            self.release(ray)
        server = self.server
        self.server = None
        return server

    def release(self, ray: Any) -> None:
        """Kill the spare server, if there is one, since something else needs its resources."""
        if self.server is not None:
            ray.kill(self.server)
        self.kind = None
        self.server = None


spare_server = SpareServer()

ray_lock = threading.RLock()
"""Held by the thread that runs an experiment on Ray: a process has one connection, closed by the first to end."""


@contextlib.contextmanager
def exclusive_ray() -> Iterator[None]:
    """While active, no other thread of this process can run an experiment on Ray."""
    if not ray_lock.acquire(blocking=False):
        raise ConfigError(
            "Another thread of this process runs an experiment on Ray, and a process has one connection to Ray. Wait "
            "for its end, start this run in a process of its own, or use engine.backend=inline."
        )
    try:
        yield
    finally:
        ray_lock.release()
