"""Training steps that are recorded once and then repeated, on a GPU as a CUDA graph.

A small step is launch-bound: the host takes longer to launch its 66 to 88 kernels than the GPU to run them. A graph
launches them all at once. A recording repeats the same operations on the same memory, and none of the Python around
them, so whatever differs between two steps has to follow from tensors that the step itself moves on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

WARM_UP = 2
"""Steps before a recording, in which libraries allocate what they keep."""

FEWEST = 4
"""Fewest steps for which a recording is made: making it takes about two steps' time on the host."""


class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does the work's operations again on the same memory; do not run them now.

        Raises
        ------
        RuntimeError : if the work cannot be recorded.
        """
        ...


class CudaGraphs:
    """Records CUDA graphs, one after the other in the same memory; only the latest may be replayed."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._latest: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # The latest graph lives until this one has taken over its memory.
        pool = None if self._latest is None else self._latest.pool()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)

        # torch.cuda.graph would also wait for the GPU and empty the allocator's cache, each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        self._latest = graph
        return graph.replay


def repeat(step: Callable[[Tensor], None], steps: range, device: torch.device, recorder: Recorder) -> bool:
    """Take steps, the first few one by one, and the others from a recording if they are enough.

    Parameters
    ----------
    step : takes the step whose number is in ``int64[1]`` on the device; it must not read it.

    Returns
    -------
    False if the step cannot be recorded; then all steps were taken one by one, with a warning.
    """
    number = torch.full((1,), steps.start, dtype=torch.int64, device=device)

    def work() -> None:
        step(number)
        number.add_(1)

    if len(steps) - WARM_UP < FEWEST:
        for _ in steps:
            work()
        return True

    for _ in range(WARM_UP):
        work()
    again = work
    is_recorded = True
    try:
        again = recorder.record(work)
    except RuntimeError as error:
        is_recorded = False
        reason = str(error).partition("\n")[0]
        warnings.warn(
            "engine.cuda_graphs is true, but a training step cannot be recorded, so its kernels are launched one by "
            f"one from now on. torch says: {reason}",
            stacklevel=2,
        )
    for _ in range(len(steps) - WARM_UP):
        again()
    return is_recorded
