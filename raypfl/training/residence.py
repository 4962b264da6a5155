"""How much of the data lies on a process's device; what does not is copied there when it is asked for."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def room_on(device: torch.device, share: float, gpus: float) -> float:
    """Bytes of data that may lie on an actor's device; the CPU reads them where they are mapped, however many."""
    if device.type == "cpu":
        return math.inf
    return part_of_card(torch.cuda.get_device_properties(device).total_memory, share, gpus)


def part_of_card(card: int, share: float, gpus: float) -> float:
    """Bytes for the data of one actor, if those of all actors may take a `share` of a GPU's `card` bytes.

    Parameters
    ----------
    gpus : that the actor reserves; of several it computes on one.
    """
    return card * share * min(gpus, 1.0)


def moved(rows: np.ndarray, device: torch.device) -> Tensor:
    """Rows as a tensor on a device; to a GPU they go from pinned memory, while the processor goes on."""
    tensor = torch.from_numpy(rows)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
