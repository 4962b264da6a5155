"""Copies from the host's memory to a device; those to a GPU are asynchronous, from pinned memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import MethodError


def host_memory(shape: tuple[int, ...], dtype: np.dtype, device: torch.device) -> Tensor:
    """Return uninitialised memory of the host, to be filled for a copy to `device`: pinned for a GPU.

    PyTorch keeps pinned memory for later use, and does not give it away before a copy that reads it is done.
    """
    if device.type != "cuda":
        return torch.from_numpy(np.empty(shape, dtype))
    torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
    return torch.empty(shape, dtype=torch_dtype, pin_memory=True)


def to_device(rows: np.ndarray, device: torch.device) -> Tensor:
    """Return the rows on a device: on the CPU without a copy, on a GPU as an asynchronous copy."""
    if device.type != "cuda":
        tensor = torch.from_numpy(rows)
        return tensor if device.type == "cpu" else tensor.to(device)
    staged = host_memory(rows.shape, rows.dtype, device)
    staged.numpy()[...] = rows
    return staged.to(device, non_blocking=True)


@lru_cache
def refuse_without_array(what: str, dtype: torch.dtype) -> None:
    """Raise a MethodError if NumPy, whose arrays hold messages and states, lacks a dtype, such as bfloat16."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        raise MethodError(
            f"{what} is of the type {dtype}, which NumPy lacks, so it can be neither sent nor stored; convert it, "
            "as in x.half() or x.float()."
        ) from None
