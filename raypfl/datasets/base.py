"""Data sets by name: how one is described, and what a reader of one returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.common.registry import Registry
from raypfl.objectives import kind_of
from raypfl.training.augmentation import Augmentation

DATASETS = Registry("data set")

SPLITS = ("train", "val", "test")
"""Of a client, in the order in which their numbers stand in the store; what follows there are pools."""

_READER = TypeVar("_READER", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which samples there are, and which of a client's are held out.

    Attributes
    ----------
    name : a registered data set, or ``module:attribute`` of a reader of your own: a function that takes this
        configuration and returns `RawData`, or a :class:`raypfl.datasets.Population`, whose clients are described.
    root : folder of the data set's files, for readers that need one.
    download : let a reader that can fetch a published data set do so, into `root`.
    image, label : names of the columns that hold images and labels, for readers of tables; several label columns make
        a data set whose samples have several labels each. For ``npy``: names of the files.
    group : name of the column that holds each sample's domain, writer or the like.
    layout : the levels of a tree of images, from the root down, as in ``group/split/class``.
    files : pattern of the tables to read, such as ``train.csv``; None: all that are there.
    variant : which of several forms of a published data set, as text or a number; None: the usual one.
    size : height and width to bring images to; None: they must have one size.
    fit : how: ``stretch`` changes their proportions; ``crop`` scales the shorter side and cuts what is beyond it.
    uncertain : what an uncertain label (-1) among several counts as.
    rare : of several labels a sample: combinations with fewer samples than this are taken as one when samples are
        dealt out.
    pools : samples that belong to no client, by name: the share of the training samples that goes there, or another
        data set, as options with a name among them. Clients may ask for ``auxiliary``; those called ``ood/...`` are
        tested on.
    test_fraction, val_fraction : share of each client's samples that is held out for test and validation. A published
        test split takes the place of `test_fraction`.
    unseen_fraction : share of the clients that are never trained.
    cache : folder of the prepared data; None: ``$RAYPFL_CACHE``, else ``~/.cache/raypfl``.
    split : ``auto``: a published test split, where there is one, is divided over the clients class by class in
        proportion to their training samples; ``merged``: it is merged with the training samples first, and each client
        holds out `test_fraction` of its own.
    normalise : of a pool from another data set: by whose mean and deviation its mini-batches are normalised, the
        ``clients``' or its ``own``. What models are tested on is always normalised as the clients' data are.
    augmentation : how images are changed at random each time that SGD steps on them, in this order; models are judged
        on images as they are. In YAML a list of names, or of options with a name among them.

    Raises
    ------
    ConfigError : if a number is out of range, a pool is not described, or the shares leave nothing to train on.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    image: str = "image"
    label: str | tuple[str, ...] = "label"
    group: str | None = None
    layout: str = "class"
    files: str | None = None
    variant: str | int | None = None
    size: int | None = None
    fit: Literal["stretch", "crop"] = "stretch"
    uncertain: Literal["positive", "negative"] = "positive"
    rare: int = 2000
    pools: dict[str, float | dict[str, Any]] = field(default_factory=dict)
    test_fraction: float = 0.25
    val_fraction: float = 0.0
    unseen_fraction: float = 0.0
    cache: str | None = None
    split: Literal["auto", "merged"] = "auto"
    normalise: Literal["clients", "own"] = "clients"
    augmentation: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            object.__setattr__(self, "label", tuple(self.label))
        if self.variant is not None:
            object.__setattr__(self, "variant", str(self.variant))
        for name in ("test_fraction", "val_fraction", "unseen_fraction"):
            _require_share(f"data.{name}", getattr(self, name))
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"data.{name} is {value!r}, but must be {' or '.join(map(repr, choices))}.")
        if self.size is not None and self.size < 1:
            raise ConfigError(f"data.size is {self.size}, but must be at least 1.")
        if self.test_fraction + self.val_fraction >= 1:
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction} and data.val_fraction is {self.val_fraction}, which "
                f"leaves nothing to train on."
            )
        taken = sum(self.shares().values())
        if taken >= 1:
            raise ConfigError(f"data.pools take {taken:g} of the training samples, which leaves nothing to train on.")
        self.elsewhere()
        object.__setattr__(self, "augmentation", tuple(self.augmentation))
        for one in self.augmentation:
            if not isinstance(one, Augmentation):
                raise ConfigError(
                    f"data.augmentation has {one!r}; from Python it must be one such as raypfl.augmentation.Flip()."
                )

    def shares(self) -> dict[str, float]:
        """The pools that take a share of the training samples."""
        shares = {name: share for name, share in self.pools.items() if isinstance(share, int | float)}
        for name, share in shares.items():
            _require_share(f"data.pools.{name}", share)
        return shares

    def elsewhere(self) -> dict[str, DataConfig]:
        """The pools that come from another data set."""
        return {name: _pool(name, given) for name, given in self.pools.items() if name not in self.shares()}

    def folder(self, holds: str) -> Path:
        """`root`, which must be there.

        Parameters
        ----------
        holds : what the folder holds, for the message.

        Raises
        ------
        ConfigError : if `root` is missing, or not a folder.
        """
        if self.root is None:
            raise ConfigError(f"data.root is missing: name the folder that holds {holds}.")
        root = Path(self.root).expanduser()
        if not root.is_dir():
            raise ConfigError(
                f"data.root is {self.root!r}, but there is no such folder; it should hold {holds}, which raypfl does "
                f"not download for you."
            )
        return root


_CHOICES = {
    "split": ("auto", "merged"),
    "fit": ("stretch", "crop"),
    "uncertain": ("positive", "negative"),
    "normalise": ("clients", "own"),
}
# What a pool from another data set cannot have: nobody holds it, and it has no clients.
_NOT_OF_POOLS = ("pools", "test_fraction", "val_fraction", "unseen_fraction", "cache", "rare", "augmentation")


def _pool(name: str, given: Any) -> DataConfig:
    if name in SPLITS:
        raise ConfigError(f"data.pools has one called {name!r}, which is the name of a split of the clients' own.")
    if not isinstance(given, dict) or "name" not in given:
        raise ConfigError(no_pool(name, given))
    known = [option.name for option in fields(DataConfig) if option.name not in _NOT_OF_POOLS]
    for option in given:
        if option not in known:
            raise ConfigError(f"data.pools.{name}.{option} is not an option of a pool; {did_you_mean(option, known)}")
    return DataConfig(**given)


def no_pool(name: str, given: Any) -> str:
    """The sentence for what describes no pool."""
    return (
        f"data.pools.{name} is {given!r}, but must be a share of the training samples, as 0.1, or a data set, as "
        f"{{name: cifar100, root: ...}}."
    )


def _require_share(option: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} is {value}, but must be at least 0 and below 1.")


@dataclass(frozen=True)
class RawData:
    """A data set as a reader hands it over.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]`` images, ``float32`` or ``float64[N, ...]`` features, or ``int64[N, ...]`` tokens; or
        an iterable of such blocks, in order, so that not all need be in memory at once.
    labels : ``int64[N]``, each in ``range(len(class_names))``; ``int8[N, L]`` of zeros and ones, L labels a sample;
        ``float32`` or ``float64[N]`` or ``[N, T]``, T numbers a sample; or ``int64[N, T]`` tokens, -1 being none.
    class_names : one a class, a label, a number or a token.
    scale : the value of a full pixel, by which images are divided.
    test_mask : ``bool[N]``, the samples that were published as a test split; None: no such split was published.
    groups : the domain, writer or the like of each sample, ``[N]`` of integers or text; None: there is no such column.

    Raises
    ------
    DataError : if the parts do not fit together.
    """

    inputs: np.ndarray | Iterable[np.ndarray]
    labels: np.ndarray
    class_names: list[str]
    scale: float = 255.0
    test_mask: np.ndarray | None = None
    groups: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise DataError("The data set has no samples.")
        self._refuse_strange()
        width = self.labels[0].size if self.kind in ("labels", "numbers") else len(self.class_names)
        if width != len(self.class_names):
            raise DataError(f"Samples have {width} {self.kind}, but there are {len(self.class_names)} names.")
        for what, column in (("marks of the test split", self.test_mask), ("groups", self.groups)):
            if column is not None and len(column) != len(self.labels):
                raise DataError(f"There are {len(self.labels)} labels, but {len(column)} {what}.")

    @property
    def kind(self) -> str:
        """Of the targets, one of :data:`raypfl.objectives.KINDS`."""
        return kind_of(self.labels)

    def _refuse_strange(self) -> None:
        if self.kind == "numbers":
            strange = np.argwhere(~np.isfinite(self.labels))
            if strange.size:
                raise DataError(f"Sample {strange[0][0]} has a target that is {self.labels[tuple(strange[0])]}.")
            return
        least, values = -1 if self.kind == "tokens" else 0, 2 if self.kind == "labels" else len(self.class_names)
        strange = np.argwhere((self.labels < least) | (self.labels >= values))
        if strange.size:
            label = self.labels[tuple(strange[0])]
            raise DataError(f"Sample {strange[0][0]} has label {label}, but there are {values} classes.")

    def blocks(self) -> Iterable[np.ndarray]:
        """The inputs, block by block: ``[n, ...]`` each."""
        return [self.inputs] if isinstance(self.inputs, np.ndarray) else self.inputs


def reads(
    files: Callable[[DataConfig], list[Path]], fetch: Callable[[DataConfig], None] | None = None
) -> Callable[[_READER], _READER]:
    """Decorator for readers: which files the data set consists of, and how they are fetched.

    The prepared data are kept until one of those files changes; without this decorator, until any file under
    ``data.root`` does.
    """

    def mark(reader: _READER) -> _READER:
        reader.files, reader.fetch = files, fetch  # type: ignore[attr-defined]
        return reader

    return mark


def files_of(config: DataConfig) -> list[Path]:
    """The files that a data set consists of, fetched first where the config lets its reader do so."""
    reader = DATASETS.get(config.name)
    fetch: Callable[[DataConfig], None] | None = getattr(reader, "fetch", None)
    if config.download:
        if fetch is None:
            raise ConfigError(
                f"data.download is true, but raypfl cannot download {config.name!r}; get its files yourself, name "
                f"their folder in data.root, and set data.download to false."
            )
        fetch(config)
    listed = getattr(reader, "files", _all_under_root)
    return listed(config)


def _all_under_root(config: DataConfig) -> list[Path]:
    root = Path(config.root).expanduser() if config.root else None
    return [] if root is None else under(root)


def under(root: Path) -> list[Path]:
    """All files in a folder and in those within, but for hidden ones, in order."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)
