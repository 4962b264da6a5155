"""Augmentations of a user's own, importable by name in actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raypfl.learning.augmentation import Augmentation


@dataclass(frozen=True, kw_only=True)
class Brighter(Augmentation):
    """Adds to all pixels of an image."""

    by: float = 1.0
    draws: ClassVar[int] = 1

    def __call__(self, images, u, black):
        return images + self.by * u[:, :, None, None].to(images)


class Smaller(Brighter):
    """One that cannot work."""

    def __call__(self, images, u, black):
        return images[..., 1:]
