"""Clipping and noise: of a batch's per-sample gradients, and of the sum of clients' updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.transfer import to_device
from raypfl.learning.optimizers import StepDraws
from raypfl.learning.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class NoisySum:
    """DP-SGD's gradient (Abadi et al. 2016): ``(sum of clipped per-sample gradients + noise) / expected``.

    Attributes
    ----------
    clip : the largest norm of a sample's gradient.
    deviation : the standard deviation of the noise.
    expected : the expected batch size; the actual one is not public.
    """

    clip: float
    deviation: float
    expected: float

    def reduce(self, gradients: Tensor, weight: Tensor) -> Tensor:
        """Return the sum ``[..., P]`` of clipped ``gradients[..., n, P]``; samples of weight 0 are padding."""
        return (clipped(gradients, self.clip) * weight[..., None]).sum(-2)

    def finish(self, total: Tensor, count: Tensor, draws: StepDraws) -> Tensor:
        """Return a batch's gradient ``[..., P]``."""
        if self.deviation:
            total = total + self.deviation * draws.normal()
        return total / self.expected


def clipped(rows: Tensor, clip: float) -> Tensor:
    """Scale rows ``[..., P]`` with a norm above `clip` to that norm."""
    return rows * (clip / rows.norm(dim=-1, keepdim=True)).clamp_max(1.0)


def clipped_updates(rows: Tensor, start: Tensor, settings: PrivacySettings) -> Tensor:
    """Clip the updates of clients that returned ``rows[K, ...]`` from the same ``start[...]``."""
    updates = (rows - start).flatten(1)
    return start + clipped(updates, settings.clip).view_as(rows)


def server_noise(like: Tensor, settings: PrivacySettings, clients: int, seed: int, name: str, *path: int) -> Tensor:
    """Draw noise for a mean over `clients`, in the shape of `like`; keyed by `name` and `path`, such as the round."""
    generator = torch.Generator().manual_seed(rng.key(seed, "privacy " + name, *path))
    draws = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return to_device(draws.numpy(), like.device) * (settings.deviation / clients)
