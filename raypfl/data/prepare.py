"""Prepare the store's columns from the files of a data set: all samples in one array, and who holds which."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from raypfl.common import files
from raypfl.common.errors import ConfigError, DataError
from raypfl.common.user_modules import source_digest
from raypfl.data.arrow_file import Arrays, cache_lock, explain_write_errors
from raypfl.data.datasets.pools import PoolSamples, pool_sources, read_pool
from raypfl.data.datasets.raw_data import RawData, in_single_precision
from raypfl.data.datasets.settings import SPLITS, DataConfig
from raypfl.data.datasets.source import DATASETS, DataSource
from raypfl.data.partitions import PARTITIONS, Partition, Traits
from raypfl.data.splits import NOBODY, allocate
from raypfl.learning.objectives import kind_of

# Raise this when the written files change in a way that the code of readers and partitions does not show.
_FORMAT = 5
# Bytes of samples read at a time where all samples are visited.
_BLOCK_BYTES = 12 << 20
# The number in the column ``pool`` for the data set's own samples.
_NO_POOL = -1
_LABEL_TYPES = {"classes": np.int64, "labels": np.int8, "tokens": np.int64}
_INPUT_TYPES = ("uint8", "float32", "float64", "int64")


def samples_key(data: DataConfig, cache: Path) -> str:
    """Return a key of all that the prepared samples depend on: readers, their options, and the content of files.

    Files are downloaded first if `data` says so; other processes wait for that.

    Raises
    ------
    ConfigError : if a file is missing.
    DataError : if a download fails.
    """
    for source in (data, *data.sources().values()):
        if source.download:
            with explain_write_errors(cache):
                cache.mkdir(parents=True, exist_ok=True)
            with cache_lock(cache / "downloads"):
                source.reader.download()

    pools = [(name, source.split, *_identity(source, cache)) for name, source in pool_sources(data).items()]
    return _key(_FORMAT, data.rare, *_identity(data, cache), *pools)


def _identity(source: DataSource, cache: Path) -> tuple[Any, ...]:
    """Return what identifies a source's samples: its name and options, its reader's code, and the content of files."""
    reader = source.reader
    options = {field.name: getattr(reader, field.name) for field in fields(reader) if field.name != "config"}
    content = _content_hash(reader.paths(), source, cache)
    return source.name, {**source.options, **options}, source_digest(DATASETS.get(source.name)), content


def holdings_key(samples: str, data: DataConfig, partition: Partition, seed: int) -> str:
    """Return a key of all that the holdings depend on; `samples` is the digest of the prepared samples."""
    held_out = (data.test_fraction, data.val_fraction, data.unseen_fraction, data.split, list(data.shares().items()))
    file_digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in partition.files() if path.is_file()]
    return _key(
        _FORMAT,
        samples,
        seed,
        held_out,
        PARTITIONS.name_of(type(partition)),
        asdict(partition),
        source_digest(type(partition)),
        file_digests,
        _pools_with_own_moments(data),
    )


def prepare_samples(data: DataConfig, folder: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Read all samples of a data set and, after them, those of its pools from other data sets.

    Returns
    -------
    The columns ``input``, ``label``, ``published_test`` and ``pool`` (the pool's number, or -1), and where they apply
    ``group`` and ``category`` (combinations of several labels); and facts about them.
    """
    raw = data.read()
    pools = [read_pool(name, source, raw) for name, source in pool_sources(data).items()]

    inputs = _all_inputs(raw, pools, folder)
    labels = [raw.labels, *(pool.labels for pool in pools)]
    counts = [len(source_labels) for source_labels in labels]
    test_mask = np.zeros(counts[0]) if raw.test_mask is None else raw.test_mask

    columns: dict[str, Any] = {
        "input": inputs,
        "label": np.concatenate(labels).astype(_LABEL_TYPES.get(raw.kind, raw.labels.dtype)),
        "published_test": _pad(test_mask, counts, 0, np.int8),
        "pool": np.repeat(np.arange(_NO_POOL, len(pools)), counts).astype(np.int16),
    }
    about: dict[str, Any] = {
        "class_names": raw.class_names,
        "scale": raw.scale if inputs.dtype == np.uint8 else 1.0,
        "pools": [pool.name for pool in pools],
    }

    for name in ("feature_names", "indicators", "vocabulary"):
        if getattr(raw, name) is not None:
            about[name] = getattr(raw, name)
    if raw.groups is not None:
        group_names, group = np.unique(raw.groups, return_inverse=True)
        about["group_names"] = [str(name) for name in group_names]
        columns["group"] = _pad(group, counts, NOBODY, np.int64)
    if raw.kind == "labels":
        category = _label_combinations(raw.labels, data.rare)
        about["categories"] = int(category.max()) + 1
        columns["category"] = _pad(category, counts, NOBODY, np.int64)
    return columns, about


