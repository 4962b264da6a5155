"""Pools that come from another data set: brought to the shape, the channels and the classes of the clients' own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DATASETS, DataConfig, RawData
from raypfl.datasets.images import resized

UNLABELLED = -1


class Pool(NamedTuple):
    """Samples of another data set.

    Attributes
    ----------
    name : of the pool.
    raw : the data set as it was read.
    chosen : ``bool[N]``, which of its samples are in the pool.
    labels : ``[M]``, or ``[M, L]`` of several, theirs, as the clients' data set numbers them; `UNLABELLED` where it has
        no such classes.
    """

    name: str
    raw: RawData
    chosen: np.ndarray
    labels: np.ndarray

    def blocks(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Its inputs, block by block: ``[n, *shape]``; images resized, and grey ones in equal channels."""
        start = 0
        for block in self.raw.blocks():
            kept = block[self.chosen[start : start + len(block)]]
            start += len(block)
            if len(kept) and kept.dtype != np.uint8:
                yield kept
            elif len(kept):
                yield resized(_channels(kept, shape[0]), *shape[1:])


def elsewhere(data: DataConfig) -> dict[str, DataConfig]:
    """The pools that come from other data sets: a name with a star stands for one pool for each file.

    Raises
    ------
    ConfigError : if a star has nothing to stand for.
    """
    pools: dict[str, DataConfig] = {}
    for name, config in data.elsewhere().items():
        pools |= _for_each_file(name, config) if "*" in name else {name: config}
    return pools


def _for_each_file(name: str, config: DataConfig) -> dict[str, DataConfig]:
    root = config.folder("the .npy files of the pools")
    pattern = config.image if "*" in config.image else "*.npy"
    label = "labels.npy" if config.label == "label" else config.label
    files = [path.name for path in sorted(root.glob(pattern)) if path.name != label]
    if not files:
        raise ConfigError(
            f"data.pools has one called {name!r}, but there is no {pattern} in {root} to stand for its star."
        )
    return {name.replace("*", Path(file).stem): replace(config, image=file) for file in files}


def read(name: str, config: DataConfig, own: RawData) -> Pool:
    """The samples of the pool `name`: of a data set with a published test split, those to train on, or, if the name
    begins with ``ood/``, those of the test split.

    Raises
    ------
    DataError : if there are none, or if a pool to be tested on has other classes than the clients' data set.
    """
    raw: RawData = DATASETS.get(config.name)(config)
    tested_on = name.startswith("ood/")
    chosen = np.ones(len(raw.labels), dtype=bool)
    if raw.test_mask is not None and config.split == "auto":
        chosen = raw.test_mask if tested_on else ~raw.test_mask
    if not chosen.any():
        raise DataError(
            f"The pool {name!r} is empty; data.pools.{name}.split: merged takes all samples of {config.name!r}."
        )
    if raw.scale != own.scale:
        raise DataError(f"A full pixel of the pool {name!r} is {raw.scale}, but one of the clients' data {own.scale}.")
    labels = _labels(raw, own, chosen)
    if labels is None and tested_on:
        raise DataError(
            f"The pool {name!r} has the classes {', '.join(raw.class_names[:5])}..., of which not all are among the "
            f"clients' {', '.join(own.class_names[:5])}...; it cannot be tested on."
        )
    if labels is None:
        nothing = np.nan if own.kind == "numbers" else UNLABELLED
        labels = np.full((int(chosen.sum()), *own.labels.shape[1:]), nothing, dtype=own.labels.dtype)
    return Pool(name, raw, chosen, labels)


def _labels(raw: RawData, own: RawData, chosen: np.ndarray) -> np.ndarray | None:
    """The pool's labels by class name, or as they are where its classes have numbers for names; None: others."""
    if raw.kind != own.kind:
        return None
    if raw.kind not in ("classes", "labels"):
        return raw.labels[chosen] if raw.class_names == own.class_names else None
    numbered = raw.class_names == [str(number) for number in range(len(raw.class_names))]
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
