"""Training steps that are recorded once and then repeated, without the Python around their operations.

A small step takes longer on the host than it computes: on a GPU, 66 to 88 kernels have to be launched; on a CPU, vmap,
autograd and the method's code take more than half of the time. The operations are the same in every step of a group, on
tensors of the same shapes, so repeating them in the same order gives the same bits. Whatever differs between two steps
has to follow from tensors that the step itself moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from raypfl.learning.recording.cuda_graphs import CudaGraphs
from raypfl.learning.recording.python_state import may_keep_state
from raypfl.learning.recording.replays import Replays, StepSignature
from raypfl.learning.recording.step_keys import key_of_gradients, key_of_steps, numbered, shared_tensors

__all__ = [
    "CudaGraphs",
    "Recorder",
    "Replays",
    "StepSignature",
    "compute",
    "key_of_gradients",
    "key_of_steps",
    "may_keep_state",
    "numbered",
    "repeat",
    "shared_tensors",
]


class Recorder(Protocol):
    """Repeats work, from a recording if making one is worth its time."""

    def do(self, work: Callable[[], None], times: int, signature: StepSignature | None) -> bool:
        """Do work this many `times`; return False if it cannot be recorded, so that this recorder is of no use for it.

        `signature` : the signature of the work, by which a recording of earlier work is found; None: none is reused.
        """
        ...


def repeat(
    step: Callable[[Tensor], None],
    steps: range,
    device: torch.device,
    recorder: Recorder,
    signature: StepSignature | None,
) -> bool:
    """Take steps; parameters and result are as in :meth:`Recorder.do`.

    `step` : takes the step whose number is in ``int64[1]`` on the device; it must not read it.
    """
    number = torch.full((1,), steps.start, dtype=torch.int64, device=device)

    def work() -> None:
        step(number)
        number.add_(1)

    if signature is not None:
        signature = replace(signature, inputs={**signature.inputs, "number": number})
    return recorder.do(work, len(steps), signature)


def compute(
    function: Callable[[], Sequence[Tensor]],
    results: Sequence[Tensor],
    recorder: Recorder,
    key: Hashable,
    inputs: Mapping[str, Tensor],
) -> None:
    """Write what a function returns into `results`, from a recording if its key has come before.

    Parameters
    ----------
    key : equal for functions with the same operations.
    inputs : the tensors that the function uses, by name.
    """

    def work() -> None:
        for result, value in zip(results, function(), strict=True):
            result.copy_(value)

    recorder.do(work, 1, StepSignature.of(key, {**inputs, **numbered("result", results)}, {}))
