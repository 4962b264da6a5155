"""MNIST, FashionMNIST and EMNIST, in the IDX files of LeCun et al. (1998)."""

from __future__ import annotations

import gzip
import string
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.labels import checked_labels, require_partners
from raypfl.datasets.published import Published

_DIGITS, _UPPER, _LOWER = list(string.digits), list(string.ascii_uppercase), list(string.ascii_lowercase)
# Lower-case letters that EMNIST's merged variants do not tell from their capitals (Cohen et al. 2017).
_DISTINCT = [letter for letter in _LOWER if letter not in "cijklmopsuvwxyz"]
_EMNIST_CLASSES = {
    "balanced": _DIGITS + _UPPER + _DISTINCT,
    "bymerge": _DIGITS + _UPPER + _DISTINCT,
    "byclass": _DIGITS + _UPPER + _LOWER,
    "letters": _LOWER,
    "digits": _DIGITS,
    "mnist": _DIGITS,
}
_FASHION_CLASSES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip


def _download(name: str) -> Callable[[Path, DataConfig], object]:
    def fetch(root: Path, config: DataConfig) -> object:
        from torchvision import datasets  # imports torch's operators, and is needed once

        split = {"split": _variant(config)} if name == "EMNIST" else {}
        return getattr(datasets, name)(str(root), download=True, **split)

    return fetch


def _four(folder: str, train: str = "train", test: str = "t10k") -> list[str]:
    return [f"{folder}/raw/{part}-{what}-ubyte" for part in (train, test) for what in ("images-idx3", "labels-idx1")]


def _variant(config: DataConfig) -> str:
    variant = str(config.variant or "balanced")
    if variant not in _EMNIST_CLASSES:
        raise ConfigError(f"data.variant is {variant!r}, but EMNIST's are {', '.join(_EMNIST_CLASSES)}.")
    return variant


def _emnist_files(config: DataConfig) -> list[str]:
    return _four("EMNIST", *(f"emnist-{_variant(config)}-{part}" for part in ("train", "test")))


_MNIST = Published("MNIST", "https://github.com/cvdfoundation/mnist", lambda config: _four("MNIST"), _download("MNIST"))
_FASHION = Published(
    "FashionMNIST",
    "https://github.com/zalandoresearch/fashion-mnist",
    lambda config: _four("FashionMNIST"),
    _download("FashionMNIST"),
)
_EMNIST = Published(
    "EMNIST",
    "https://www.nist.gov/itl/products-and-services/emnist-dataset",
    _emnist_files,
    _download("EMNIST"),
)


@DATASETS.register("mnist")
@reads(_MNIST.found, _MNIST.fetch)
def mnist(config: DataConfig) -> RawData:
    """70,000 handwritten digits, 28x28 grey, 10,000 of them to test on; ``MNIST/raw`` in data.root."""
    return _read(_MNIST.found(config), _DIGITS)


@DATASETS.register("fashion_mnist")
@reads(_FASHION.found, _FASHION.fetch)
def fashion_mnist(config: DataConfig) -> RawData:
    """70,000 articles of clothing, 28x28 grey, 10,000 of them to test on; ``FashionMNIST/raw`` in data.root."""
    return _read(_FASHION.found(config), _FASHION_CLASSES)


@DATASETS.register("emnist")
@reads(_EMNIST.found, _EMNIST.fetch)
def emnist(config: DataConfig) -> RawData:
    """Handwritten letters and digits, 28x28 grey, upright; ``EMNIST/raw`` in data.root.

    ``data.variant`` is balanced (47 classes), bymerge, byclass, letters, digits or mnist.
    """
    # Published lying on their sides, and letters counted from 1.
    first = 1 if _variant(config) == "letters" else 0
    return _read(_EMNIST.found(config), _EMNIST_CLASSES[_variant(config)], first, upright=True)


def _read(files: list[Path], class_names: list[str], first_label: int = 0, upright: bool = False) -> RawData:
    inputs, labels = [], []
    sides: tuple[int, ...] = ()
    for images_file, labels_file in (files[:2], files[2:]):
        pixels, classes = _idx(images_file, 3), _idx(labels_file, 1)
        require_partners(len(pixels), images_file, len(classes), labels_file)
        sides = sides or pixels.shape[1:]
        if pixels.shape[1:] != sides:
            raise DataError(
                f"{images_file} holds images of {pixels.shape[1]} x {pixels.shape[2]}, but {files[0]} of {sides[0]} x "
                f"{sides[1]}; get the one that is wrong again."
            )
        inputs.append(pixels.transpose(0, 2, 1)[:, None] if upright else pixels[:, None])
        labels.append(checked_labels(classes, len(class_names), str(labels_file), first_label))
    test_mask = np.concatenate([np.full(len(part), number == 1) for number, part in enumerate(labels)])
    return RawData(inputs, np.concatenate(labels), class_names, test_mask=test_mask)


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file of bytes, packed or not."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}. Remove it and get the data set again.") from error
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header:
        raise DataError(
            f"{path} is not an IDX file of bytes in {dimensions} dimensions; it starts with {content[:4]!r}."
        )
    shape = tuple(int(length) for length in np.frombuffer(content, ">u4", dimensions, offset=4))
    if len(content) - header != np.prod(shape, dtype=np.int64):
        row = (len(content) - header) // max(int(np.prod(shape[1:], dtype=np.int64)), 1)
        raise DataError(f"{path} should hold {shape[0]} rows, but is cut short, or too long, at row {row}.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
