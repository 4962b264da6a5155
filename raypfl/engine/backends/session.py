"""What a process has once on Ray: its connection, which one thread uses at a time, and a session's spare server."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.common.user_code import is_user_file


@dataclass(frozen=True)
class StartedServer:
    """A server actor, which has client actors of its own.

    Attributes
    ----------
    kind : what it was started with; a run of another kind needs another one.
    node : the id of the node that it was started on; None: any.
    """

    actor: Any
    kind: Any
    node: str | None

    def suits(self, kind: Any, node: str | None) -> bool:
        """Return whether a run of this kind can have it; `node` is where the run needs its server, None: anywhere."""
        return self.kind == kind and node in (None, self.node)


@dataclass
class SpareServer:
    """The server that a session keeps for its next run of the same kind.

    `shared` : whether a session is active, so that a run's server is kept.
    """

    shared: bool = False
    server: StartedServer | None = None
    _imported: dict[str, int | None] = field(default_factory=dict)

    def take(self, ray: Any, kind: Any, node: str | None) -> StartedServer | None:
        """Take the spare server if it suits; another one is released.

        One that has run with modules of the user that have changed since then is released too: its processes do not
        import them again.
        """
        have_modules_changed = self._have_modules_changed()
        if self.server is not None and (have_modules_changed or not self.server.suits(kind, node)):
            self.release(ray)
        server = self.server
        self.server = None
        return server

    def release(self, ray: Any) -> None:
        """Kill the spare server, if there is one, to free its resources."""
        if self.server is not None:
            ray.kill(self.server.actor)
        self.server = None

    def _have_modules_changed(self) -> bool:
        """Return whether a module of the user has changed since the first run with this server that could import it."""
        if not self.shared:
            return False
        times = _times_of_user_modules()
        before = {} if self.server is None else self._imported
        have_changed = any(times.get(file) != time for file, time in before.items())
        self._imported = times if have_changed else times | before
        return have_changed


def _times_of_user_modules() -> dict[str, int | None]:
    """Return when the file of each of the user's modules in this process was last changed."""
    # From __dict__: some modules import others when an attribute is looked up.
    files = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    return {file: _time_of(file) for file in files if file and is_user_file(file)}


def _time_of(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


spare_server = SpareServer()

ray_lock = threading.RLock()
"""Held by the thread that runs an experiment on Ray: a process has one connection, closed by the first to end."""


@contextlib.contextmanager
def exclusive_ray() -> Iterator[None]:
    """While active, no other thread of this process can run an experiment on Ray."""
    if not ray_lock.acquire(blocking=False):
        raise ConfigError(
            "Another thread of this process runs an experiment on Ray, and a process has one connection to Ray. Wait "
            "until it ends, start this run in another process, or use engine.backend=inline."
        )
    try:
        yield
    finally:
        ray_lock.release()
