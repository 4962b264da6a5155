"""MNIST, FashionMNIST and EMNIST, in the IDX files of LeCun et al. (1998)."""

from __future__ import annotations

import gzip
import string
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.labels import checked_labels, require_equal_lengths
from raypfl.data.datasets.published import PublishedReader
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS

_DIGITS = list(string.digits)
_UPPER = list(string.ascii_uppercase)
_LOWER = list(string.ascii_lowercase)
# EMNIST's merged variants do not tell the other lower-case letters from their capitals (Cohen et al. 2017).
_DISTINCT = [letter for letter in _LOWER if letter not in "cijklmopsuvwxyz"]
_EMNIST_CLASSES = {
    "balanced": _DIGITS + _UPPER + _DISTINCT,
    "bymerge": _DIGITS + _UPPER + _DISTINCT,
    "byclass": _DIGITS + _UPPER + _LOWER,
    "letters": _LOWER,
    "digits": _DIGITS,
    "mnist": _DIGITS,
}


class _IdxReader(PublishedReader):
    """Four files: training images and labels, test images and labels."""

    classes: ClassVar[list[str]] = _DIGITS

    def names(self) -> list[str]:
        return self._names("train", "t10k")

    def _names(self, train: str, test: str) -> list[str]:
        names = []
        for split in (train, test):
            names += [f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte"]
        return [f"{self.torchvision}/raw/{name}" for name in names]

    def read(self) -> RawData:
        return _read(self.paths(), self.classes)


@DATASETS.register("mnist")
class Mnist(_IdxReader):
    """70,000 handwritten digits, 28x28 grey, 10,000 of them test images; ``MNIST/raw`` in data.root."""

    title = "MNIST"
    torchvision = "MNIST"
    home = "https://github.com/cvdfoundation/mnist"


@DATASETS.register("fashion_mnist")
class FashionMnist(_IdxReader):
    """70,000 articles of clothing, 28x28 grey, 10,000 of them test images; ``FashionMNIST/raw`` in data.root."""

    title = "FashionMNIST"
    torchvision = "FashionMNIST"
    home = "https://github.com/zalandoresearch/fashion-mnist"
    classes: ClassVar[list[str]] = [
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ]  # fmt: skip


@DATASETS.register("emnist")
@dataclass(frozen=True, kw_only=True)
class Emnist(_IdxReader):
    """Handwritten letters and digits, 28x28 grey, upright; ``EMNIST/raw`` in data.root.

    Attributes
    ----------
    variant : choice of classes: ``balanced`` and ``bymerge`` have 47, ``byclass`` 62, ``letters`` 26, the others 10.
    """

    variant: Literal["balanced", "bymerge", "byclass", "letters", "digits", "mnist"] = "balanced"

    title = "EMNIST"
    torchvision = "EMNIST"
    home = "https://www.nist.gov/itl/products-and-services/emnist-dataset"

    def names(self) -> list[str]:
        return self._names(f"emnist-{self.variant}-train", f"emnist-{self.variant}-test")

    def torchvision_options(self) -> dict[str, Any]:
        return {"split": self.variant}

    def read(self) -> RawData:
        # The published images lie on their sides, and letters are counted from 1.
        first = 1 if self.variant == "letters" else 0
        return _read(self.paths(), _EMNIST_CLASSES[self.variant], first, transpose=True)


def _read(files: list[Path], class_names: list[str], first_label: int = 0, transpose: bool = False) -> RawData:
    inputs = []
    labels = []
    for images_file, labels_file in (files[:2], files[2:]):
        pixels = _read_idx(images_file, 3)
        split_labels = _read_idx(labels_file, 1)
        require_equal_lengths(len(pixels), images_file, len(split_labels), labels_file)

        if transpose:
            pixels = pixels.transpose(0, 2, 1)
        inputs.append(pixels[:, None])
        labels.append(checked_labels(split_labels, len(class_names), str(labels_file), first_label))

    train_size, test_size = (images.shape[2:] for images in inputs)
    if train_size != test_size:
        raise DataError(
            f"{files[2]} holds images of {test_size[0]} x {test_size[1]}, but {files[0]} of {train_size[0]} x "
            f"{train_size[1]}; get the one that is wrong again."
        )
    test_mask = np.repeat([False, True], [len(split_labels) for split_labels in labels])
    return RawData(inputs, np.concatenate(labels), class_names, test_mask=test_mask)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Return the array in an IDX file of bytes, packed or not."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it and get the data set again.") from error

    # Two zeros, 8 for the type unsigned byte, the number of dimensions; then each length, in 4 bytes.
    header_bytes = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header_bytes:
        raise DataError(
            f"{path} is not an IDX file of bytes in {dimensions} dimensions; it starts with {content[:4]!r}."
        )

    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", dimensions, offset=4))
    array_bytes = len(content) - header_bytes
    if array_bytes != np.prod(shape, dtype=np.int64):
        index = array_bytes // max(int(np.prod(shape[1:], dtype=np.int64)), 1)
        raise DataError(f"{path} should hold {shape[0]} items, but is cut short, or too long, at index {index}.")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)
