"""Pools from other data sets, converted to the shape, the channels and the classes of the clients' data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.images import resized
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.settings import DataConfig
from raypfl.data.datasets.source import DataSource

UNLABELLED = -1


class PoolSamples(NamedTuple):
    """Samples of another data set.

    Attributes
    ----------
    name : of the pool.
    raw : the data set as it was read.
    chosen : ``bool[N]``, which of its samples are in the pool.
    labels : their labels, ``[M]`` or ``[M, L]``, in the numbering of the clients' data set; `UNLABELLED` if it does not
        have these classes.
    """

    name: str
    raw: RawData
    chosen: np.ndarray
    labels: np.ndarray

    def blocks(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Its inputs, block by block: ``[n, *shape]``; images are resized, and grey ones get equal channels."""
        start = 0
        for block in self.raw.blocks():
            kept = block[self.chosen[start : start + len(block)]]
            start += len(block)
            if len(kept) and kept.dtype != np.uint8:
                yield kept
            elif len(kept):
                yield resized(_channels(kept, shape[0]), *shape[1:])


def pool_sources(data: DataConfig) -> dict[str, DataSource]:
    """The pools that come from other data sets: a name with a star stands for one pool for each file.

    Raises
    ------
    ConfigError : if there is no file for a star.
    """
    pools: dict[str, DataSource] = {}
    for name, source in data.sources().items():
        pools |= _for_each_file(name, source) if "*" in name else {name: source}
    return pools


def _for_each_file(name: str, source: DataSource) -> dict[str, DataSource]:
    root = source.folder("the .npy files of the pools")
    image, label = (source.options.get(option, "") for option in ("image", "label"))
    pattern = image if "*" in image else "*.npy"
    files = [path.name for path in sorted(root.glob(pattern)) if path.name != (label or "labels.npy")]
    if not files:
        raise ConfigError(f"data.pools has one called {name!r}, but there is no {pattern} in {root} for its star.")
    return {
        name.replace("*", Path(file).stem): replace(source, options={**source.options, "image": file}) for file in files
    }


def read_pool(name: str, source: DataSource, own: RawData) -> PoolSamples:
    """The samples of the pool `name`. If its data set has a published test split, these are its training samples or,
    if the name begins with ``ood/``, its test samples.

    Raises
    ------
    DataError : if there are none, or if a test pool has other classes than the clients' data set.
    """
    raw = _with_features_of(source.read(), own, name)
    is_test = name.startswith("ood/")
    chosen = np.ones(len(raw.labels), dtype=bool)
    if raw.test_mask is not None and source.split == "auto":
        chosen = raw.test_mask if is_test else ~raw.test_mask
    if not chosen.any():
        raise DataError(
            f"The pool {name!r} is empty; data.pools.{name}.split: merged takes all samples of {source.name!r}."
        )
    if raw.scale != own.scale:
        raise DataError(f"A full pixel is {raw.scale} in the pool {name!r}, but {own.scale} in the clients' data.")
    labels = _labels(raw, own, chosen)
    if labels is None and is_test:
        raise DataError(
            f"The pool {name!r} is for tests, but not all its classes, {', '.join(raw.class_names[:5])}..., are among "
            f"the clients' classes, {', '.join(own.class_names[:5])}...."
        )
    if labels is None:
        nothing = np.nan if own.kind == "numbers" else UNLABELLED
        labels = np.full((int(chosen.sum()), *own.labels.shape[1:]), nothing, dtype=own.labels.dtype)
    return PoolSamples(name, raw, chosen, labels)


def _with_features_of(raw: RawData, own: RawData, name: str) -> RawData:
    """A data set with the features of the clients', by name; a category that it does not have is 0.

    Raises
    ------
    DataError : if it has another feature, or lacks one that is not of a category.
    """
    if raw.feature_names is None or own.feature_names is None or raw.feature_names == own.feature_names:
        return raw
    indicators = own.indicators or [False] * len(own.feature_names)
    categories = {feature for feature, is_one in zip(own.feature_names, indicators, strict=True) if is_one}
    wrong = [feature for feature in raw.feature_names if feature not in own.feature_names]
    wrong += [f"no {feature}" for feature in own.feature_names if feature not in {*raw.feature_names, *categories}]
    if wrong:
        raise DataError(f"{name} has other features than the clients' data: {', '.join(wrong[:5])}.")
    place = {feature: number for number, feature in enumerate(own.feature_names)}

    def matched(block: np.ndarray) -> np.ndarray:
        inputs = np.zeros((len(block), len(place)), block.dtype)
        inputs[:, [place[feature] for feature in raw.feature_names or ()]] = block
        return inputs

    blocks = map(matched, raw.blocks())
    return replace(raw, inputs=blocks, feature_names=own.feature_names, indicators=own.indicators)


def _labels(raw: RawData, own: RawData, chosen: np.ndarray) -> np.ndarray | None:
    """The pool's labels in the clients' numbering, by class name or, if names are numbers, unchanged; None: other
    classes."""
    if raw.kind != own.kind:
        return None
    if raw.kind not in ("classes", "labels"):
        return raw.labels[chosen] if raw.class_names == own.class_names else None
    # Numbers that stand for other names; where the clients' names are numbers too, they say which they are.
    unnamed = raw.class_names == [str(number) for number in range(len(raw.class_names))]
    numbered = unnamed and not all(name.isdecimal() for name in own.class_names)
    if raw.class_names == own.class_names or (numbered and len(raw.class_names) <= len(own.class_names)):
        return raw.labels[chosen]
    if raw.labels.ndim > 1 or not set(raw.class_names) <= set(own.class_names):
        return None
    return np.array([own.class_names.index(name) for name in raw.class_names])[raw.labels[chosen]]


def _channels(block: np.ndarray, channels: int) -> np.ndarray:
    if block.shape[1] == channels:
        return block
    if block.shape[1] == 1:
        return np.repeat(block, channels, axis=1)
    red, green, blue = (block[:, i].astype(np.uint32) for i in range(3))
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).astype(np.uint8)[:, None]  # ITU-R BT.601
