"""Recordings on a GPU: CUDA graphs, which launch all kernels of a step at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


class CannotRecord(Exception):
    """Why work cannot be recorded."""


class CudaGraphs:
    """Records CUDA graphs, one after the other in the same memory; only the latest may be replayed.

    A recording takes about two steps' time on the host.
    """

    warm_up = 2
    recorded_steps = 1
    min_steps = 6

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._latest: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # Keep the latest graph alive until this one shares its memory pool.
        pool = None if self._latest is None else self._latest.pool()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)

        # torch.cuda.graph would also wait for the GPU and empty the allocator's cache, each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException as error:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                if isinstance(error, RuntimeError):
                    raise CannotRecord(str(error).partition("\n")[0]) from error
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._latest = graph
        # What is captured does not run.
        graph.replay()
        return graph.replay
