"""Augmentations as users write them, one of them faulty on purpose, importable by name in actors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raypfl.learning.augmentation import Augmentation


@dataclass(frozen=True, kw_only=True)
class Brighter(Augmentation):
    """Add a random number between 0 and `by` to all pixels of an image."""

    by: float = 1.0
    draws: ClassVar[int] = 1

    def __call__(self, images, u, black):
        return images + self.by * u[:, :, None, None].to(images)


class ChangesShape(Brighter):
    """A faulty augmentation: it removes a column of the image."""

    def __call__(self, images, u, black):
        return images[..., 1:]
