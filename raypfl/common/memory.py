"""Memory of a GPU that runs out."""

from __future__ import annotations

import torch

from raypfl.common.errors import OutOfMemory

_SAID = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",  # before cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""How CUDA's libraries say it; torch's allocator has a class for it."""


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a GPU's memory is too small."""
    if isinstance(error, torch.OutOfMemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)
