"""Matrices with a row for each model of a group, and where their rows begin in memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 128
"""A row's address on a GPU is a multiple of this many bytes, a line of its cache. Kernels read at most 16 at a time."""


def empty_rows(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return uninitialised rows ``[..., n]`` with the dtype and on the device of `like`; on a GPU they are aligned.

    Most networks have a number of parameters that is no multiple of 4: without gaps between the rows, every other one
    would begin at an address that is no multiple of 16.
    """
    if like.device.type == "cpu":
        return torch.empty(shape, dtype=like.dtype)
    *leading, length = shape
    numbers_per_line = ALIGNMENT // like.element_size()
    stride = -(-length // numbers_per_line) * numbers_per_line
    return torch.empty((*leading, stride), dtype=like.dtype, device=like.device)[..., :length]


def aligned(rows: Tensor) -> Tensor:
    """Return rows ``[K, n]``: on a GPU an aligned copy, on the CPU as they are."""
    return rows if rows.device.type == "cpu" else empty_rows(rows.shape, rows).copy_(rows)


def copy_rows(rows: Tensor, order: Tensor | None = None) -> Tensor:
    """Return a copy of the rows, in this `order`, ``int64[k]``; on a GPU they are aligned. None: as they are."""
    rows_are_equal = rows.stride(0) == 0  # an expanded row
    if rows_are_equal and order is not None:
        rows = rows[: len(order)]
        order = None

    shape = (len(rows) if order is None else len(order), rows.shape[1])
    if rows.device.type == "cpu":
        # NumPy allocates in huge pages, ten times as fast as torch.
        copy = torch.from_numpy(np.empty(shape, rows.new_empty(0).numpy().dtype))
    else:
        copy = empty_rows(shape, rows)
    return copy.copy_(rows) if order is None else torch.index_select(rows.detach(), 0, order, out=copy)
