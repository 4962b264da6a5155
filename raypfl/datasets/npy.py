"""Images and labels in a pair of ``.npy`` files: CIFAR-10.1, CIFAR-10-C, and others in their form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads
from raypfl.datasets.cifar import CIFAR10_CLASSES
from raypfl.datasets.labels import checked_labels, require_partners

_BLOCK = 12 << 20  # bytes of images in memory at a time
_SEVERITIES = 5
_SHAPE = (32, 32, 3)


def _pair(config: DataConfig) -> list[Path]:
    return _files(config, "image.npy" if config.image == "image" else config.image)


def _cifar10_1_pair(config: DataConfig) -> list[Path]:
    variant = config.variant or "v6"
    if variant not in ("v4", "v6"):
        raise ConfigError(f"data.variant is {variant!r}, but CIFAR-10.1's are v6 (the usual one) and v4.")
    return _files(config, f"cifar10.1_{variant}_data.npy", f"cifar10.1_{variant}_labels.npy")


def _cifar10_c_pair(config: DataConfig) -> list[Path]:
    if config.variant is not None and str(config.variant) not in map(str, range(1, _SEVERITIES + 1)):
        raise ConfigError(f"data.variant is {config.variant!r}, but CIFAR-10-C's severities are 1 to {_SEVERITIES}.")
    if config.image == "image":
        raise ConfigError(
            "CIFAR-10-C has a file for each corruption: name one in data.image (or, of a pool, in its image), as in "
            "'gaussian_noise.npy', or have a pool for each with a star in the pool's name, as in 'ood/*'."
        )
    return _files(config, config.image, "labels.npy")


@DATASETS.register("npy")
@reads(_pair)
def npy(config: DataConfig) -> RawData:
    """Two files in data.root: data.image, ``uint8[n, H, W]`` or ``[n, H, W, 3]``, and data.label, integers ``[n]``.

    Raises
    ------
    ConfigError : if a file is missing.
    DataError : if they are damaged or do not fit together.
    """
    pixels, labels = _opened(_pair(config))
    num_classes = int(labels.max()) + 1 if labels.size and labels.dtype.kind in "iu" else 0
    checked = checked_labels(labels, num_classes, str(_pair(config)[1]))
    return RawData(_blocks(pixels), checked, [str(label) for label in range(int(checked.max(initial=-1)) + 1)])


@DATASETS.register("cifar10_1")
@reads(_cifar10_1_pair)
def cifar10_1(config: DataConfig) -> RawData:
    """About 2,000 new images for CIFAR-10's classes (Recht et al. 2018); ``cifar10.1_v6_data.npy`` and its labels."""
    return _cifar10(_cifar10_1_pair(config))


@DATASETS.register("cifar10_c")
@reads(_cifar10_c_pair)
def cifar10_c(config: DataConfig) -> RawData:
    """CIFAR-10's test images under a corruption, in 5 severities (Hendrycks and Dietterich 2019).

    ``data.image`` names the corruption's file, ``data.variant`` a severity, 1 to 5; without it: all.
    """
    return _cifar10(_cifar10_c_pair(config), config.variant)


def _cifar10(pair: list[Path], severity: str | int | None = None) -> RawData:
    pixels, labels = _opened(pair)
    if pixels.shape[1:] != _SHAPE:
        raise DataError(
            f"{pair[0]} holds images as uint8{list(pixels.shape)}, but CIFAR-10's are uint8[n, 32, 32, 3]; get the "
            f"file again, or read it with data.name=npy."
        )
    checked = checked_labels(labels, len(CIFAR10_CLASSES), str(pair[1]))
    each, rest = divmod(len(pixels), _SEVERITIES)
    if severity is not None and rest:
        raise DataError(
            f"{pair[0]} holds {len(pixels)} images, which are not {_SEVERITIES} severities of equal length; "
            f"get it again."
        )
    chosen = slice(None) if severity is None else slice((int(severity) - 1) * each, int(severity) * each)
    return RawData(_blocks(pixels[chosen]), checked[chosen], CIFAR10_CLASSES)


def _files(config: DataConfig, image: str, label: str | None = None) -> list[Path]:
    root = config.folder("the .npy files")
    label = label or ("labels.npy" if config.label == "label" else str(config.label))
    for name in (image, label):
        if not (root / name).is_file():
            there = ", ".join(sorted(path.name for path in root.glob("*.npy"))[:5]) or "no .npy file"
            raise ConfigError(f"There is no {name} in {root}, which data.root names; there is {there}.")
    return [root / image, root / label]


def _opened(pair: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = (_array(path) for path in pair)
    shape = f"{pixels.dtype}{list(pixels.shape)}"
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[-1] not in (1, 3)):
        raise DataError(f"{pair[0]} holds {shape}, not images as uint8[n, H, W] or uint8[n, H, W, 3].")
    if labels.ndim == 1:  # others are refused as labels
        require_partners(len(pixels), pair[0], len(labels), pair[1])
    return pixels, labels


def _array(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is damaged, or not a .npy file: {error}") from error


def _blocks(pixels: np.ndarray) -> Iterator[np.ndarray]:
    step = max(_BLOCK // pixels[0].nbytes, 1)
    for start in range(0, len(pixels), step):
        block = pixels[start : start + step]
        yield block[:, None] if block.ndim == 3 else block.transpose(0, 3, 1, 2)
