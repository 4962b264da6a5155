"""Recordings on a CPU: the operations below vmap and autograd, as a function of Python code."""

from __future__ import annotations

from collections.abc import Callable

from raypfl.learning.recording.operations import OperationRecorder
from raypfl.learning.recording.plans import plan_of


class Replays:
    """Records what work does to tensors, twice: only what was the same both times is repeated.

    So work that depends on anything else, such as a count that a loss keeps, is done as before. Tensors that the work
    knows must stay the same objects; their values may change.
    """

    warm_up = 0
    taken = 2
    fewest = 16

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        first = OperationRecorder()
        with first:
            work()
        second = OperationRecorder()
        with second:
            work()
        return plan_of(second).function(second) if first.is_repeated_by(second) else work
