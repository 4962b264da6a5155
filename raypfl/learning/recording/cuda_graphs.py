"""Recordings on a GPU: CUDA graphs, which launch all kernels of a step at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch

from raypfl.learning.recording.replays import StepSignature


class CannotRecord(Exception):
    """Error for work that cannot be recorded; the message says why."""


class CudaGraphs:
    """Records CUDA graphs, one after the other in the same memory; only the latest may be replayed.

    A recording takes about two steps' time on the host.
    """

    warm_up = 2
    """How often work is done before it is recorded, so that libraries have allocated what they keep."""

    min_steps = 6
    """The fewest repetitions that are worth a recording."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._latest: torch.cuda.CUDAGraph | None = None

    def do(self, work: Callable[[], None], times: int, signature: StepSignature | None = None) -> bool:
        """See :class:`Recorder`; a recording is never reused."""
        again = work
        is_recorded = True
        if times >= self.min_steps:
            for _ in range(self.warm_up):
                work()
            times -= self.warm_up
            try:
                again = self.record(work)
                times -= 1
            except CannotRecord as error:
                is_recorded = False
                warnings.warn(
                    "engine.cuda_graphs is true, but a training step cannot be recorded, so its kernels are launched "
                    f"one by one from now on. torch says: {error}",
                    stacklevel=2,
                )
        for _ in range(times):
            again()
        return is_recorded

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do work once; return a function that repeats its operations on the same memory.

        Raises
        ------
        CannotRecord : if the work cannot be recorded; it was not done.
        """
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
