"""Recognise a GPU's out-of-memory errors."""

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
