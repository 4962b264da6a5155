"""Random changes of training images, batch by batch on the training device.

Augmentations are applied in the order of ``data.augmentation``, to normalised images: black has a different value in
each channel, and the mean colour is 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.registry import Registry

AUGMENTATIONS = Registry("augmentation")

Colour = Literal["black", "mean"]


@dataclass(frozen=True, kw_only=True)
class Augmentation(ABC):
    """A random change of images.

    A subclass overrides `draws` and `__call__` (or, of :class:`ByChance`, `changed`); its fields are its options. A
    description names it as ``my_module:MyAugmentation``.

    Attributes
    ----------
    draws : the number of random numbers for each image.
    """

    draws: ClassVar[int]

    @abstractmethod
    def __call__(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        """Return the changed images, of the same shape; `images` itself is not modified.

        Parameters
        ----------
        images : the normalised images, ``[n, C, H, W]``.
        u : uniform random numbers in [0, 1), the only source of randomness, ``float64[n, draws]``.
        black : a black pixel, normalised, ``[C, 1, 1]``.
        """


@dataclass(frozen=True, kw_only=True)
class ByChance(Augmentation):
    """A change of some images, chosen by their first draw.

    Attributes
    ----------
    p : the probability that an image is changed.
    """

    p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigError(f"data.augmentation: p is {self.p}, but must be between 0 and 1.")

    def __call__(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        selected = (u[:, 0] < self.p)[:, None, None, None]
        return torch.where(selected, self.changed(images, u[:, 1:], black), images)

    @abstractmethod
    def changed(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        """Return all images, changed by the remaining draws ``u[n, draws - 1]``."""


@AUGMENTATIONS.register("crop")
@dataclass(frozen=True, kw_only=True)
class Crop(ByChance):
    """A random window of the image's size in the padded image, as torchvision's ``RandomCrop(size, padding=4)``.

    All (2 padding + 1)² windows are equally likely.

    Attributes
    ----------
    padding : the number of pixels on each side.
    fill : the border's colour: ``black``, as with ``RandomCrop`` before ``Normalize``, or ``mean``, as after it.
    """

    padding: int = 4
    fill: Colour = "black"
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("padding", self.padding)

    def changed(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        pad = self.padding
        canvas = _coloured(self.fill, black).expand(count, channels, height + 2 * pad, width + 2 * pad).clone()
        canvas[:, :, pad : pad + height, pad : pad + width] = images

        windows = canvas.unfold(2, height, 1).unfold(3, width, 1).permute(0, 2, 3, 1, 4, 5)
        top, left = (u * (2 * pad + 1)).long().T
        return windows[torch.arange(count, device=u.device), top, left]


@AUGMENTATIONS.register("flip")
@dataclass(frozen=True, kw_only=True)
class Flip(ByChance):
    """A horizontal flip, as torchvision's ``RandomHorizontalFlip``."""

    p: float = 0.5
    draws: ClassVar[int] = 1

    def changed(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        return images.flip(-1)


@AUGMENTATIONS.register("cutout")
@dataclass(frozen=True, kw_only=True)
class Cutout(ByChance):
    """A square of one colour, centred anywhere on the image and cut off at its edge (DeVries and Taylor 2017).

    Attributes
    ----------
    size : the side of the square in pixels.
    fill : the square's colour: ``mean``, as if cut out of normalised images, or ``black``.
    """

    size: int = 16
    fill: Colour = "mean"
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_count("size", self.size)

    def changed(self, images: Tensor, u: Tensor, black: Tensor) -> Tensor:
        rows = self._covered(u[:, 0], images.shape[2])
        columns = self._covered(u[:, 1], images.shape[3])
        hole = rows[:, None, :, None] & columns[:, None, None, :]
        return torch.where(hole, _coloured(self.fill, black), images)

    def _covered(self, u: Tensor, length: int) -> Tensor:
        """Return the rows or columns that the square covers, ``bool[n, length]``."""
        first = (u * length).long()[:, None] - self.size // 2
        position = torch.arange(length, device=u.device)
        return (position >= first) & (position < first + self.size)


def augmented(images: Tensor, augmentations: Sequence[Augmentation], u: Tensor, black: Tensor) -> Tensor:
    """Apply all augmentations to images ``[..., C, H, W]`` by their draws ``u[..., D]``."""
    flat = images.flatten(0, -4)
    remaining = u.flatten(0, -2)
    for augmentation in augmentations:
        draws = remaining[:, : augmentation.draws]
        remaining = remaining[:, augmentation.draws :]
        changed = augmentation(flat, draws, black)
        if changed.shape != flat.shape:
            raise MethodError(
                f"The augmentation {AUGMENTATIONS.name_of(type(augmentation))!r} returned {list(changed.shape)} for "
                f"images {list(flat.shape)}; it must not change their shape."
            )
        flat = changed

    return flat.reshape(images.shape)


def _coloured(fill: Colour, black: Tensor) -> Tensor:
    return black if fill == "black" else torch.zeros_like(black)


def _require_count(option: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"data.augmentation: {option} is {value}, but must be at least 1.")
