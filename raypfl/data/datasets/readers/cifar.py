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
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class _Cifar(PublishedReader):
    home = "https://www.cs.toronto.edu/~kriz/cifar.html"


@DATASETS.register("cifar10")
class Cifar10(_Cifar):
    """60,000 colour images, 32x32, of 10 classes, 10,000 of them test images; ``cifar-10-batches-py`` in data.root."""

    title, torchvision = "CIFAR-10", "CIFAR10"

    def names(self) -> list[str]:
        batches = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
        return [f"cifar-10-batches-py/{name}" for name in batches]

    def read(self) -> RawData:
        return _read(self.paths(), "labels", "label_names")


@DATASETS.register("cifar100")
@dataclass(frozen=True, kw_only=True)
class Cifar100(_Cifar):
    """60,000 colour images, 32x32, of 100 classes, 10,000 of them test images; ``cifar-100-python`` in data.root.

    Attributes
    ----------
    variant : ``fine``, the 100 classes, or ``coarse``, the 20 superclasses.
    """

    variant: Literal["fine", "coarse"] = "fine"

    title, torchvision = "CIFAR-100", "CIFAR100"

    def names(self) -> list[str]:
        return [f"cifar-100-python/{name}" for name in ("train", "test", "meta")]

    def read(self) -> RawData:
        return _read(self.paths(), f"{self.variant}_labels", f"{self.variant}_label_names")


def _read(files: list[Path], label: str, names: str) -> RawData:
    *batches, meta = files
    class_names = _unpickled(meta).get(names)
    if not isinstance(class_names, list):
        raise DataError(f"{meta} has no list called {names!r}.")
    parts = [_batch(path, label, len(class_names)) for path in batches]
    is_test = [path.name.startswith("test") for path in batches]
    return RawData(
        inputs=[pixels for pixels, _ in parts],
        labels=np.concatenate([labels for _, labels in parts]),
        class_names=class_names,
        test_mask=np.repeat(is_test, [len(labels) for _, labels in parts]),
    )


def _batch(path: Path, label: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    content = _unpickled(path)
    pixels, labels = content.get("data"), content.get(label)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3072:
        found = f"{pixels.dtype}{list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"'data' in {path} is {found}, not uint8[n, 3072], the pixels of 32x32 colour images.")
    if not isinstance(labels, list | np.ndarray):
        raise DataError(f"{path} has no list of {label!r}.")
    if len(labels) != len(pixels):
        lacking = "label" if len(labels) < len(pixels) else "image"
        row = min(len(labels), len(pixels))
        raise DataError(f"{path} has {len(pixels)} images, but {len(labels)} {label}; row {row} has no {lacking}.")
    return pixels.reshape(-1, 3, 32, 32), checked_labels(np.asarray(labels), num_classes, str(path))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which a CIFAR batch does not")
        return super().find_class(module, name)


def _unpickled(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle may raise anything
        raise DataError(f"{path} is damaged: {error}. Remove it and get the data set again.") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}, not a batch of CIFAR.")
    return content
