"""Who may write to a run: one attempt at a time, wherever its checkpoints are.

A file beside the checkpoints names the attempt that holds the lease, and counts up every few seconds. Object stores
know no locks and machines' clocks differ, so whoever comes later watches whether the count moves; of a process of the
same machine it is known at once whether it lives. An attempt that was taken for dead finds another one's name there,
and writes nothing any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow.fs as pafs

from raypfl.common.errors import CheckpointError
from raypfl.common.files import alone, write
from raypfl.storage.checkpoint import resolve

BEAT = 10.0
"""Seconds between signs of life."""

PATIENCE = 60.0
"""Seconds without one after which an attempt elsewhere counts as dead."""

_LOOK = 1.0
_FILE = "lease.json"
_held: set[str] = set()  # by this process


@dataclass(frozen=True)
class _Holder:
    """An attempt, where it runs and since when; `born` tells its process from a later one of the same number."""

    attempt: str
    host: str
    machine: str
    process: int
    born: str
    since: str
    beat: int = 0

    @classmethod
    def me(cls, attempt: str) -> _Holder:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(attempt, socket.gethostname(), _machine(), os.getpid(), _born(os.getpid()), now)

    @property
    def lives(self) -> bool | None:
        """Whether its process does; None: it runs where this cannot be seen from here."""
        if self.machine != _machine():
            return None
        if self.process == os.getpid():
            return self.attempt in _held
        return _born(self.process) == self.born != ""


@contextlib.contextmanager
def held(location: str, attempt: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Within: `attempt` holds the lease of the run whose checkpoints are in a location.

    Parameters
    ----------
    tell : is told, in a few words, if it has to be waited for whether another attempt still lives.

    Raises
    ------
    CheckpointError : if another one does.
    """
    place = _Place(location)
    mine = _Holder.me(attempt)
    place.wait_for_silence(tell)
    place.claim(mine)
    _held.add(attempt)
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(place, mine, over), name="raypfl-lease", daemon=True)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join()
        _held.discard(attempt)
        with contextlib.suppress(OSError, CheckpointError):
            if place.is_of(attempt):
                place.clear()


def refuse_unless_held(location: str, attempt: str) -> None:
    """Raise a CheckpointError unless `attempt` still holds the lease."""
    holder = _Place(location).read()
    if holder is not None and holder.attempt == attempt:
        return
    other = f"process {holder.process} on {holder.host}" if holder else "another process"
    raise CheckpointError(
        f"The run whose checkpoints are in {location} is no longer this process's, which writes nothing there any "
        f"more: {other} has taken it over, as if this one were dead, or {location} is another folder on this machine."
    )


def _beat(place: _Place, mine: _Holder, over: threading.Event) -> None:
    while not over.wait(BEAT):
        mine = replace(mine, beat=mine.beat + 1)
        with contextlib.suppress(OSError, CheckpointError):  # it is tried again, and others are patient
            if not place.is_of(mine.attempt):
                return
            place.write(mine)


class _Place:
    """The file of a lease."""

    def __init__(self, location: str):
        self._location = location
        self._files, self._root = resolve(location)
        self._path = f"{self._root}/{_FILE}"
        self._is_local = isinstance(self._files, pafs.LocalFileSystem)

    def read(self) -> _Holder | None:
        try:
            with self._files.open_input_stream(self._path, compression=None) as stream:
                return _Holder(**json.loads(stream.read()))
        except (FileNotFoundError, ValueError, TypeError):  # none, or none of ours
            return None
        except OSError as error:
            raise CheckpointError(f"The lease in {self._location} cannot be read: {error}.") from error

    def write(self, holder: _Holder) -> None:
        content = json.dumps(asdict(holder), indent=1)
        if self._is_local:
            write(Path(self._path), content)
            return
        with self._files.open_output_stream(self._path, compression=None) as stream:
            stream.write(content.encode())

    def clear(self) -> None:
        self._files.delete_file(self._path)
        if self._is_local:
            os.rmdir(self._root)  # unless there are checkpoints

    def is_of(self, attempt: str) -> bool:
        holder = self.read()
        return holder is not None and holder.attempt == attempt

    def claim(self, mine: _Holder) -> None:
        """Write `mine` there, unless an attempt holds this that is known to live: then raise a CheckpointError."""
        try:
            self._files.create_dir(self._root, recursive=True)
            with alone(Path(self._path)) if self._is_local else contextlib.nullcontext():
                holder = self.read()
                if holder is not None and holder.lives:
                    raise self._taken(holder)
                self.write(mine)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written to {self._location}: {error}. Set checkpoint.location to another place."
            ) from error

    def wait_for_silence(self, tell: Callable[[str], None]) -> None:
        """Return once who holds this, if anybody, can be taken for dead; raise a CheckpointError if it lives."""
        first = self.read()
        if first is None or first.lives is not None:
            return
        tell(f"waiting for {PATIENCE:g} s, to see whether process {first.process} on {first.host} still runs this")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (now := self.read()) is not None:
            if now != first:
                raise self._taken(now)
            time.sleep(_LOOK)

    def _taken(self, holder: _Holder) -> CheckpointError:
        return CheckpointError(
            f"The run whose checkpoints are in {self._location} is already running as process {holder.process} on "
            f"{holder.host} since {holder.since}. Let it come to its end, or stop it there."
        )


def _machine() -> str:
    """What tells a machine, and a container on it, from others in which the same process number means another one."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _born(process: int) -> str:
    """When a process of this machine began, in the machine's own count; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    with contextlib.suppress(OSError):  # where there is no /proc
        if not Path("/proc/self").exists():
            os.kill(process, 0)
            return "once"
    return ""
