"""Torch's global random streams, of the CPU and of one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from raypfl.common.exclusive import exclusive


@contextlib.contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """While active, this thread alone may seed torch's global random streams by key; they are restored at the end."""
    gpus = [device] if device.type == "cuda" else []
    with exclusive, torch.random.fork_rng(devices=gpus):
        yield


def seed(device: torch.device, key: int) -> None:
    """Seed torch's global streams.

    ``torch.manual_seed`` also seeds those of all GPUs, and formats its caller's stack for every kind of device, whether
    there is one or not: a millisecond, which is as long as a small client's step.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.manual_seed(key)


def state(device: torch.device) -> Tensor:
    """Return the state of torch's global streams, on the CPU and on `device`."""
    cpu_state = torch.default_generator.get_state()
    if device.type != "cuda":
        return cpu_state
    return torch.cat([cpu_state, torch.cuda.get_rng_state(device)])
