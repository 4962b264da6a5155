"""Training steps that are recorded once and then repeated, without the Python around their operations.

A small step takes longer on the host than it computes: on a GPU, 66 to 88 kernels have to be launched; on a CPU, vmap,
autograd and the method's code take more than half of the time. The operations are the same in every step of a group, on
tensors of the same shapes, so repeating them in the same order gives the same bits. Whatever differs between two steps
has to follow from tensors that the step itself moves on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from raypfl.learning.recording.cuda_graphs import CannotRecord, CudaGraphs
from raypfl.learning.recording.python_state import may_keep_state
from raypfl.learning.recording.replays import Replays, StepSignature
from raypfl.learning.recording.step_keys import key_of_steps, shared_tensors

__all__ = [
    "CannotRecord",
    "CudaGraphs",
    "Recorder",
    "Replays",
    "StepSignature",
    "key_of_steps",
    "may_keep_state",
    "repeat",
    "shared_tensors",
]


class Recorder(Protocol):
    """Records work on a device.

    Attributes
    ----------
    warm_up : the number of steps before a recording, in which libraries allocate what they keep.
    recorded_steps : the number of steps that are recorded.
    min_steps : the number of steps from which on a recording is worth the time to make it.
    """

    warm_up: int
    recorded_steps: int
    min_steps: int

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work `recorded_steps` times; return a function that repeats its operations on the same memory.

        Raises
        ------
        CannotRecord : if the work cannot be recorded; it was not done.
        """
        ...


def repeat(
    step: Callable[[Tensor], None],
    steps: range,
    device: torch.device,
    recorder: Recorder,
    signature: StepSignature | None = None,
) -> bool:
    """Take steps, the first few one by one, and the others from a recording if they are enough.

    Return False if the step cannot be recorded; then all steps were taken one by one, with a warning.

    Parameters
    ----------
    step : takes the step whose number is in ``int64[1]`` on the device; it must not read it.
    signature : the signature of the steps, without their number, by which a recording of earlier steps is found; None:
        none is reused.
    """
    number = torch.full((1,), steps.start, dtype=torch.int64, device=device)

    def work() -> None:
        step(number)
        number.add_(1)

    if signature is not None and isinstance(recorder, Replays):
        inputs = {**signature.inputs, "number": number}
        recorder.do(work, len(steps), StepSignature(signature.key, inputs))
        return True

    if len(steps) < recorder.min_steps:
        for _ in steps:
            work()
        return True

    for _ in range(recorder.warm_up):
        work()
    again = work
    remaining = len(steps) - recorder.warm_up
    is_recorded = True
    try:
        again = recorder.record(work)
        remaining -= recorder.recorded_steps
    except CannotRecord as error:
        is_recorded = False
        warnings.warn(
            "engine.cuda_graphs is true, but a training step cannot be recorded, so its kernels are launched one by "
            f"one from now on. torch says: {error}",
            stacklevel=2,
        )
    for _ in range(remaining):
        again()
    return is_recorded
