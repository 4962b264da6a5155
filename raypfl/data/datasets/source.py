"""Data sets by name, and their readers: the classes or functions that read them."""

from __future__ import annotations

import dis
import functools
import inspect
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from raypfl.common.component import abstract_functions
from raypfl.common.conditions import Condition
from raypfl.common.errors import ConfigError, DataError
from raypfl.common.registry import Registry
from raypfl.data.datasets.csv_lines import is_table
from raypfl.data.datasets.raw_data import RawData


def _how_to_name_a_file(name: str) -> str:
    """Return how to describe the data in a file that is given in place of the name of a data set."""
    if not is_table(name):
        return ""
    return (
        f"a table is read by data=table data.root={name} data.target=COLUMN, the column to predict; a table that lists "
        "images by data=csv or data=parquet. See docs/data.md."
    )


DATASETS = Registry("data set", _how_to_name_a_file)


def _is_divided(name: str) -> bool:
    """Return whether a data set is divided over the clients, and not a population that describes them."""
    return not getattr(DATASETS.get(name), "describes_clients", False)


def _reads_files(name: str) -> bool:
    """Return whether a data set is read from files, so that ``data.root`` has an effect.

    A function cannot declare this, so its bytecode tells: one that never uses its first argument, the description of
    the data, cannot know `root`.
    """
    entry = DATASETS.get(name)
    if not isinstance(entry, FunctionType):
        return getattr(entry, "from_files", True)
    return _uses_first_argument(entry.__code__)


@functools.lru_cache(maxsize=64)  # every experiment asks several times
def _uses_first_argument(code: CodeType) -> bool:
    argument = code.co_varnames[0]
    return any(argument in str(instruction.argrepr) for instruction in dis.get_instructions(code))


