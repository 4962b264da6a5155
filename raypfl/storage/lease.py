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

from raypfl.common.errors import CheckpointError, Unwritable
from raypfl.common.files import locked, write
from raypfl.storage import filesystems

BEAT = 10.0
"""Seconds between heartbeats."""

PATIENCE = 60.0
"""Seconds without a heartbeat after which an attempt on another machine counts as dead."""

_POLL = 1.0
"""Seconds between looks at the lease of another attempt."""

_FILE = "lease.json"

_attempts_here: set[str] = set()
"""The attempts that hold a lease in this process."""


@dataclass(frozen=True)
class _Holder:
    """An attempt that holds a lease, as in the lease's file.

    Attributes
    ----------
    attempt : the attempt's id.
    host : the name of its machine, for messages.
    machine : the machine, or the container on it; see :func:`_machine`.
    process : the process id.
    born : the start time of the process, which distinguishes it from a later one of the same id.
    since : the time at which the attempt took the lease.
    beat : the number of heartbeats so far.
    """

    attempt: str
    host: str
    machine: str
    process: int
    born: str
    since: str
    beat: int = 0

    @classmethod
    def in_this_process(cls, attempt: str) -> _Holder:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(attempt, socket.gethostname(), _machine(), os.getpid(), _start_time(os.getpid()), since)

    @property
    def is_alive(self) -> bool | None:
        """Whether its process is alive; None if it runs on another machine."""
        if self.machine != _machine():
            return None
        if self.process == os.getpid():
            return self.attempt in _attempts_here
        return _start_time(self.process) == self.born != ""


class AlreadyRunning(CheckpointError):
    """Error for a run that another attempt is carrying out."""


@contextlib.contextmanager
def hold_lease(location: str, attempt: str, notify: Callable[[str], None]) -> Iterator[None]:
    """While active, `attempt` holds the lease of the run whose checkpoints are in a location.

    Parameters
    ----------
    notify : called with a text if this has to wait to see whether another attempt is alive.

    Raises
    ------
    AlreadyRunning : if another attempt holds it.
    """
    file = _LeaseFile(location)
    holder = _Holder.in_this_process(attempt)
    silent_holder = file.wait_for_silence(notify)
    # Before the claim: other threads consider a claim dead if its attempt of this process is not in the set.
    _attempts_here.add(attempt)
    try:
        file.claim(holder, silent_holder)
        with _beating(file, holder):
            yield
    finally:
        with contextlib.suppress(OSError, CheckpointError):
            if file.is_held_by(attempt):
                file.clear()
        _attempts_here.discard(attempt)


def wait_until_free(location: str, seconds: float) -> None:
    """Return once no process of this machine holds the lease, or after `seconds`."""
    file = _LeaseFile(location)
    deadline = time.monotonic() + seconds
    while (holder := file.read()) is not None and holder.is_alive and time.monotonic() < deadline:
        time.sleep(_POLL)


def refuse_unless_held(location: str, attempt: str, strict: bool = False) -> None:
    """Raise a CheckpointError if `attempt` no longer holds the lease; if `strict`, also if that cannot be read."""
    try:
        holder = _LeaseFile(location).read()
    except CheckpointError:
        if strict:
            raise
        return

    if holder is not None and holder.attempt == attempt:
        return
    other = f"process {holder.process} on {holder.host}" if holder else "another process"
    raise CheckpointError(
        f"This process has lost the run whose checkpoints are in {location} and no longer writes there: {other} has "
        f"taken it over, or {location} is another folder on this machine."
    )


@contextlib.contextmanager
def _beating(file: _LeaseFile, holder: _Holder) -> Iterator[None]:
    """While active, a thread writes heartbeats."""
    over = threading.Event()
    heart = threading.Thread(target=_beat, args=(file, holder, over), name="raypfl-lease", daemon=True)
    heart.start()
    try:
        yield
    finally:
        over.set()
        heart.join()


def _beat(file: _LeaseFile, holder: _Holder, over: threading.Event) -> None:
    """Write heartbeats until the lease is over or lost."""
    while not over.wait(BEAT):
        holder = replace(holder, beat=holder.beat + 1)
        # After an error, such as a full disk, the next beat tries again.
        with contextlib.suppress(OSError, CheckpointError, Unwritable):
            if not file.is_held_by(holder.attempt):
                return
            file.write(holder)


class _LeaseFile:
    """The file of a lease, in a location."""

    def __init__(self, location: str):
        self._location = location
        self._files, self._root = filesystems.open_location(location)
        self._path = f"{self._root}/{_FILE}"
        self._is_local = isinstance(self._files, pafs.LocalFileSystem)

    def read(self) -> _Holder | None:
        """Return who holds the lease, if anybody does."""
        try:
            return _Holder(**json.loads(filesystems.read_bytes(self._files, self._path)))
        except (FileNotFoundError, ValueError, TypeError):
            # There is no file, or something else wrote it.
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
        filesystems.write_bytes(self._files, self._path, content.encode())

    def clear(self) -> None:
        self._files.delete_file(self._path)
        if self._is_local:
            # Fails if the folder has checkpoints; the caller ignores that.
            os.rmdir(self._root)

    def is_held_by(self, attempt: str) -> bool:
        holder = self.read()
        return holder is not None and holder.attempt == attempt

    def claim(self, new_holder: _Holder, silent_holder: _Holder | None) -> None:
        """Take the lease; raises a CheckpointError if an attempt holds it that is not known to be dead.

        Parameters
        ----------
        silent_holder : an attempt on another machine that is taken for dead; None: there is none.
        """
        try:
            filesystems.make_folder(self._files, self._root)
            with locked(Path(self._path)) if self._is_local else contextlib.nullcontext():
                holder = self.read()
                if holder is not None and holder != silent_holder and holder.is_alive is not False:
                    raise self._already_running(holder)
                self.write(new_holder)
        except OSError as error:
            raise filesystems.UnusableLocation(
                f"Checkpoints cannot be written to {self._location}: {error}. Set checkpoint.location to another place."
            ) from error

    def wait_for_silence(self, notify: Callable[[str], None]) -> _Holder | None:
        """Wait until a holder on another machine can be taken for dead, and return it; None: there is none.

        Raises
        ------
        AlreadyRunning : if it is alive.
        """
        holder = self.read()
        if holder is None or holder.is_alive is not None:
            return None

        notify(f"waiting {PATIENCE:g} s to see whether process {holder.process} on {holder.host} is still running this")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and (current := self.read()) is not None:
            if current != holder:
                raise self._already_running(current)
            time.sleep(_POLL)
        return holder

    def _already_running(self, holder: _Holder) -> AlreadyRunning:
        return AlreadyRunning(
            f"The run whose checkpoints are in {self._location} is already running as process {holder.process} on "
            f"{holder.host} since {holder.since}. Wait for it to end, or stop it there."
        )


def _machine() -> str:
    """Return an id of this machine, and of a container on it: where a process id means one process."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        parts += [boot_id, os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _start_time(process: int) -> str:
    """Return when a process of this machine started, in clock ticks; empty if there is none, or it has ended."""
    with contextlib.suppress(OSError):
        # After the program's name, which may have spaces and brackets; `starttime` is field 22 of proc(5), `state` 3.
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state == "Z" else fields[18]

    # Without /proc, all that can be told is whether there is a process of this id.
    with contextlib.suppress(OSError):
        if not Path("/proc/self").exists():
            os.kill(process, 0)
            return "once"
    return ""
