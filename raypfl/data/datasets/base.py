"""What a data set is: how it is described, how a reader reads it, and what the reader returns."""

from __future__ import annotations

import dis
import inspect
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from raypfl.common.component import undefined
from raypfl.common.conditions import Condition
from raypfl.common.errors import ConfigError, DataError, did_you_mean
from raypfl.common.registry import Registry
from raypfl.learning.augmentation import Augmentation
from raypfl.learning.objectives import kind_of

DATASETS = Registry("data set")

SPLITS = ("train", "val", "test")
"""Of a client, in the order of their codes in the store; pools come after them."""


def _is_divided(name: str) -> bool:
    """Whether a data set is divided over the clients, and not a population that describes them."""
    return not getattr(DATASETS.get(name), "describes_clients", False)


def _reads_files(name: str) -> bool:
    """Whether a data set is read from files; a function that never uses the description that it gets reads none."""
    entry = DATASETS.get(name)
    if not isinstance(entry, FunctionType):
        return getattr(entry, "from_files", True)
    config = entry.__code__.co_varnames[0]
    return any(config in str(instruction.argrepr) for instruction in dis.get_instructions(entry))


_DIVIDED = Condition("name", _is_divided, "leave {this} out, since a Population decides who holds what")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set by name, with the folder of its files and the options of its reader.

    Attributes
    ----------
    name : a registered data set, or ``module:attribute`` of your own: a function or a `Reader` that gets this object,
        or a :class:`raypfl.data.datasets.Population`.
    options : the options that only this reader has; in YAML they stand next to `name`. Options that equal the default
        are dropped.
    root : folder of the data set's files, for readers that need one; or its address in shared storage, any that
        ``pyarrow.fs`` knows (``s3://...``, ``gs://...``), from which the whole folder is copied into `cache` once.
    download : allow a reader to download a published data set into `root`, if it can.
    split : ``auto``: a published test split, if there is one, is divided over the clients class by class, in proportion
        to their training samples; ``merged``: it joins the training samples first, and each client holds out
        `test_fraction` of its own.
    normalise : for a pool from another data set: whether its mini-batches are normalised by the mean and deviation of
        the ``clients``' data or by its ``own``. Evaluation always normalises as for the clients' data.

    Raises
    ------
    ConfigError : if there is no such data set, or an option is unknown or out of range.
    """

    name: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    root: Annotated[str | None, Condition("name", _reads_files, "leave {this} out")] = None
    download: bool = False
    split: Annotated[Literal["auto", "merged"], _DIVIDED] = "auto"
    normalise: Literal["clients", "own"] = "clients"

    def __post_init__(self) -> None:
        require_choices(self)
        entry = DATASETS.get(self.name)
        try:
            signature = inspect.signature(entry)
            signature.bind(self, **self.options)
        except (TypeError, ValueError) as error:
            takes_config = "" if self.options else " It is called with the description of the data (a DataConfig)."
            raise ConfigError(
                f"The data set {self.name!r} cannot be read with these options: {error}.{takes_config}"
            ) from error
        if missing := undefined(entry):
            raise ConfigError(f"The data set {self.name!r} is not complete: define {missing}.")
        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        kept = {name: value for name, value in self.options.items() if name not in defaults or value != defaults[name]}
        object.__setattr__(self, "options", kept)
        if _is_reader(entry):
            entry(self, **kept)  # checks the options

    @property
    def reader(self) -> Reader:
        """What reads this data set.

        It gets the settings that prepared samples are kept by: name, options and root. Others have their defaults.
        """
        entry = DATASETS.get(self.name)
        alone = type(self)(name=self.name, options=self.options, root=self.root, download=self.download)
        return entry(alone, **self.options) if _is_reader(entry) else _FunctionReader(alone)

    def read(self) -> RawData:
        """Read the whole data set.

        Raises
        ------
        DataError : if a file is missing, damaged or not as expected, or if the reader returns something else.
        """
        raw = self.reader.read()
        if not isinstance(raw, RawData):
            raise DataError(f"The reader {self.name!r} returns {type(raw).__name__}; it must return RawData.")
        return raw

    def folder(self, holds: str) -> Path:
        """The folder `root`. Raises a ConfigError, which says what the folder `holds`, if there is none."""
        if self.root is None:
            raise ConfigError(f"data.root is missing: name the folder that holds {holds}.")
        root = Path(self.root).expanduser()
        if root.is_file():
            raise ConfigError(f"data.root is {self.root!r}, which is a file; name the folder that it is in.")
        if not root.is_dir():
            raise ConfigError(f"data.root is {self.root!r}, but there is no such folder; it should hold {holds}.")
        return root


@dataclass(frozen=True, kw_only=True)
class DataConfig(DataSource):
    """The data set of an experiment, and which of a client's samples are held out.

    Attributes
    ----------
    rare : for samples with several labels each: combinations of labels with fewer samples than this count as one
        combination when a partition allocates samples.
    pools : samples that belong to no client, by name: the share of the training samples that goes there, or another
        data set. Methods may ask for ``auxiliary``; pools called ``ood/...`` are test data.
    test_fraction, val_fraction : share of each client's samples that is held out for test and validation. A published
        test split replaces `test_fraction`.
    unseen_fraction : share of the clients that are never trained.
    cache : folder of the prepared data; None: ``$RAYPFL_CACHE``, or else ``~/.cache/raypfl``.
    augmentation : random changes of training images, in this order. In YAML: a list of names, or of options with a
        name.

    Raises
    ------
    ConfigError : if a number is out of range, a pool is not described, or the shares leave no training samples.
    """

    rare: Annotated[int, _DIVIDED] = 2000
    pools: dict[str, Any] = field(default_factory=dict)
    test_fraction: Annotated[float, _DIVIDED] = 0.25
    val_fraction: Annotated[float, _DIVIDED] = 0.0
    unseen_fraction: Annotated[float, _DIVIDED] = 0.0
    cache: str | None = None
    augmentation: tuple[Augmentation, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise != "clients":
            raise ConfigError(
                f"data.normalise is {self.normalise!r}, but is for pools from other data sets; write "
                f"data.pools.NAME.normalise={self.normalise}."
            )
        for name in ("test_fraction", "val_fraction", "unseen_fraction"):
            _require_share(f"data.{name}", getattr(self, name))
        if self.test_fraction + self.val_fraction >= 1:
            raise ConfigError(
                f"data.test_fraction is {self.test_fraction} and data.val_fraction is {self.val_fraction}, which "
                f"leaves no training samples."
            )
        for name, pool in self.pools.items():
            _require_pool(name, pool)
        if (taken := sum(self.shares().values())) >= 1:
            raise ConfigError(f"data.pools take {taken:g} of the training samples, which leaves none to train on.")
        object.__setattr__(self, "augmentation", tuple(self.augmentation))
        for one in self.augmentation:
            if not isinstance(one, Augmentation):
                raise ConfigError(
                    f"data.augmentation has {one!r}; from Python it must be an object such as "
                    f"raypfl.learning.augmentation.Flip()."
                )

    def shares(self) -> dict[str, float]:
        """The pools that take a share of the training samples."""
        return {name: pool for name, pool in self.pools.items() if not isinstance(pool, DataSource)}

    def sources(self) -> dict[str, DataSource]:
        """The pools that come from other data sets."""
        return {name: pool for name, pool in self.pools.items() if isinstance(pool, DataSource)}


def _require_pool(name: str, pool: Any) -> None:
    if name in SPLITS:
        raise ConfigError(f"data.pools has one called {name!r}, which is the name of a split of the clients' own.")
    if isinstance(pool, int | float) and not isinstance(pool, bool):
        _require_share(f"data.pools.{name}", pool)
    elif not isinstance(pool, DataSource):
        raise ConfigError(
            f"data.pools.{name} is {pool!r}, but must be a share of the training samples, as 0.1, or a data set, as "
            f"{{name: cifar100, root: ...}} (from Python: raypfl.data.datasets.DataSource)."
        )


def _require_share(option: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{option} is {value}, but must be at least 0 and below 1.")


def require_size(size: int | None) -> None:
    """Raise a ConfigError unless the option `size` is at least 1, or None."""
    if size is not None and size < 1:
        raise ConfigError(f"data.size is {size}, but must be at least 1.")


def require_choices(options: Any) -> None:
    """Raise a ConfigError if a field that is declared as a `Literal` has another value."""
    for name, declared in get_type_hints(type(options)).items():
        choices = get_args(declared) if get_origin(declared) is Literal else None
        if choices and getattr(options, name) not in choices:
            wanted = " or ".join(map(repr, choices))
            raise ConfigError(f"data.{name} is {getattr(options, name)!r}, but must be {wanted}.")


@dataclass(frozen=True)
class RawData:
    """A data set as its reader returns it.

    Attributes
    ----------
    inputs : ``uint8[N, C, H, W]`` images, ``float32`` or ``float64[N, ...]`` features, or ``int64[N, ...]`` tokens; or
        an iterable of such blocks, in order, so that they need not all be in memory at once. A list of N samples
        without such an axis is stacked.
    labels : ``int64[N]``, each in ``range(len(class_names))``, or N of the class names; ``int8[N, L]`` of zeros and
        ones, L labels per sample; ``float32`` or ``float64[N]`` or ``[N, T]``, T numbers per sample; or ``int64[N, T]``
        tokens, -1 for none.
    class_names : one for each class, label, number or token.
    scale : the value of a full pixel, by which images are divided.
    test_mask : ``bool[N]``, the samples of the published test split; None: there is none.
    groups : the domain, writer or the like of each sample, ``[N]`` of integers or text; None: there is no such column.
    feature_names : of the last axis of `inputs`; None: features have no names. Those of pools are matched by name.
    indicators : for each of these, whether it is 1 or 0 for a category, and so is not standardised; None: none is.

    NumPy arrays, PyTorch tensors and lists will do; the attributes are arrays.

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
    feature_names: list[str] | None = None
    indicators: list[bool] | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "test_mask", "groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, as_array(getattr(self, name), name))
        object.__setattr__(self, "class_names", [str(name) for name in self.class_names])
        if not len(self.labels):
            raise DataError("The data set has no samples.")
        if self.labels.dtype.kind in "UO":
            object.__setattr__(self, "labels", numbered(self.labels, self.class_names))
        if isinstance(self.inputs, Tensor) or _is_samples(self.inputs, len(self.labels)):
            object.__setattr__(self, "inputs", as_array(self.inputs, "inputs"))
        self._check_shapes()
        self._check_labels()
        width = self.labels[0].size if self.kind in ("labels", "numbers") else len(self.class_names)
        if width != len(self.class_names) and self.labels.ndim == 1:
            raise DataError(
                f"Labels of type {self.labels.dtype} are numbers for regression, one a sample, but there are "
                f"{len(self.class_names)} names; the labels of classes must be integers."
            )
        if width != len(self.class_names):
            raise DataError(f"Samples have {width} {self.kind}, but there are {len(self.class_names)} names.")
        for what, column in (("marks of the test split", self.test_mask), ("groups", self.groups)):
            if column is not None and len(column) != len(self.labels):
                raise DataError(f"There are {len(self.labels)} labels, but {len(column)} {what}.")
        names = self.feature_names or []
        if self.indicators is not None and len(self.indicators) != len(names):
            raise DataError(f"There are {len(names)} names of features, but {len(self.indicators)} indicators.")
        if names and isinstance(self.inputs, np.ndarray) and self.inputs.shape[-1] != len(names):
            raise DataError(f"There are {len(names)} names of features, but inputs are [N, {self.inputs.shape[-1]}].")

    @property
    def kind(self) -> str:
        """Of the targets, one of :data:`raypfl.learning.objectives.KINDS`."""
        return kind_of(self.labels)

    def _check_shapes(self) -> None:
        if self.labels.dtype.kind not in "iuf" or self.labels.ndim > 2:
            raise DataError(
                f"The labels are {self.labels.dtype}{list(self.labels.shape)}; they must be integers [N], one class a "
                "sample; int8 [N, L], zeros and ones; floating-point numbers [N] or [N, T]; or tokens [N, T]. One "
                "class a pixel, as in segmentation, is not supported."
            )
        if self.labels.shape[1:] == (1,) and self.labels.dtype.kind in "iu" and self.labels.dtype != np.int8:
            raise DataError(
                f"The labels are {self.labels.dtype}{list(self.labels.shape)}; one class a sample is [N]: give "
                "labels[:, 0]."
            )
        if isinstance(self.inputs, np.ndarray) and len(self.inputs) != len(self.labels):
            raise DataError(f"There are {len(self.inputs)} inputs, but {len(self.labels)} labels.")
        shape = np.shape(self.inputs) if isinstance(self.inputs, np.ndarray) else ()
        if len(shape) == 4 and shape[1] == shape[2] > 4 and shape[3] in (1, 3):
            warnings.warn(
                f"The inputs are {list(shape)}, which are taken for images of {shape[1]} channels. If they are "
                "[N, H, W, C], give inputs.transpose(0, 3, 1, 2).",
                stacklevel=4,
            )

    def _check_labels(self) -> None:
        if self.kind == "numbers":
            self._warn_of_one_hot()
            wrong, expected = np.argwhere(~np.isfinite(self.labels)), "targets must be finite numbers"
        else:
            least, values = -1 if self.kind == "tokens" else 0, 2 if self.kind == "labels" else len(self.class_names)
            wrong, expected = (
                np.argwhere((self.labels < least) | (self.labels >= values)),
                f"there are {values} classes, counted from 0",
            )
        if wrong.size:
            raise DataError(f"Sample {wrong[0][0]} has label {self.labels[tuple(wrong[0])]}, but {expected}.")

    def _warn_of_one_hot(self) -> None:
        is_table = self.labels.ndim == 2 and self.labels.shape[1] > 1
        if is_table and ((self.labels == 0) | (self.labels == 1)).all() and (self.labels.sum(1) == 1).all():
            warnings.warn(
                "The labels are numbers, for regression, but each row has a single 1, as one class a sample has. For "
                "classification give labels.argmax(1).",
                stacklevel=4,
            )

    def blocks(self) -> Iterable[np.ndarray]:
        """The inputs, block by block: ``[n, ...]`` each."""
        if isinstance(self.inputs, np.ndarray):
            return [self.inputs]
        return (as_array(block, "inputs") for block in self.inputs)


def as_array(values: Any, what: str) -> np.ndarray:
    """An array, of a PyTorch tensor, a list, or a list of tensors.

    Raises
    ------
    DataError : if rows are of different shapes; `what` says of what.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return values.float().numpy() if values.dtype in (torch.bfloat16, torch.float16) else values.numpy()
    if isinstance(values, list | tuple) and any(isinstance(row, Tensor) for row in values):
        values = [as_array(row, what) for row in values]
    try:
        return np.asarray(values)
    except ValueError:
        raise DataError(f"The {what} are of different shapes, so that they make no array.") from None


def numbered(labels: np.ndarray, class_names: list[str]) -> np.ndarray:
    """Labels that are given by name, as the places of these names in `class_names`: ``int64[N]``.

    Raises
    ------
    DataError : for the first that is none of them.
    """
    places = {name: place for place, name in enumerate(class_names)}
    for row, label in enumerate(labels.tolist()):
        if not (isinstance(label, str) and label in places):
            hint = did_you_mean(str(label), class_names) if class_names else "class_names is empty."
            raise DataError(f"Sample {row} has label {label!r}, which is not in class_names; {hint}")
    return np.array([places[label] for label in labels.tolist()], dtype=np.int64)


def _is_samples(inputs: Any, count: int) -> bool:
    """Whether inputs are a list of `count` single samples, and not of blocks of samples."""
    if not isinstance(inputs, list | tuple) or len(inputs) != count:
        return False
    shapes = {np.shape(row) for row in inputs}
    # A list of N images [1, H, W], or of N blocks of one sample each, [1, C, H, W] or [1, features].
    return not all(shape[:1] == (1,) and len(shape) in (2, 4) for shape in shapes)


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one kind of data set.

    A subclass declares its own options as dataclass fields. Prepared data are kept until a file in `paths` changes.

    Attributes
    ----------
    config : the description of the data set.
    from_files : whether it reads files, so that ``data.root`` has an effect.
    """

    from_files: ClassVar[bool] = True

    config: DataSource

    def __post_init__(self) -> None:
        require_choices(self)

    @abstractmethod
    def read(self) -> RawData:
        """Read the whole data set. Raises as `DataSource.read` does."""

    def paths(self) -> list[Path]:
        """The files that the data set consists of: by default, all files under ``data.root``."""
        return under(Path(self.config.root).expanduser()) if self.config.root else []

    def download(self) -> None:
        """Download the files into ``data.root`` unless they are there.

        Raises
        ------
        ConfigError : if there is no download of this data set; this is the default.
        DataError : if the download fails.
        """
        raise ConfigError(
            f"data.download is true, but raypfl cannot download {self.config.name!r}; get its files yourself and name "
            f"their folder in data.root."
        )


class _FunctionReader(Reader):
    """A function that returns `RawData`."""

    def read(self) -> RawData:
        return DATASETS.get(self.config.name)(self.config, **self.config.options)


def _is_reader(entry: Any) -> bool:
    return isinstance(entry, type) and issubclass(entry, Reader)


def under(root: Path) -> list[Path]:
    """All files in a folder and its subfolders, in order, without hidden ones."""
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found)
