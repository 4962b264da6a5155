"""Pools from other data sets, converted to the shape, the channels and the classes of the clients' data set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.images import resize
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.settings import DataConfig
from raypfl.data.datasets.source import DataSource
from raypfl.data.datasets.words import translated

UNLABELLED = -1


class PoolSamples(NamedTuple):
    """Samples of another data set that are a pool.

    Attributes
    ----------
    name : the pool's name.
    raw : the other data set as it was read.
    chosen : ``bool[N]``, which of its samples are in the pool.
    labels : the labels of these M samples, ``[M]`` or ``[M, L]``, in the numbering of the clients' data set;
        `UNLABELLED` if it does not have these classes.
    """

    name: str
    raw: RawData
    chosen: np.ndarray
    labels: np.ndarray

    def blocks(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Yield blocks of the pool's inputs, ``[n, *shape]``; images are resized, and grey ones get equal channels."""
        start = 0
        for block in self.raw.blocks():
            inputs = block[self.chosen[start : start + len(block)]]
            start += len(block)
            if not len(inputs):
                continue

            if inputs.dtype == np.uint8 and len(shape) == 3:
                inputs = resize(_convert_channels(inputs, shape[0]), *shape[1:])
            if inputs.shape[1:] != shape:
                raise DataError(
                    f"The pool {self.name!r} has samples of {list(inputs.shape[1:])}, but those of the clients are "
                    f"{list(shape)}."
                )
            yield inputs


def pool_sources(data: DataConfig) -> dict[str, DataSource]:
    """Return the pools that come from other data sets; a name with a star stands for a pool for each file.

    Raises
    ------
    ConfigError : if there is no file for a star.
    """
    pools: dict[str, DataSource] = {}
    for name, source in data.sources().items():
        pools |= _pool_for_each_file(name, source) if "*" in name else {name: source}
    return {name: _with_shared_options(data, name, source) for name, source in pools.items()}


def _with_shared_options(data: DataConfig, name: str, source: DataSource) -> DataSource:
    """Give a pool the options that it shares with the clients' data, such as the tokens of texts.

    Raises
    ------
    ConfigError : if it has others.
    """
    clients_reader = data.reader
    if not clients_reader.shared_with_pools or type(source.reader) is not type(clients_reader):
        return source

    options = {option: getattr(clients_reader, option) for option in clients_reader.shared_with_pools}
    for option, value in options.items():
        if source.options.get(option, value) != value:
            raise ConfigError(
                f"data.pools.{name}.{option} is {source.options[option]!r}, but a pool has that of the clients' data, "
                f"whose data.{option} is {value!r}; leave it out."
            )
    return replace(source, options=source.options | options)


def _pool_for_each_file(name: str, source: DataSource) -> dict[str, DataSource]:
    """Return a pool for each file that the star in the pool's name stands for."""
    root = source.folder("the .npy files of the pools")
    image = source.options.get("image", "")
    labels_file = source.options.get("label", "") or "labels.npy"
    pattern = image if "*" in image else "*.npy"

    pools = {}
    for path in sorted(root.glob(pattern)):
        if path.name != labels_file:
            pools[name.replace("*", path.stem)] = replace(source, options={**source.options, "image": path.name})
    if not pools:
        raise ConfigError(f"data.pools has a pool called {name!r}, but there is no {pattern} in {root} for its star.")
    return pools


def read_pool(name: str, source: DataSource, clients_data: RawData) -> PoolSamples:
    """Read the samples of a pool.

    If its data set has a published test split, these are its training samples or, if the pool's name begins with
    ``ood/``, its test samples.

    Parameters
    ----------
    clients_data : the clients' data set.

    Raises
    ------
    DataError : if there are none, or if a test pool has other classes than the clients' data set.
    """
    raw = _match_words(source.read(clients_data.vocabulary), clients_data)
    raw = _match_features(raw, clients_data, name)
    is_test = name.startswith("ood/")

    chosen = np.ones(len(raw.labels), dtype=bool)
    if raw.test_mask is not None and source.split == "auto":
        chosen = raw.test_mask if is_test else ~raw.test_mask
    if not chosen.any():
        raise DataError(
            f"The pool {name!r} is empty; data.pools.{name}.split: merged takes all samples of {source.name!r}."
        )
    if raw.scale != clients_data.scale:
        raise DataError(
            f"A full pixel is {raw.scale} in the pool {name!r}, but {clients_data.scale} in the clients' data."
        )

    labels = _matched_labels(raw, clients_data, chosen)
    if labels is None and is_test:
        raise DataError(
            f"The pool {name!r} is for tests, but not all its classes, {', '.join(raw.class_names[:5])}..., are among "
            f"the clients' classes, {', '.join(clients_data.class_names[:5])}...."
        )
    if labels is None:
        no_label = np.nan if clients_data.kind == "numbers" else UNLABELLED
        shape = (int(chosen.sum()), *clients_data.labels.shape[1:])
        labels = np.full(shape, no_label, dtype=clients_data.labels.dtype)
    return PoolSamples(name, raw, chosen, labels)


