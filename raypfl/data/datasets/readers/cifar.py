"""CIFAR-10 and CIFAR-100, in the pickled batches of their authors (Krizhevsky 2009)."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.labels import checked_labels
from raypfl.data.datasets.published import PublishedReader
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS

# The only classes that a batch may contain; anything else in a pickle could run code.
_ALLOWED_CLASSES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class _CifarReader(PublishedReader):
    home = "https://www.cs.toronto.edu/~kriz/cifar.html"


@DATASETS.register("cifar10")
class Cifar10(_CifarReader):
    """60,000 colour images, 32x32, of 10 classes, 10,000 of them test images; ``cifar-10-batches-py`` in data.root."""

    title = "CIFAR-10"
    torchvision = "CIFAR10"

    def names(self) -> list[str]:
        batches = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
        return [f"cifar-10-batches-py/{name}" for name in batches]

    def read(self) -> RawData:
        return _read(self.paths(), labels_key="labels", names_key="label_names")


@DATASETS.register("cifar100")
@dataclass(frozen=True, kw_only=True)
class Cifar100(_CifarReader):
    """60,000 colour images, 32x32, of 100 classes, 10,000 of them test images; ``cifar-100-python`` in data.root.

    Attributes
    ----------
    variant : kind of classes: ``fine``, the 100 classes, or ``coarse``, the 20 superclasses.
    """

    variant: Literal["fine", "coarse"] = "fine"

    title = "CIFAR-100"
    torchvision = "CIFAR100"

    def names(self) -> list[str]:
        return [f"cifar-100-python/{name}" for name in ("train", "test", "meta")]

    def read(self) -> RawData:
        return _read(self.paths(), labels_key=f"{self.variant}_labels", names_key=f"{self.variant}_label_names")


def _read(files: list[Path], labels_key: str, names_key: str) -> RawData:
    *batch_files, meta_file = files
    class_names = _unpickle(meta_file).get(names_key)
    if not isinstance(class_names, list):
        raise DataError(f"{meta_file} has no list called {names_key!r}.")

    batches = [_read_batch(path, labels_key, len(class_names)) for path in batch_files]
    is_test = [path.name.startswith("test") for path in batch_files]
    return RawData(
        inputs=[images for images, _ in batches],
        labels=np.concatenate([labels for _, labels in batches]),
        class_names=class_names,
        test_mask=np.repeat(is_test, [len(labels) for _, labels in batches]),
    )


def _read_batch(path: Path, labels_key: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``uint8[n, 3, 32, 32]`` and labels ``int64[n]``."""
    content = _unpickle(path)
    pixels = content.get("data")
    labels = content.get(labels_key)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        shape = f"{pixels.dtype}{list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"'data' in {path} is {shape}, not uint8[n, 3072], the pixels of 32x32 colour images.")
    if not isinstance(labels, list | np.ndarray):
        raise DataError(f"{path} has no list of {labels_key!r}.")
    if len(labels) != len(pixels):
        lacking = "label" if len(labels) < len(pixels) else "image"
        index = min(len(labels), len(pixels))
        raise DataError(
            f"{path} has {len(pixels)} images, but {len(labels)} {labels_key}; index {index} has no {lacking}."
        )

    images = pixels.reshape(-1, 3, 32, 32)
    return images, checked_labels(np.asarray(labels), num_classes, str(path))


class _Unpickler(pickle.Unpickler):
    """An unpickler that refuses everything but NumPy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED_CLASSES:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which a CIFAR batch does not")
        return super().find_class(module, name)


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
    # A damaged pickle may raise anything.
    except Exception as error:
        raise DataError(f"{path} is damaged: {error}. Remove it and get the data set again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a batch of CIFAR.")
    return content
