"""Recognise what is wrong with a GPU: too little memory, or a failure after which a process can no longer use it."""

from __future__ import annotations

import torch

from raypfl.common.errors import OutOfMemory

_CUDA_MESSAGES = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",  # before cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Messages of CUDA's libraries, which raise a RuntimeError; torch's allocator has a class of its own."""


def out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that a GPU's memory is too small."""
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CUDA_MESSAGES)


def gpu_failure() -> str:
    """Return the error after which this process can no longer use its GPU, in one line; empty if there is none.

    After a CUDA error such as an illegal memory access, every later call to CUDA in the process fails with it. After
    others, and on a CPU, nothing is lost.
    """
    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return "" if out_of_memory(error) else str(error).partition("\n")[0]
    return ""
