"""Steps of `benchmarks.gpu` that end badly; a process that takes one imports nothing slow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from benchmarks.gpu.journal import Row
from benchmarks.gpu.steps import Options


def hang(options: Options) -> Iterator[Row]:
    """Find something, and come to no end."""
    yield {"found": 1}
    time.sleep(600)


def fail(options: Options) -> Iterator[Row]:
    """Find something, and fail."""
    yield {"found": 2}
    raise ValueError("no such kernel")


def crash(options: Options) -> Iterator[Row]:
    """Find something, and crash."""
    yield {"found": 3}
    os.abort()


def crash_at(network: str) -> Row:
    """Break the process."""
    os._exit(3)


def process_of(network: str) -> Row:
    """Return this process's number."""
    return {"process": os.getpid()}
