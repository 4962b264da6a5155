"""Images and labels in a pair of ``.npy`` files: CIFAR-10.1, CIFAR-10-C, and others in their form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, Self

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.labels import checked_labels, class_count, require_equal_lengths
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers.cifar import CIFAR10_CLASSES
from raypfl.data.datasets.source import DATASETS, Reader

# Bytes of images in memory at a time.
_BLOCK_BYTES = 12 << 20
_SEVERITIES = 5
_CHANNELS = (1, 3)


class _ImagePairReader(Reader):
    """Reads a file of images and a file of their labels."""

    @abstractmethod
    def names(self) -> tuple[str, str]:
        """Return names of the file of images and of the file of labels."""

    def paths(self) -> list[Path]:
        root = self.config.folder("the .npy files")
        for name in self.names():
            if not (root / name).is_file():
                present = sorted(path.name for path in root.glob("*.npy"))
                listing = ", ".join(present[:5]) or "no .npy file"
                raise ConfigError(f"There is no {name} in {root}, which data.root names; there is {listing}.")
        return [root / name for name in self.names()]

    def open(self) -> tuple[np.ndarray, np.ndarray]:
        """Return images ``uint8[n, H, W]`` or ``[n, H, W, C]``, mapped into memory, and labels."""
        images_file, labels_file = self.paths()
        pixels = open_npy(images_file)
        labels = open_npy(labels_file)

        shape = f"{pixels.dtype}{list(pixels.shape)}"
        if pixels.ndim == 4 and pixels.shape[1] in _CHANNELS and pixels.shape[3] not in _CHANNELS:
            pixels = pixels.transpose(0, 2, 3, 1)
        if pixels.dtype != np.uint8 or pixels.ndim < 3 or pixels.shape[3:] not in ((), (1,), (3,)):
            raise DataError(
                f"{images_file} holds {shape}, not images as uint8[n, H, W], uint8[n, H, W, 3] or uint8[n, 3, H, W]."
            )

        # Labels of more dimensions are refused later, where labels are checked.
        if labels.ndim == 1:
            require_equal_lengths(len(pixels), images_file, len(labels), labels_file)
        return pixels, labels


@DATASETS.register("npy")
@dataclass(frozen=True, kw_only=True)
class Npy(_ImagePairReader):
    """Two files in data.root: images and labels.

    Images are ``uint8[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]`` with 1 or 3 channels; channels are last if both
    could be. Labels are integers ``[n]`` from 0.

    Attributes
    ----------
    image : name of the file of images.
    label : name of the file of labels.
    """

    image: str = "image.npy"
    label: str = "labels.npy"

    def names(self) -> tuple[str, str]:
        return self.image, self.label

    def read(self) -> RawData:
        pixels, labels = self.open()
        _, labels_file = self.paths()
        labels = checked_labels(labels, None, str(labels_file))
        num_classes = class_count([(str(labels_file), labels)])
        return RawData(_blocks(pixels), labels, [str(label) for label in range(num_classes)])


class _Cifar10TestReader(_ImagePairReader):
    """Reads test images for CIFAR-10's classes, in its shape."""

    def read(self) -> RawData:
        pixels, labels = self.open()
        images_file, labels_file = self.paths()
        if pixels.shape[1:] != (32, 32, 3):
            raise DataError(
                f"{images_file} holds images as uint8{list(pixels.shape)}, but CIFAR-10's are uint8[n, 32, 32, 3]; get "
                f"the file again, or read it with data.name=npy."
            )
        labels = checked_labels(labels, len(CIFAR10_CLASSES), str(labels_file))
        rows = self.rows(len(pixels))
        return RawData(_blocks(pixels[rows]), labels[rows], CIFAR10_CLASSES)

    def rows(self, count: int) -> slice:
        """Return the rows that are read, of `count` images."""
        return slice(count)


@DATASETS.register("cifar10_1")
@dataclass(frozen=True, kw_only=True)
class Cifar10Point1(_Cifar10TestReader):
    """About 2,000 new images for CIFAR-10's classes (Recht et al. 2018); ``cifar10.1_v6_data.npy`` and its labels.

    Attributes
    ----------
    variant : version of the data set: ``v6``, the usual one, or ``v4``.
    """

    variant: Literal["v6", "v4"] = "v6"

    def names(self) -> tuple[str, str]:
        return f"cifar10.1_{self.variant}_data.npy", f"cifar10.1_{self.variant}_labels.npy"


@DATASETS.register("cifar10_c")
@dataclass(frozen=True, kw_only=True)
class Cifar10C(_Cifar10TestReader):
    """CIFAR-10's test images under a corruption, in 5 severities (Hendrycks and Dietterich 2019).

    Attributes
    ----------
    image : file of the corruption, such as ``gaussian_noise.npy``; or ``all`` corruptions, one after the other.
    variant : severity of the corruption, 1 to 5; None: all of them.
    """

    image: str | None = None
    variant: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant is not None and self.variant not in range(1, _SEVERITIES + 1):
            raise ConfigError(f"data.variant is {self.variant!r}, but CIFAR-10-C's severities are 1 to {_SEVERITIES}.")

    def names(self) -> tuple[str, str]:
        if self.image is None:
            raise ConfigError(
                "CIFAR-10-C has a file for each corruption: name one in data.image (for a pool, in its image), such as "
                "'gaussian_noise.npy', or make a pool of each with a star in the pool's name, as in 'ood/*'."
            )
        return self.image, "labels.npy"

    def paths(self) -> list[Path]:
        paths: list[Path] = []
        for reader in self._corruption_readers():
            paths += super(Cifar10C, reader).paths()
        # All corruptions share the file of labels.
        return list(dict.fromkeys(paths))

    def read(self) -> RawData:
        corruptions = [super(Cifar10C, reader).read() for reader in self._corruption_readers()]
        inputs = chain.from_iterable(raw.blocks() for raw in corruptions)
        labels = np.concatenate([raw.labels for raw in corruptions])
        return RawData(inputs, labels, CIFAR10_CLASSES)

    def _corruption_readers(self) -> list[Self]:
        """Return a reader for each file of images."""
        if self.image != "all":
            return [self]
        root = self.config.folder("the .npy files")
        files = sorted(path.name for path in root.glob("*.npy") if path.name != "labels.npy")
        if not files:
            raise ConfigError(f"There is no .npy file of a corruption in {root}, which data.root names.")
        return [replace(self, image=file) for file in files]

    def rows(self, count: int) -> slice:
        if self.variant is None:
            return super().rows(count)

        images_per_severity, remainder = divmod(count, _SEVERITIES)
        if remainder:
            raise DataError(
                f"{self.image} holds {count} images, not {_SEVERITIES} severities of one length; get it again."
            )
        return slice((self.variant - 1) * images_per_severity, self.variant * images_per_severity)


def open_npy(path: Path) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped into memory."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged, or not a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} has several arrays, as .npz files do; save each by np.save in a file of its own.")
    return array


def _blocks(pixels: np.ndarray) -> Iterator[np.ndarray]:
    """Yield images in blocks ``uint8[n, C, H, W]``."""
    step = max(_BLOCK_BYTES // pixels[0].nbytes, 1)
    for start in range(0, len(pixels), step):
        block = pixels[start : start + step]
        yield block[:, None] if block.ndim == 3 else block.transpose(0, 3, 1, 2)
