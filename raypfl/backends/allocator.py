"""What a process does with the memory that it frees."""

from __future__ import annotations

import contextlib
import ctypes
import sys

LARGEST = 32 * 2**20
"""Bytes of the largest block that is kept, which is the most that glibc allows."""

KEPT = 2**30
"""Bytes of free memory that a process keeps at most."""


def keep_freed_memory() -> None:
    """Let this process keep what it frees for what it allocates next, instead of handing it back to the system.

    A step of training allocates and frees the same few megabytes again and again: activations, and a gradient as large
    as the model. By default glibc gets each larger block from the system, which clears it page by page; that may take
    a third of a convolutional network's step, and a quarter of a small network's. Elsewhere than with glibc, this does
    nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, LARGEST)
        libc.mallopt(m_trim_threshold, KEPT)