def _match_features(raw: RawData, clients_data: RawData, name: str) -> RawData:
    """Put a data set's features into the clients' order, by name; the indicator of a category that it lacks is 0.

    Raises
    ------
    DataError : if it has another feature, or lacks one that is not of a category.
    """
    features = clients_data.feature_names
    if raw.feature_names is None or features is None or raw.feature_names == features:
        return raw

    indicators = clients_data.indicators or [False] * len(features)
    optional = {feature for feature, is_indicator in zip(features, indicators, strict=True) if is_indicator}
    wrong = [feature for feature in raw.feature_names if feature not in features]
    wrong += [f"no {feature}" for feature in features if feature not in {*raw.feature_names, *optional}]
    if wrong:
        raise DataError(f"{name} has other features than the clients' data: {', '.join(wrong[:5])}.")

    column_of = {feature: column for column, feature in enumerate(features)}
    columns = [column_of[feature] for feature in raw.feature_names]

    def match(block: np.ndarray) -> np.ndarray:
        inputs = np.zeros((len(block), len(column_of)), block.dtype)
        inputs[:, columns] = block
        return inputs

    blocks = map(match, raw.blocks())
    return replace(raw, inputs=blocks, feature_names=features, indicators=clients_data.indicators)


def _match_words(raw: RawData, clients_data: RawData) -> RawData:
    """Give a data set's words the clients' tokens, and cut or fill its texts to their length."""
    words = raw.vocabulary
    vocabulary = clients_data.vocabulary
    if words is None or vocabulary is None:
        return raw

    length = next(iter(clients_data.blocks())).shape[1]
    blocks = (translated(block, words, vocabulary, length) for block in raw.blocks())
    return replace(raw, inputs=blocks, vocabulary=vocabulary)


def _matched_labels(raw: RawData, clients_data: RawData, chosen: np.ndarray) -> np.ndarray | None:
    """Return the labels of the chosen samples in the clients' numbering; None: the data set has other classes.

    Classes are matched by name or, if the pool's names are mere numbers, by number.
    """
    if raw.kind != clients_data.kind:
        return None
    if raw.class_names == clients_data.class_names:
        return raw.labels[chosen]
    if raw.kind not in ("classes", "labels"):
        return None

    # If the clients' classes are named by numbers, the pool's numbers are names, too, and are matched by name.
    class_names = clients_data.class_names
    are_numbers = raw.class_names == [str(number) for number in range(len(raw.class_names))]
    is_unnamed = are_numbers and not all(name.isdecimal() for name in class_names)
    if is_unnamed and len(raw.class_names) <= len(class_names):
        return raw.labels[chosen]
    if raw.labels.ndim > 1 or not set(raw.class_names) <= set(class_names):
        return None

    label_of = np.array([class_names.index(name) for name in raw.class_names])
    return label_of[raw.labels[chosen]]


def _convert_channels(block: np.ndarray, channels: int) -> np.ndarray:
    """Return images ``uint8[n, C, H, W]`` with so many channels, if they can have them.

    Grey images get equal channels, and colours are weighted for a single one.
    """
    if block.shape[1] == 1:
        return np.repeat(block, channels, axis=1)
    if (block.shape[1], channels) != (3, 1):
        return block

    # Luma by ITU-R BT.601, in integers and rounded.
    red, green, blue = (block[:, channel].astype(np.uint32) for channel in range(3))
    luma = (299 * red + 587 * green + 114 * blue + 500) // 1000
    return luma.astype(np.uint8)[:, None]
