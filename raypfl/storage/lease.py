"""The lease on a run: only one attempt at a time may write to it, wherever its checkpoints are.

A file next to the checkpoints names the attempt that holds the lease, with a heartbeat count. Object stores have no
locks and clocks of machines differ, so a later attempt watches whether the count grows; for a process on the same
machine it asks the system. An attempt that was taken for dead finds another one's name there, and stops writing.
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
from raypfl.common.files import locked, write
from raypfl.storage.checkpoint import resolve

BEAT = 10.0
"""Seconds between heartbeats."""

PATIENCE = 60.0
"""Seconds without one after which an attempt on another machine counts as dead."""

_LOOK = 1.0
_FILE = "lease.json"
_held: set[str] = set()  # by this process


@dataclass(frozen=True)
class _Holder:
    """An attempt, where it runs and since when; `born` distinguishes its process from a later one of the same id."""

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
        """Whether its process is alive; None if it runs on another machine."""
        if self.machine != _machine():
            return None
        if self.process == os.getpid():
            return self.attempt in _held
        return _born(self.process) == self.born != ""


@contextlib.contextmanager
def held(location: str, attempt: str, tell: Callable[[str], None]) -> Iterator[None]:
    """A context in which `attempt` holds the lease of the run whose checkpoints are in a location.

    Parameters
    ----------
    tell : called with a text if this has to wait to see whether another attempt is alive.

    Raises
    ------
    CheckpointError : if another attempt holds it.
    """
    file = _LeaseFile(location)
    mine = _Holder.me(attempt)
    file.wait_for_silence(tell)
    file.claim(mine)
    _held.add(attempt)
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(file, mine, over), name="raypfl-lease", daemon=True)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join()
        _held.discard(attempt)
        with contextlib.suppress(OSError, CheckpointError):
            if file.is_of(attempt):
                file.clear()


def wait_until_free(location: str, seconds: float) -> None:
    """Return once no process of this machine holds the lease, or after `seconds`."""
    file = _LeaseFile(location)
    deadline = time.monotonic() + seconds
    while (holder := file.read()) is not None and holder.lives and time.monotonic() < deadline:
        time.sleep(_LOOK)


def refuse_unless_held(location: str, attempt: str, surely: bool = False) -> None:
    """Raise a CheckpointError if `attempt` no longer holds the lease; if `surely`, also if that cannot be read."""
    try:
        holder = _LeaseFile(location).read()
    except CheckpointError:
        if surely:
            raise
        return
    if holder is not None and holder.attempt == attempt:
        return
    other = f"process {holder.process} on {holder.host}" if holder else "another process"
    raise CheckpointError(
        f"This process has lost the run whose checkpoints are in {location} and no longer writes there: {other} has "
        f"taken it over, or {location} is another folder on this machine."
    )


def _beat(file: _LeaseFile, mine: _Holder, over: threading.Event) -> None:
    while not over.wait(BEAT):
        mine = replace(mine, beat=mine.beat + 1)
        with contextlib.suppress(OSError, CheckpointError):  # the next beat tries again
            if not file.is_of(mine.attempt):
                return
            file.write(mine)


class _LeaseFile:
    """The file of a lease, in a location."""

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
            raise CheckpointError(
                f"The lease in {self._location} cannot be read: {error}. Try again when it can."
            ) from error

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
        """Write `mine`; raises a CheckpointError if an attempt that is alive on this machine holds the lease."""
        try:
            self._files.create_dir(self._root, recursive=True)
            with locked(Path(self._path)) if self._is_local else contextlib.nullcontext():
                holder = self.read()
                if holder is not None and holder.lives:
                    raise self._taken(holder)
                self.write(mine)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written to {self._location}: {error}. Set checkpoint.location to another place."
            ) from error

    def wait_for_silence(self, tell: Callable[[str], None]) -> None:
        """Return once the holder, if any, can be taken for dead; raises a CheckpointError if it is alive."""
        first = self.read()
        if first is None or first.lives is not None:
            return
        tell(f"waiting {PATIENCE:g} s to see whether process {first.process} on {first.host} is still running this")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (now := self.read()) is not None:
            if now != first:
                raise self._taken(now)
            time.sleep(_LOOK)

    def _taken(self, holder: _Holder) -> CheckpointError:
        return CheckpointError(
            f"The run whose checkpoints are in {self._location} is already running as process {holder.process} on "
            f"{holder.host} since {holder.since}. Wait for it to end, or stop it there."
        )


def _machine() -> str:
    """Identifies a machine, and a container on it: where a process id means one process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _born(process: int) -> str:
    """Start time of a process of this machine, in clock ticks; empty if there is no such process, or it has ended."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]
    with contextlib.suppress(OSError):  # where there is no /proc
        if not Path("/proc/self").exists():
            os.kill(process, 0)
            return "once"
    return ""
