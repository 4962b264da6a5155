"""Corruptions of test images in five severities, the same in every run.

Kinds and strengths follow CIFAR-10-C (Hendrycks and Dietterich 2019), for images of 32 pixels. Images are corrupted
during evaluation, with torchvision; they are not the published ones. Noise is keyed by the number of the sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng

SEVERITIES = (1, 2, 3, 4, 5)


class Corruption(NamedTuple):
    """A kind of corruption and its severity.

    Attributes
    ----------
    name : a key of `CORRUPTIONS`.
    severity : 1 to 5.
    """

    name: str
    severity: int

    def __call__(self, x: Tensor, indices: np.ndarray, scale: float) -> Tensor:
        """Corrupt images, and round them to integers.

        Parameters
        ----------
        x : the images, ``uint8[n, C, H, W]``.
        indices : the samples' numbers, which key the noise, ``int64[n]``.
        scale : the value of white.
        """
        corrupt, strengths = CORRUPTIONS[self.name]
        key = rng.key(self.severity, self.name)
        keys = rng.mix(np.asarray(indices, dtype=np.uint64) + np.uint64(key % 2**62))
        corrupted = corrupt(x.float() / scale, strengths[self.severity - 1], keys)
        return (corrupted.clamp(0, 1) * scale).round_().to(torch.uint8)


def _uniform(keys: np.ndarray, shape: torch.Size, stream: int) -> Tensor:
    """Draw numbers in (0, 1], ``float32[n, ...]``; ``keys[i]`` keys row i."""
    size = math.prod(shape[1:])
    with np.errstate(over="ignore"):
        offsets = rng.mix(np.arange(size, dtype=np.uint64) + np.uint64(stream * size))
        draws = rng.mix(keys[:, None] + offsets[None, :])
    # The upper 24 bits, as many as a float32 has. Never 0: Box and Muller's method takes the logarithm.
    return torch.from_numpy(((draws >> np.uint64(40)) + np.uint64(1)).astype(np.float32) / 2**24).reshape(shape)


def _normal(x: Tensor, keys: np.ndarray) -> Tensor:
    """Draw standard normal numbers (Box and Muller 1958)."""
    radius = (-2 * _uniform(keys, x.shape, 0).log()).sqrt()
    return (radius * (2 * math.pi * _uniform(keys, x.shape, 1)).cos()).to(x.device)


def _impulse_noise(x: Tensor, strength: float, keys: np.ndarray) -> Tensor:
    changes = _uniform(keys, x.shape, stream=0).to(x.device) <= strength
    is_white = _uniform(keys, x.shape, stream=1).to(x.device) > 0.5
    return torch.where(changes, is_white.to(x.dtype), x)


def _functional() -> Any:
    from torchvision.transforms.v2 import functional

    return functional


def _gaussian_blur(x: Tensor, strength: float, keys: np.ndarray) -> Tensor:
    # The kernel covers three standard deviations; its size must be odd, and no larger than the image.
    largest_odd_sizes = [2 * ((side - 1) // 2) + 1 for side in x.shape[-2:]]
    size = min(2 * math.ceil(3 * strength) + 1, *largest_odd_sizes)
    return _functional().gaussian_blur(x, [size, size], [strength, strength])


def _pixelate(x: Tensor, strength: float, keys: np.ndarray) -> Tensor:
    from torchvision.transforms import InterpolationMode

    small = [max(1, int(side * strength)) for side in x.shape[-2:]]
    smaller = _functional().resize(x, small, InterpolationMode.BILINEAR, antialias=True)
    # NEAREST would shift the image by up to half a pixel.
    return _functional().resize(smaller, list(x.shape[-2:]), InterpolationMode.NEAREST_EXACT)


def _jpeg(x: Tensor, strength: float, keys: np.ndarray) -> Tensor:
    pixels = (x * 255).round().to(torch.uint8).cpu()
    compressed = torch.stack([_functional().jpeg(image, int(strength)) for image in pixels])
    return (compressed.float() / 255).to(x.device)


CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float, np.ndarray], Tensor], tuple[float, ...]]] = {
    "gaussian_noise": (lambda x, s, keys: x + s * _normal(x, keys), (0.04, 0.06, 0.08, 0.09, 0.10)),
    "speckle_noise": (lambda x, s, keys: x + x * s * _normal(x, keys), (0.06, 0.10, 0.12, 0.16, 0.20)),
    "impulse_noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian_blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "brightness": (lambda x, s, _: x + s, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (lambda x, s, _: _functional().adjust_contrast(x, s), (0.75, 0.50, 0.40, 0.30, 0.15)),
    "saturation": (lambda x, s, _: _functional().adjust_saturation(x, s), (0.3, 0.1, 1.5, 2.0, 2.5)),
    "pixelate": (_pixelate, (0.95, 0.90, 0.85, 0.75, 0.65)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}
"""name -> a function that corrupts ``x[n, C, H, W]`` between 0 and 1, and its strength at each severity: standard
deviation of noise, or fraction of changed pixels; standard deviation of blur, in pixels; increase of brightness; factor
of contrast and saturation; factor of the side; quality of JPEG."""
