"""Torch's global random streams, of the CPU and of one GPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def forked(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Restores torch's global random streams on exit, so that they may be seeded by key within."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def seed(device: torch.device, key: int) -> None:
    """Seed torch's global streams.

    ``torch.manual_seed`` also seeds those of all GPUs, and formats its caller's stack for every kind of device, whether
    there is one or not: a millisecond, which is as long as a small client's step.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def state(device: torch.device) -> Tensor:
    """The state of torch's global streams, on the CPU and on `device`."""
    host = torch.default_generator.get_state()
    return torch.cat([host, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else host