DIVIDED = Condition("name", _is_divided, "leave {this} out, since a Population decides who holds what")


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set by name, with the folder of its files and the options of its reader.

    Attributes
    ----------
    name : a registered data set, or ``module:attribute`` of your own: a function or a `Reader`, called with this
        object, or a :class:`raypfl.data.datasets.Population`.
    options : options of the reader; in YAML they stand next to `name`. Options that equal the default are dropped.
    root : folder of the data set's files, for readers that need one; of a ``table``, also its only file; or the
        folder's address in shared storage, any that ``pyarrow.fs`` knows (``s3://...``, ``gs://...``), from which the
        whole folder is copied into `cache` once.
    download : whether a reader may download a published data set into `root`, if it can.
    split : use of a published test split: ``auto`` divides it over the clients class by class, in proportion to their
        training samples; ``merged`` adds it to the training samples first, and each client holds out `test_fraction`.
    normalise : mean and deviation that normalise the mini-batches of a pool from another data set: those of the
        ``clients``' data, or the pool's ``own``. Evaluation always normalises as for the clients' data.

    Raises
    ------
    ConfigError : if there is no such data set, or an option is unknown or out of range.
    """

    name: str = "digits"
    options: dict[str, Any] = field(default_factory=dict)
    root: Annotated[str | None, Condition("name", _reads_files, "leave {this} out")] = None
    download: bool = False
    split: Annotated[Literal["auto", "merged"], DIVIDED] = "auto"
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

        missing = abstract_functions(entry)
        if missing:
            raise ConfigError(f"The data set {self.name!r} is not complete: define {missing}.")

        defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
        options = {
            name: value for name, value in self.options.items() if name not in defaults or value != defaults[name]
        }
        object.__setattr__(self, "options", options)

        # A reader checks its options when it is created.
        if _is_reader(entry):
            entry(self, **options)

    @property
    def reader(self) -> Reader:
        """What reads this data set.

        It gets only the settings that identify prepared samples, name, options and root, and `download`; all others
        have their defaults.
        """
        entry = DATASETS.get(self.name)
        source = type(self)(name=self.name, options=self.options, root=self.root, download=self.download)
        return entry(source, **self.options) if _is_reader(entry) else _FunctionReader(source)

    def read(self, vocabulary: list[str] | None = None) -> RawData:
        """Read the whole data set; texts, where the reader can, with the tokens of another data set's vocabulary.

        Raises
        ------
        DataError : if a file is missing, damaged or not as expected, or if the reader returns something else.
        """
        reader = self.reader
        raw = reader.read() if vocabulary is None else reader.read_in(vocabulary)
        if not isinstance(raw, RawData):
            raise DataError(f"The reader {self.name!r} returns {type(raw).__name__}; it must return RawData.")
        return raw

    def folder(self, content: str) -> Path:
        """Return the folder `root`; `content` says in messages what it should hold.

        Raises
        ------
        ConfigError : if there is no such folder.
        """
        if self.root is None:
            raise ConfigError(f"data.root is missing: name the folder that holds {content}.")
        root = Path(self.root).expanduser()
        if root.is_file():
            raise ConfigError(
                f"data.root is {self.root!r}, which is a file; name the folder that it is in. "
                "A table of features is read by data=table."
            )
        if not root.is_dir():
            raise ConfigError(f"data.root is {self.root!r}, which does not exist; it should hold {content}.")
        return root


@dataclass(frozen=True)
class Reader(ABC):
    """Reads one kind of data set.

    A subclass declares its own options as dataclass fields. Prepared data are kept until a file in `paths` changes.

    Attributes
    ----------
    config : the description of the data set.
    from_files : whether it reads files, so that ``data.root`` has an effect.
    shared_with_pools : options that a pool of the same kind gets from the clients' data set.
    """

    from_files: ClassVar[bool] = True
    shared_with_pools: ClassVar[tuple[str, ...]] = ()

    config: DataSource

    def __post_init__(self) -> None:
        require_choices(self)

    @abstractmethod
    def read(self) -> RawData:
        """Read the whole data set. Raises as `DataSource.read` does."""

    def read_in(self, vocabulary: list[str]) -> RawData:
        """Read the whole data set with the tokens of this vocabulary; by default, with its own."""
        return self.read()

    def paths(self) -> list[Path]:
        """Return the files that the data set consists of: by default, all files under ``data.root``."""
        return files_under(Path(self.config.root).expanduser()) if self.config.root else []

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


def require_choices(options: Any) -> None:
    """Raise a ConfigError if a field that is declared as a `Literal` has another value."""
    options_class: Any = type(options)  # mypy takes no type for hashable
    for name, choices in _choices(options_class).items():
        value = getattr(options, name)
        if value not in choices:
            raise ConfigError(f"data.{name} is {value!r}, but must be {' or '.join(map(repr, choices))}.")


@functools.lru_cache(maxsize=64)
def _choices(options: type) -> dict[str, tuple[Any, ...]]:
    """Return field -> values, for the fields of a dataclass that are declared as a `Literal`."""
    choices = {}
    for name, hint in get_type_hints(options).items():
        if get_origin(hint) is Literal:
            choices[name] = get_args(hint)
    return choices


def require_size(size: int | None) -> None:
    """Raise a ConfigError unless the option `size` is at least 1, or None."""
    if size is not None and size < 1:
        raise ConfigError(f"data.size is {size}, but must be at least 1.")


def files_under(root: Path) -> list[Path]:
    """Return all files in a folder, its subfolders and folders that are linked there, in order, without hidden ones.

    If `root` is a file, this is the only one.
    """
    if root.is_file():
        return [root]
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root, followlinks=True):
        # os.walk descends into what is left in this list.
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and not _leads_back(folder, name)]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(paths)


def _leads_back(folder: str, name: str) -> bool:
    """Return whether the subfolder is a link to a folder around it, so that following it would never end."""
    subfolder = Path(folder, name)
    return subfolder.is_symlink() and subfolder.resolve() in [around.resolve() for around in subfolder.parents]
