"""CIFAR-10 and CIFAR-100, in the pickled batches of their authors (Krizhevsky 2009)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.labels import checked_labels
from raypfl.datasets.published import Published

_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
# What a batch consists of; nothing else in a pickle is let in, as it could run code.
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def _download(name: str) -> Any:
    def fetch(root: Path, config: DataConfig) -> object:
        from torchvision import datasets  # imports torch's operators, and is needed once

        return getattr(datasets, name)(str(root), download=True)

    return fetch


def _files(folder: str, names: tuple[str, ...]) -> Any:
    return lambda config: [f"{folder}/{name}" for name in names]


_CIFAR10 = Published(
    "CIFAR-10",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    _files("cifar-10-batches-py", (*_TRAIN, "test_batch", "batches.meta")),
    _download("CIFAR10"),
)
_CIFAR100 = Published(
    "CIFAR-100",
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    _files("cifar-100-python", ("train", "test", "meta")),
    _download("CIFAR100"),
)


@DATASETS.register("cifar10")
@reads(_CIFAR10.found, _CIFAR10.fetch)
def cifar10(config: DataConfig) -> RawData:
    """60,000 colour images, 32x32, of 10 classes, 10,000 of them to test on; ``cifar-10-batches-py`` in data.root."""
    return _read(_CIFAR10.found(config), "labels", "label_names")


@DATASETS.register("cifar100")
@reads(_CIFAR100.found, _CIFAR100.fetch)
def cifar100(config: DataConfig) -> RawData:
    """60,000 colour images, 32x32, of 100 classes, 10,000 of them to test on; ``cifar-100-python`` in data.root.

    ``data.variant: coarse`` has the 20 superclasses.
    """
    variant = config.variant or "fine"
    if variant not in ("fine", "coarse"):
        raise ConfigError(f"data.variant is {config.variant!r}, but CIFAR-100's labels are 'fine' or 'coarse'.")
    return _read(_CIFAR100.found(config), f"{variant}_labels", f"{variant}_label_names")


def _read(files: list[Path], label: str, names: str) -> RawData:
    *batches, meta = files
    class_names = _unpickled(meta).get(names)
    if not isinstance(class_names, list):
        raise DataError(f"{meta} has no list called {names!r}.")
    parts = [_batch(path, label, len(class_names)) for path in batches]
    tests = [
        np.full(len(labels), path.name.startswith("test")) for path, (_, labels) in zip(batches, parts, strict=True)
    ]
    return RawData(
        inputs=[pixels for pixels, _ in parts],
        labels=np.concatenate([labels for _, labels in parts]),
        class_names=class_names,
        test_mask=np.concatenate(tests),
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
        lacking = "none" if len(labels) < len(pixels) else "no image"
        row = min(len(labels), len(pixels))
        raise DataError(f"{path} has {len(pixels)} images, but {len(labels)} {label}; row {row} has {lacking}.")
    return pixels.reshape(-1, 3, 32, 32), checked_labels(np.asarray(labels), num_classes, str(path))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which a CIFAR batch does not")
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
