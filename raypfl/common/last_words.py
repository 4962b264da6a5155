"""A message for the user when the process is killed and cannot print one itself."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

_WATCH = 'read -r over || printf "%s\\n" "$0" >&2'


@contextlib.contextmanager
def last_words(how_to_go_on: str) -> Iterator[None]:
    """While active, another process prints a message on stderr if this one is killed or exits in a library's C++ code.

    Parameters
    ----------
    how_to_go_on : the end of the message.
    """
    reason = "killed, out of memory, or by Ray after one of its processes died"
    message = f"raypfl was ended from outside: {reason}. {how_to_go_on}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the run is worth starting even if there is no room for one more process
            # A session of its own keeps signals to our process group away from it.
            watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, message], stdin=subprocess.PIPE, start_new_session=True
            )
            stack.callback(watcher.communicate, b"over\n")
        yield
