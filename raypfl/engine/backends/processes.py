"""What every process of a run does to start and to train faster."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

MAX_KEPT_BLOCK = 32 * 2**20
"""Bytes of the largest block that is kept, the most that glibc allows."""

MAX_KEPT = 2**30
"""Bytes of free memory that a process keeps at most."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While active, the garbage collector is off; afterwards it ignores all objects that exist by then.

    Modules are never garbage, and torch's alone have 200,000 objects. Scanning them again and again while others are
    imported takes a seventh of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees for its next allocations.

    A training step allocates and frees the same few megabytes again and again: activations, and a gradient as large as
    the model. By default glibc requests each larger block from the system, which clears it page by page; that may take
    a third of a convolutional network's step, and a quarter of a small network's. Without glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return

    # Constants of glibc's malloc.h.
    m_trim_threshold = -1
    m_mmap_threshold = -3
    # Other C libraries have no mallopt.
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, MAX_KEPT_BLOCK)
        libc.mallopt(m_trim_threshold, MAX_KEPT)
