"""What is said when a process is ended without being able to say it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

_WATCH = 'read -r over || printf "%s\\n" "$0" >&2'


@contextlib.contextmanager
def last_words(text: str) -> Iterator[None]:
    """Within: if this process is killed, or ended by a library's C++ code as Ray's may, another one says why on stderr.

    Parameters
    ----------
    text : how to go on.
    """
    told = f"raypfl was ended from outside: killed, or out of memory, or by Ray, a process of which died. {text}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no room for one more process is no reason not to begin
            # In a session of its own, so that what is sent to our process group does not reach it.
            watcher = subprocess.Popen(["/bin/sh", "-c", _WATCH, told], stdin=subprocess.PIPE, start_new_session=True)
            stack.callback(watcher.communicate, b"over\n")
        yield
