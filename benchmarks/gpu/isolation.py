"""Calls in another process: an error of CUDA, such as a misaligned address, ends all later work of its process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from benchmarks.gpu.journal import Row
from raypfl.clients.gpu_errors import gpu_failure


class Isolated:
    """Calls functions that return a row in another process, and in a new one as soon as CUDA has failed there."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, function: Callable[..., Row], *arguments: Any) -> Row:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            row, is_broken = self._pool.submit(_call, function, arguments).result()
        except BrokenProcessPool:
            row = {"about": str(arguments[0]), "right": False, "error": "the process died"}
            is_broken = True
        if is_broken:
            self.close()
        return row

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _call(function: Callable[..., Row], arguments: tuple[Any, ...]) -> tuple[Row, bool]:
    """Return a function's row, and whether CUDA has failed in this process."""
    return function(*arguments), bool(gpu_failure())


def in_a_line(error: Exception) -> str:
    """Return the type and the first words of an error's message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
