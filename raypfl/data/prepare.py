"""From a data set's files to what the store keeps: all samples in one piece, and who holds which."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.arrays import Arrays, alone, writing
from raypfl.data.partitions import PARTITIONS, Partition, Traits
from raypfl.data.splits import NOBODY, hold
from raypfl.datasets import pools
from raypfl.datasets.base import DATASETS, SPLITS, DataConfig, RawData, files_of
from raypfl.objectives import kind_of

# To be raised when what is written changes in a way that the code of readers and partitions does not show.
_FORMAT = 3
# Bytes of samples read at a time where all are passed over.
_BLOCK = 12 << 20
_OWN = -1
_STORED = {"classes": np.int64, "labels": np.int8, "tokens": np.int64}
_INPUTS = ("uint8", "float32", "float64", "int64")
# What the prepared samples do not depend on.
_OF_HOLDINGS = {
    "root",
    "download",
    "pools",
    "test_fraction",
    "val_fraction",
    "unseen_fraction",
    "cache",
    "split",
    "normalise",
    "augmentation",
}


def samples_key(data: DataConfig, cache: Path) -> str:
    """What the prepared samples depend on: readers, their options, and the content of their files.

    Raises
    ------
    ConfigError : if a file is missing.
    DataError : if a file that is to be fetched cannot be.
    """
    parts = []
    for name, config in {"": data, **_pools(data, cache)}.items():
        options = {option: value for option, value in asdict(config).items() if option not in _OF_HOLDINGS}
        split = config.split if name else None
        parts.append(
            (name, split, options, _code(DATASETS.get(config.name)), _content(_files(config, cache), config, cache))
        )
    return _key(_FORMAT, parts)


def holdings_key(samples: str, data: DataConfig, partition: Partition, seed: int) -> str:
    """What the holdings depend on, `samples` being the digest of the prepared samples."""
    held_out = (data.test_fraction, data.val_fraction, data.unseen_fraction, data.split, list(data.shares().items()))
    files = [hashlib.sha256(path.read_bytes()).hexdigest() for path in partition.files() if path.is_file()]
    name, apart = PARTITIONS.name_of(type(partition)), _normalised_apart(data)
    parts = (samples, seed, held_out, name, asdict(partition), _code(type(partition)), files)
    return _key(_FORMAT, *parts, *([apart] if apart else []))


def prepared_samples(data: DataConfig, folder: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """All samples of a data set and, after them, those of its pools from elsewhere.

    Returns
    -------
    Columns ``input``, ``label``, ``published_test``, ``pool`` (the pool's place, or -1), and where there are such
    ``group`` and ``category`` (combinations of several labels); and what is to be known about them.
    """
    raw: RawData = DATASETS.get(data.name)(data)
    others = [pools.read(name, config, raw) for name, config in pools.elsewhere(data).items()]
    labels = [raw.labels, *(pool.labels for pool in others)]
    counts = [len(part) for part in labels]
    inputs = _spooled(raw, others, folder)
    about: dict[str, Any] = {
        "class_names": raw.class_names,
        "scale": raw.scale if inputs.dtype == np.uint8 else 1.0,
        "pools": [pool.name for pool in others],
    }
    columns: dict[str, Any] = {
        "input": inputs,
        "label": np.concatenate(labels).astype(_STORED.get(raw.kind, raw.labels.dtype)),
        "published_test": _padded(
            raw.test_mask if raw.test_mask is not None else np.zeros(counts[0]), counts, 0, np.int8
        ),
        "pool": np.repeat(np.arange(_OWN, len(others)), counts).astype(np.int16),
    }
    if raw.groups is not None:
        names, group = np.unique(raw.groups, return_inverse=True)
        about["group_names"] = [str(name) for name in names]
        columns["group"] = _padded(group, counts, NOBODY, np.int64)
    if raw.kind == "labels":
        category = _categories(raw.labels, data.rare)
        about["categories"] = int(category.max()) + 1
        columns["category"] = _padded(category, counts, NOBODY, np.int64)
    return columns, about


def prepared_holdings(
    samples: Arrays, data: DataConfig, partition: Partition, seed: int
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Who holds which sample: columns ``client``, ``split`` and ``sample``, and what is to be known about them."""
    columns, about = samples.columns, samples.about
    own = int(np.searchsorted(columns["pool"], _OWN, side="right"))
    names = (*SPLITS, *data.shares(), *about["pools"])
    classes = kind_of(columns["label"]) in ("classes", "labels")
    traits = Traits(
        labels=columns.get("category", columns["label"])[:own] if classes else np.zeros(own, dtype=np.int64),
        num_classes=about.get("categories", len(about["class_names"])) if classes else 1,
        classes=classes,
        groups=columns["group"][:own] if "group" in columns else None,
        group_names=tuple(about.get("group_names", ())),
    )
    try:
        held = hold(traits, columns["published_test"][:own].astype(bool), data, partition, seed)
    except ConfigError as error:
        raise ConfigError(f"The data set {data.name!r} cannot be dealt out: {error}") from error
    client = np.concatenate([held.client, np.full(len(columns["pool"]) - own, NOBODY)])
    split = np.concatenate([held.split, columns["pool"][own:] + len(SPLITS) + len(data.shares())]).astype(np.int16)
    order = np.lexsort((client, split))
    trained_on = np.flatnonzero((split == SPLITS.index("train")) & ~np.isin(client, held.unseen))
    mean, std = _moments(columns["input"], trained_on, about["scale"])
    apart = {
        name: [part.tolist() for part in _moments(columns["input"], _of(split, names.index(name)), about["scale"])]
        for name in _normalised_apart(data)
    }
    coded = pa.DictionaryArray.from_arrays(split[order], pa.array(names))
    return {"client": client[order], "split": coded, "sample": order.astype(np.int64)}, {
        "clients": held.clients,
        "unseen": held.unseen.tolist(),
        "splits": names,
        "mean": mean.tolist(),
        "std": std.tolist(),
    } | ({"pool_moments": apart} if apart else {})


def _normalised_apart(data: DataConfig) -> list[str]:
    """The pools that are normalised by their own mean and deviation."""
    return [name for name, config in pools.elsewhere(data).items() if config.normalise == "own"]


def _of(split: np.ndarray, code: int) -> np.ndarray:
    return np.flatnonzero(split == code)


def _padded(column: np.ndarray, counts: list[int], padding: int, dtype: Any) -> np.ndarray:
    """A column of the data set's own samples, with `padding` for those of the pools."""
    return np.concatenate([column, np.full(sum(counts[1:]), padding)]).astype(dtype)


def _categories(labels: np.ndarray, rare: int) -> np.ndarray:
    """The combination of labels that each sample has, the rare ones taken as one: ``int64[N]``, from 0."""
    _, combination = np.unique(labels, axis=0, return_inverse=True)
    combination = combination.reshape(-1)
    frequent = np.bincount(combination) >= rare
    merged = np.where(frequent, np.cumsum(frequent) - 1, frequent.sum())
    return merged[combination]


class _Spool:
    """Samples one after another in a file without a name, so that memory holds one block at a time."""

    def __init__(self, folder: Path, shape: tuple[int, ...] = ()):
        self.folder, self.shape, self.count, self.grey = folder, shape, 0, True
        self.kind = np.dtype(np.uint8)
        with writing(folder):
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed once it is mapped

    def add(self, block: np.ndarray) -> None:
        """Append ``[n, ...]``, of the type of those before."""
        images = block.dtype == np.uint8
        if block.dtype.name not in _INPUTS or block.ndim < 2 or (images and block.ndim != 4):
            found = f"{block.dtype}{list(block.shape)}"
            raise DataError(
                f"The data set's reader gives inputs as {found}, not as uint8[n, C, H, W] images, float32[n, ...] or "
                "float64[n, ...] features, or int64[n, ...] tokens."
            )
        if self.count and block.dtype != self.kind:
            raise DataError(f"Inputs from {self.count} on are {block.dtype}, those before {self.kind}.")
        if block.dtype.kind == "f" and not np.isfinite(block).all():
            row = self.count + int(np.argwhere(~np.isfinite(block))[0][0])
            raise DataError(f"Sample {row} has an input that is not finite.")
        self.kind = block.dtype
        if self.count and block.shape[1:] != self.shape:
            raise DataError(
                f"Inputs from {self.count} on are {list(block.shape[1:])}, those before {list(self.shape)}."
            )
        self.shape, self.count = block.shape[1:], self.count + len(block)
        self.grey = (
            images
            and self.grey
            and all(np.array_equal(block[:, 0], channel) for channel in block[:, 1:].swapaxes(0, 1))
        )
        with writing(self.folder):
            np.ascontiguousarray(block).tofile(self.file)

    def mapped(self) -> np.ndarray:
        """All of them, ``[N, ...]``, mapped into memory."""
        with self.file:
            self.file.flush()
            return np.memmap(self.file, self.kind, mode="r", shape=(self.count, *self.shape))


def _spooled(raw: RawData, others: list[pools.Pool], folder: Path) -> np.ndarray:
    """All inputs in one piece, those of pools brought to the shape of the data set's own.

    Images that are grey throughout come out with one channel, whatever they were encoded as: WebP knows no grey.
    """
    spool = _Spool(folder)
    for block in raw.blocks():
        spool.add(block)
    if spool.count != len(raw.labels):
        raise DataError(f"There are {spool.count} images, but {len(raw.labels)} labels.")
    if spool.grey and spool.shape[0] > 1:
        coloured, spool = spool.mapped(), _Spool(folder)
        for span in _spans(coloured, len(coloured)):
            spool.add(coloured[span, :1])
    shape = spool.shape
    for pool in others:
        for block in pool.blocks(shape):
            spool.add(block)
    return spool.mapped()


def _spans(samples: np.ndarray, count: int) -> Iterator[slice]:
    """`count` of such samples, a block of them at a time."""
    step = max(_BLOCK // samples[0].nbytes, 1)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _moments(inputs: np.ndarray, chosen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of ``inputs / scale``, ``float64[C]`` each; the latter 1 if it would be 0.

    By channel for images, whose sums are of integers, hence exact; by the last axis for other features. Tokens are as
    they are: 0 and 1.
    """
    if inputs.dtype == np.int64:
        return np.zeros(1), np.ones(1)
    if inputs.dtype != np.uint8:
        return _feature_moments(inputs, chosen, scale)
    total, squares = np.zeros((2, inputs.shape[1]), dtype=np.int64)
    for span in _spans(inputs, len(chosen)):
        block = inputs[chosen[span]]
        total += block.sum(axis=(0, 2, 3), dtype=np.int64)
        squares += np.einsum("nchw,nchw->c", block, block, dtype=np.int64)
    count = len(chosen) * inputs[0, 0].size
    # count² variance, in Python's integers, which neither round nor overflow
    spread = [count * int(q) - int(t) ** 2 for q, t in zip(squares, total, strict=True)]
    std = np.array([math.sqrt(s) / count / scale if s else 1.0 for s in spread])
    return total / count / scale, std


def _feature_moments(inputs: np.ndarray, chosen: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
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
    return mean, np.where(std > 0, std, 1.0)


def _pools(data: DataConfig, cache: Path) -> dict[str, DataConfig]:
    for config in data.elsewhere().values():
        if config.download:
            _files(config, cache)
    return pools.elsewhere(data)


def _files(config: DataConfig, cache: Path) -> list[Path]:
    """A data set's files; who is to fetch them does so while others wait."""
    if not config.download:
        return files_of(config)
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with alone(cache / "downloads"):
        return files_of(config)


def _content(files: list[Path], config: DataConfig, cache: Path) -> str:
    """The SHA-256 of files and their places under ``data.root``.

    It is remembered for as long as their sizes, times of change and times of status change stay, since reading them
    takes its time. The last, which the system alone sets, tells of files written over with their time put back.
    """
    root = Path(config.root).expanduser() if config.root else Path()
    there = [path for path in files if path.is_file()]
    if not there:
        return ""
    states = [(str(path.absolute()), *_size_and_times(path)) for path in there]
    known = cache / "contents" / _key(states)
    if known.is_file():
        return known.read_text()
    content = hashlib.sha256()
    for path in there:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        content.update(f"{os.path.relpath(path, root)} {digest}\n".encode())
    with writing(known):
        known.parent.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_name(f".{known.name}.{uuid.uuid4().hex}")
        unfinished.write_text(content.hexdigest())
        unfinished.replace(known)
    return content.hexdigest()


def _size_and_times(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _code(component: Any) -> str:
    """The file that a reader or partition is written in, so that a change of it is not answered from the cache."""
    try:
        return hashlib.sha256(Path(inspect.getfile(component)).read_bytes()).hexdigest()
    except (TypeError, OSError):
        return os.urandom(16).hex()  # typed into a console: no telling whether it has changed


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]
