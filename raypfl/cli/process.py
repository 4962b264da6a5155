"""The process of the command ``raypfl``, and how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from raypfl.cli.app import main

FLUSH_FAILED = 120
"""The exit status with which Python itself ends if the output could not be written."""


def command() -> NoReturn:
    """Entry point of the command: :func:`main`, and the end of its process."""
    status = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        status = end.code or 0
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process as Python does, except that objects are not torn down.

    Tearing them down took 3 of the 17 s of CPU time of a run of one round, nearly all in the garbage collector.
    """
    # Waits for threads, as Python would; there is no public function that also ends idle ones of thread pools.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        status = status or FLUSH_FAILED
    os._exit(status)
