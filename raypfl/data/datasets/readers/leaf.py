"""FEMNIST by writer and Shakespeare by role, in the JSON files of LEAF (Caldas et al. 2018)."""

from __future__ import annotations

import json
import string
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers.text import sequences
from raypfl.data.datasets.source import DATASETS, Reader, files_under, require_size

_SIDE = 28
_LETTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"


class _User(NamedTuple):
    """One user's samples in one file."""

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    is_test: bool


@dataclass(frozen=True, kw_only=True)
class LeafReader(Reader):
    """The ``.json`` files of one of LEAF's data sets, in ``data.root``.

    That is ``data/all_data``, or ``data`` with ``train`` and ``test``, of which the latter is the published test split.
    With ``partition: by_column``, each user is a client.
    """

    title: ClassVar[str]
    user: ClassVar[str]
    classes: ClassVar[list[str]]

    @abstractmethod
    def samples(self, x: Any, y: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of the user that messages call `where`, from what the file has of them."""

    def paths(self) -> list[Path]:
        root = self._root()
        found = [path for path in files_under(root) if path.suffix == ".json" and _is_data(path, root)]
        if not found:
            raise DataError(
                f"There is no .json file in {root}, which data.root names. LEAF's preprocess.sh for "
                f"{self.title.lower()} writes them to data/all_data, or to data/train and data/test."
            )
        return found

    def read(self) -> RawData:
        root = self._root()
        users = [user for path in self.paths() for user in self._users(path, root)]  # a file at a time as JSON
        sizes = [len(user.labels) for user in users]
        is_test = np.repeat([user.is_test for user in users], sizes)
        return RawData(
            inputs=(user.inputs for user in users if len(user.labels)),
            labels=np.concatenate([user.labels for user in users]),
            class_names=self.classes,
            test_mask=is_test if is_test.any() else None,
            groups=np.repeat([user.name for user in users], sizes),
        )

    def _root(self) -> Path:
        return self.config.folder(f"LEAF's .json files of {self.title}")

    def _users(self, path: Path, root: Path) -> Iterator[_User]:
        shown = path.relative_to(root)
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{shown} is damaged, or not JSON: {error}") from error
        data = content.get("user_data") if isinstance(content, dict) else None
        names = content.get("users") if isinstance(content, dict) else None
        if not isinstance(data, dict) or not isinstance(names, list):
            raise DataError(f"{shown} has no 'users' and 'user_data', as LEAF's files have.")
        for name in names:
            if not isinstance(own := data.get(str(name)), dict) or not own.keys() >= {"x", "y"}:
                raise DataError(f"{shown} lists the {self.user} {name!r}, but has no x and y of that {self.user}.")
            samples = self.samples(own["x"], own["y"], f"{self.user} {name!r} in {shown}")
            yield _User(str(name), *samples, shown.parts[0] == "test")


@DATASETS.register("femnist")
@dataclass(frozen=True, kw_only=True)
class FEMNIST(LeafReader):
    """Handwritten digits and letters, 28x28 grey, by writer; data.root has the ``.json`` files that LEAF writes."""

    title: ClassVar[str] = "FEMNIST"
    user: ClassVar[str] = "writer"
    classes: ClassVar[list[str]] = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]

    def samples(self, x: Any, y: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        pixels, labels = _array(x, "x", where), _array(y, "y", where)
        _check(pixels, labels, where)
        return np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE), labels.astype(np.int64)


@DATASETS.register("shakespeare")
@dataclass(frozen=True, kw_only=True)
class Shakespeare(LeafReader):
    """Shakespeare's plays by role, for the next character; data.root has the ``.json`` files that LEAF writes.

    LEAF's files have a window for every character. Windows that follow each other are put together again, and the text
    is cut into sequences.

    Attributes
    ----------
    size : characters of a sequence.
    """

    size: int = 80

    title: ClassVar[str] = "Shakespeare"
    user: ClassVar[str] = "role"
    classes: ClassVar[list[str]] = [*_LETTERS]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)

    def samples(self, x: Any, y: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
        parts = [sequences(_codes(text, where), self.size) for text in _passages(x, y, where)]
        inputs, labels = zip(*parts, strict=True) if parts else ([np.zeros((0, self.size), np.int64)],) * 2
        return np.concatenate(inputs), np.concatenate(labels)


def _passages(x: Any, y: Any, where: str) -> list[str]:
    """Texts from windows and the character after each; a window that begins one character later continues a text."""
    lists = isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
    if not lists or not all(isinstance(one, str) and one for one in [*x, *y]):
        raise DataError(f"The x and y of {where} are not as many texts, a window and the character after it.")
    passages: list[list[str]] = []
    expected = None
    for window, following in zip(x, y, strict=True):
        if window != expected:
            passages.append([window])
        passages[-1].append(following)
        expected = window[1:] + following
    return ["".join(parts) for parts in passages]


def _codes(text: str, where: str) -> np.ndarray:
    codes = np.array([_LETTERS.find(one) for one in text], dtype=np.int64)
    if (codes < 0).any():
        strange = text[int(np.flatnonzero(codes < 0)[0])]
        raise DataError(f"The text of {where} has the character {strange!r}, which is none of LEAF's {len(_LETTERS)}.")
    return codes


def _is_data(path: Path, root: Path) -> bool:
    """Whether it is no intermediate file of LEAF's, where the whole of its ``data`` folder is given."""
    inside = path.relative_to(root).parts
    if (root / "train").is_dir() and (root / "test").is_dir():
        return inside[0] in ("train", "test")
    return len(inside) == 1 or inside[0] == "all_data"


def _array(values: Any, key: str, where: str) -> np.ndarray:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"The {key} of {where} has rows of different lengths, or values that are no numbers.") from None
    return found if len(found) else found.reshape(0, *([_SIDE**2] if key == "x" else []))


def _check(pixels: np.ndarray, labels: np.ndarray, where: str) -> None:
    """Raise a DataError unless they are images with values from 0 to 1 and a class for each."""
    if pixels.ndim != 2 or pixels.shape[1] != _SIDE**2:
        raise DataError(f"The x of {where} is {list(pixels.shape)}; it must have rows of {_SIDE**2} pixels.")
    if labels.shape != pixels.shape[:1]:
        raise DataError(f"The writer has {len(pixels)} images, but labels {list(labels.shape)}: {where}.")
    if (wrong := np.argwhere(~((pixels >= 0) & (pixels <= 1)))).size:
        raise DataError(f"Image {wrong[0][0]} of {where} has the value {pixels[tuple(wrong[0])]}; LEAF's are 0 to 1.")
    known = (labels >= 0) & (labels < len(FEMNIST.classes)) & (labels % 1 == 0)
    if (odd := np.flatnonzero(~known)).size:
        raise DataError(f"Image {odd[0]} of {where} has label {labels[odd[0]]:g}, but there are 62 classes, from 0.")