def prepare_holdings(
    samples: Arrays, data: DataConfig, partition: Partition, seed: int
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Divide the samples over the clients.

    Returns
    -------
    The columns ``client``, ``split`` and ``sample``, and facts about them.
    """
    columns = samples.columns
    # The data set's own samples come first, then those of its pools.
    num_own = int(np.searchsorted(columns["pool"], _NO_POOL, side="right"))
    published_test = columns["published_test"][:num_own].astype(bool)
    try:
        allocation = allocate(_traits(samples, num_own), published_test, data, partition, seed)
    except ConfigError as error:
        raise ConfigError(f"The data set {data.name!r} cannot be partitioned: {error}") from error

    pool_split = columns["pool"][num_own:] + len(SPLITS) + len(data.shares())
    client = np.concatenate([allocation.client, np.full(len(pool_split), NOBODY)])
    split = np.concatenate([allocation.split, pool_split]).astype(np.int16)
    order = np.lexsort((client, split))

    split_names = (*SPLITS, *data.shares(), *samples.about["pools"])
    trained_on = np.flatnonzero((split == SPLITS.index("train")) & ~np.isin(client, allocation.unseen))
    mean, std = _moments(columns["input"], trained_on, samples.about)
    pool_moments = {}
    for name in _pools_with_own_moments(data):
        pool = np.flatnonzero(split == split_names.index(name))
        pool_mean, pool_std = _moments(columns["input"], pool, samples.about)
        pool_moments[name] = [pool_mean.tolist(), pool_std.tolist()]

    holdings = {"client": client[order], "split": split[order], "sample": order.astype(np.int64)}
    about = {
        "clients": allocation.clients,
        "unseen": allocation.unseen.tolist(),
        "splits": split_names,
        "mean": mean.tolist(),
        "std": std.tolist(),
    }
    if pool_moments:
        about["pool_moments"] = pool_moments
    return holdings, about


def _traits(samples: Arrays, count: int) -> Traits:
    """Return what a partition may know about the first `count` samples."""
    columns = samples.columns
    about = samples.about
    labels = columns["label"][:count]
    kind = kind_of(columns["label"])
    groups = columns["group"][:count] if "group" in columns else None
    group_names = tuple(about.get("group_names", ()))

    if kind in ("classes", "labels"):
        classes = columns["category"][:count] if "category" in columns else labels
        num_classes = about.get("categories", len(about["class_names"]))
        return Traits(classes, num_classes, groups, group_names)

    values = labels if kind == "numbers" and labels.ndim == 1 else None
    return Traits(np.zeros(count, dtype=np.int64), 1, groups, group_names, classes=False, values=values)


def _pools_with_own_moments(data: DataConfig) -> list[str]:
    """Return the pools that are normalised by their own mean and deviation."""
    return [name for name, source in pool_sources(data).items() if source.normalise == "own"]


def _pad(column: np.ndarray, counts: list[int], padding: int, dtype: Any) -> np.ndarray:
    """Extend a column of the data set's own samples by `padding` for those of the pools."""
    return np.concatenate([column, np.full(sum(counts[1:]), padding)]).astype(dtype)


def _label_combinations(labels: np.ndarray, rare: int) -> np.ndarray:
    """Return the combination of labels that each sample has, ``int64[N]``, from 0; rare ones count as one."""
    _, combination = np.unique(labels, axis=0, return_inverse=True)
    combination = combination.reshape(-1)
    is_frequent = np.bincount(combination) >= rare
    new_number = np.where(is_frequent, np.cumsum(is_frequent) - 1, is_frequent.sum())
    return new_number[combination]


def _all_inputs(raw: RawData, pools: list[PoolSamples], folder: Path) -> np.ndarray:
    """Return all inputs in one array; those of pools get the shape of the data set's own.

    Images that are grey throughout get one channel, however they were encoded: WebP has no grey images.
    """
    own_inputs = _spool(raw.blocks(), folder)
    if len(own_inputs) != len(raw.labels):
        raise DataError(f"There are {len(own_inputs)} inputs, but {len(raw.labels)} labels.")

    is_grey = _is_grey(own_inputs)
    if not is_grey and not pools:
        return own_inputs

    channels = slice(1) if is_grey else slice(None)
    shape = own_inputs[:1, channels].shape[1:]
    own_blocks = (own_inputs[span, channels] for span in _spans(own_inputs, len(own_inputs)))
    pool_blocks = [pool.blocks(shape) for pool in pools]
    return _spool(itertools.chain(own_blocks, *pool_blocks), folder)


def _is_grey(inputs: np.ndarray) -> bool:
    """Return whether all channels of all images are equal."""
    if inputs.dtype != np.uint8 or inputs.shape[1] <= 1:
        return False
    return all((inputs[span] == inputs[span, :1]).all() for span in _spans(inputs, len(inputs)))


def _spool(blocks: Iterable[np.ndarray], folder: Path) -> np.ndarray:
    """Write the blocks to a temporary file and map it as one array, so that memory holds one block at a time."""
    empty = np.zeros((0, 1), np.uint8)
    count = 0
    with explain_write_errors(folder):
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed once it is mapped

    with file:
        for block in blocks:
            if not count:
                empty = block[:0]
            _check_block(block, empty, count)
            with explain_write_errors(folder):
                np.ascontiguousarray(block).tofile(file)
            count += len(block)
        file.flush()

        # A file of length 0 cannot be mapped.
        if not count:
            return empty
        return np.memmap(file, empty.dtype, mode="r", shape=(count, *empty.shape[1:]))


def _check_block(block: np.ndarray, first: np.ndarray, start: int) -> None:
    """Raise a DataError unless inputs are of a known type, finite, and of the type and shape of the `first`."""
    if block.dtype.name not in _INPUT_TYPES or block.ndim < 2 or (block.dtype == np.uint8 and block.ndim != 4):
        raise DataError(
            f"The data set's reader returns inputs as {block.dtype}{list(block.shape)}, not as uint8[n, C, H, W] "
            "images, float32[n, ...] or float64[n, ...] features, or int64[n, ...] tokens."
        )
    if (block.dtype, block.shape[1:]) != (first.dtype, first.shape[1:]):
        shape = f"{block.dtype}{list(block.shape[1:])}"
        first_shape = f"{first.dtype}{list(first.shape[1:])}"
        raise DataError(f"Inputs from sample {start} on are {shape}, those before {first_shape}.")
    is_finite = np.isfinite(in_single_precision(block)) if block.dtype.kind == "f" else np.ones(1, dtype=bool)
    if not is_finite.all():
        raise DataError(
            f"Sample {start + np.argwhere(~is_finite)[0][0]} has an input that is not finite in single precision."
        )


def _spans(samples: np.ndarray, count: int) -> Iterator[slice]:
    """Yield the slices of the blocks in which `count` samples of this size are read."""
    step = max(_BLOCK_BYTES // samples[0].nbytes, 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _moments(inputs: np.ndarray, chosen: np.ndarray, about: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of ``inputs / scale``, ``float64[C]`` each; a deviation of 0 becomes 1.

    They are by channel for images, whose sums are of integers and so exact; by the last axis for other features; and 0
    and 1 for tokens and indicators of categories, which are not normalised.
    """
    scale = about["scale"]
    if inputs.dtype == np.int64:
        return np.zeros(1), np.ones(1)
    if inputs.dtype == np.uint8:
        return _image_moments(inputs, chosen, scale)

    mean, std = _feature_moments(inputs, chosen, scale)
    indicators = np.flatnonzero(about.get("indicators", []))
    mean[indicators] = 0.0
    std[indicators] = 1.0
    return mean, std


def _image_moments(images: np.ndarray, chosen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation by channel, from exact sums of bytes."""
    sums = np.zeros(images.shape[1], dtype=np.int64)
    sums_of_squares = np.zeros(images.shape[1], dtype=np.int64)
    for span in _spans(images, len(chosen)):
        block = images[chosen[span]]
        sums += block.sum(axis=(0, 2, 3), dtype=np.int64)
        sums_of_squares += np.einsum("nchw,nchw->c", block, block, dtype=np.int64)

    count = len(chosen) * images[0, 0].size
    std = np.ones(len(sums))
    for channel in range(len(sums)):
        # The variance times count², in Python's integers, which neither round nor overflow.
        scaled_variance = count * int(sums_of_squares[channel]) - int(sums[channel]) ** 2
        if scaled_variance:
            std[channel] = math.sqrt(scaled_variance) / count / scale
    return sums / count / scale, std


def _feature_moments(inputs: np.ndarray, chosen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation by channel of images in floating point, else by the last axis."""
    axis = 1 if inputs.ndim == 4 else -1
    features = inputs.shape[axis]

    def mean_of(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(features)
        for span in _spans(inputs, len(chosen)):
            block = np.moveaxis(inputs[chosen[span]].astype(np.float64) / scale, axis, -1)
            total += function(block.reshape(-1, features)).sum(0)
        return total * features / (len(chosen) * inputs[0].size)

    mean = mean_of(lambda rows: rows)
    std = np.sqrt(mean_of(lambda rows: (rows - mean) ** 2))
    # The variance of n equal numbers may be as large as n rounding errors; dividing by those would give huge numbers.
    count = len(chosen) * inputs[0].size // features
    rounding = count * np.finfo(np.float64).eps * np.abs(mean)
    return mean, np.where(std > rounding, std, 1.0)


def _content_hash(paths: list[Path], source: DataSource, cache: Path) -> str:
    """Return the SHA-256 of files and their paths below ``data.root``, or whole paths without one.

    Reading them takes time, so the hash is cached until a file's size, modification time or status-change time differs.
    Only the system sets the last one, so it shows files that were overwritten and given their old modification time.
    """
    root = Path(source.root or "/").expanduser().absolute()
    stats = {path: path.stat() for path in paths if path.is_file()}
    if not stats:
        return ""

    states = [(str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats.items()]
    cached_hash = cache / "contents" / _key(str(root), states)
    if cached_hash.is_file():
        return cached_hash.read_text()

    content = hashlib.sha256()
    for path in stats:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        content.update(f"{os.path.relpath(path.absolute(), root)} {digest}\n".encode())

    with explain_write_errors(cached_hash):
        cached_hash.parent.mkdir(parents=True, exist_ok=True)
        files.write(cached_hash, content.hexdigest())
    return content.hexdigest()


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
