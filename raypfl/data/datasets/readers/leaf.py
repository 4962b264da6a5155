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
from raypfl.data.datasets.readers.text import cut_into_sequences
from raypfl.data.datasets.source import DATASETS, Reader, files_under, require_size

# Pixels of an image's side.
_SIDE = 28
_CHARACTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"


class _User(NamedTuple):
    """The samples of a user in a file."""

    name: str
    inputs: np.ndarray
    labels: np.ndarray
    is_test: bool


@dataclass(frozen=True, kw_only=True)
class LeafReader(Reader):
    """Reads the ``.json`` files of one of LEAF's data sets, in ``data.root``.

    This is the folder ``data/all_data``, or ``data`` with ``train`` and ``test``, of which the latter is the published
    test split. With ``partition: by_column``, each user is a client.

    Attributes
    ----------
    title : the data set's name in messages.
    user : what its users are called.
    classes : names of its classes.
    """

    title: ClassVar[str]
    user: ClassVar[str]
    classes: ClassVar[list[str]]

    @abstractmethod
    def samples(self, x: Any, y: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of a user, from the file's `x` and `y`; `place` is what messages call the user."""

    def paths(self) -> list[Path]:
        root = self._root()
        paths = [path for path in files_under(root) if path.suffix == ".json" and _is_data(path, root)]
        if not paths:
            raise DataError(
                f"There is no .json file in {root}, which data.root names. LEAF's preprocess.sh for "
                f"{self.title.lower()} writes them to data/all_data, or to data/train and data/test."
            )
        return paths

    def read(self) -> RawData:
        root = self._root()
        users: list[_User] = []
        # One file at a time, since its JSON takes far more memory than its arrays.
        for path in self.paths():
            users += self._read_users(path, root)

        sizes = [len(user.labels) for user in users]
        if not any(sizes):
            raise DataError(f"The .json files in {root} have no {self.user} with samples.")
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

    def _read_users(self, path: Path, root: Path) -> Iterator[_User]:
        relative_path = path.relative_to(root)
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{relative_path} is damaged, or not JSON: {error}") from error

        user_data = content.get("user_data") if isinstance(content, dict) else None
        names = content.get("users") if isinstance(content, dict) else None
        if not isinstance(user_data, dict) or not isinstance(names, list):
            raise DataError(f"{relative_path} has no 'users' and 'user_data', as LEAF's files have.")

        for name in names:
            user = user_data.get(str(name))
            if not isinstance(user, dict) or not user.keys() >= {"x", "y"}:
                raise DataError(
                    f"{relative_path} lists the {self.user} {name!r}, but has no x and y of that {self.user}."
                )
            inputs, labels = self.samples(user["x"], user["y"], f"{self.user} {name!r} in {relative_path}")
            yield _User(str(name), inputs, labels, is_test=relative_path.parts[0] == "test")


@DATASETS.register("femnist")
@dataclass(frozen=True, kw_only=True)
class FEMNIST(LeafReader):
    """Handwritten digits and letters, 28x28 grey, by writer; data.root has the ``.json`` files that LEAF writes."""

    title: ClassVar[str] = "FEMNIST"
    user: ClassVar[str] = "writer"
    classes: ClassVar[list[str]] = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]

    def samples(self, x: Any, y: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
        pixels = _as_numbers(x, "x", place)
        labels = _as_numbers(y, "y", place)
        _check_images(pixels, labels, place)

        images = np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
        return images, labels.astype(np.int64)


@DATASETS.register("shakespeare")
@dataclass(frozen=True, kw_only=True)
class Shakespeare(LeafReader):
    """Shakespeare's plays by role, for the next character; data.root has the ``.json`` files that LEAF writes.

    LEAF's files have a window for every character. Windows that follow each other are put together again, and the text
    is cut into sequences.

    Attributes
    ----------
    size : number of characters of a sequence.
    """

    size: int = 80

    title: ClassVar[str] = "Shakespeare"
    user: ClassVar[str] = "role"
    classes: ClassVar[list[str]] = [*_CHARACTERS]

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)

    def samples(self, x: Any, y: Any, place: str) -> tuple[np.ndarray, np.ndarray]:
        inputs = [np.zeros((0, self.size), np.int64)]
        labels = [np.zeros((0, self.size), np.int64)]
        for text in _join_windows(x, y, place):
            text_inputs, text_labels = cut_into_sequences(_character_codes(text, place), self.size)
            inputs.append(text_inputs)
            labels.append(text_labels)
        return np.concatenate(inputs), np.concatenate(labels)


def _join_windows(x: Any, y: Any, place: str) -> list[str]:
    """Join windows and the character after each to texts; a window that begins one character later continues a text."""
    are_lists = isinstance(x, list) and isinstance(y, list) and len(x) == len(y)
    if not are_lists or not all(isinstance(text, str) and text for text in [*x, *y]):
        raise DataError(f"The x and y of {place} are not as many texts, a window and the character after it.")

    texts: list[list[str]] = []
    expected_window = None
    for window, next_character in zip(x, y, strict=True):
        if window != expected_window:
            texts.append([window])
        texts[-1].append(next_character)
        expected_window = window[1:] + next_character
    return ["".join(parts) for parts in texts]


def _character_codes(text: str, place: str) -> np.ndarray:
    codes = np.array([_CHARACTERS.find(character) for character in text], dtype=np.int64)
    if (codes < 0).any():
        unknown = text[int(np.flatnonzero(codes < 0)[0])]
        raise DataError(
            f"The text of {place} has the character {unknown!r}, which is not one of LEAF's {len(_CHARACTERS)}."
        )
    return codes


def _is_data(path: Path, root: Path) -> bool:
    """Return whether a file holds samples, and no intermediate data of LEAF if `root` is its whole ``data`` folder."""
    parts = path.relative_to(root).parts
    if (root / "train").is_dir() and (root / "test").is_dir():
        return parts[0] in ("train", "test")
    return len(parts) == 1 or parts[0] == "all_data"


def _as_numbers(values: Any, key: str, place: str) -> np.ndarray:
    try:
        numbers = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"The {key} of {place} has rows of different lengths, or other values than numbers.") from None

    # A list of no images has lost the length of its rows.
    if not len(numbers):
        return numbers.reshape((0, _SIDE**2) if key == "x" else (0,))
    return numbers


def _check_images(pixels: np.ndarray, labels: np.ndarray, place: str) -> None:
    """Raise a DataError unless these are images with values from 0 to 1 and a class for each."""
    if pixels.ndim != 2 or pixels.shape[1] != _SIDE**2:
        raise DataError(f"The x of {place} is {list(pixels.shape)}; it must have rows of {_SIDE**2} pixels.")
    if labels.shape != pixels.shape[:1]:
        raise DataError(f"The writer has {len(pixels)} images, but labels {list(labels.shape)}: {place}.")

    outside = np.argwhere(~((pixels >= 0) & (pixels <= 1)))
    if outside.size:
        value = pixels[tuple(outside[0])]
        raise DataError(f"Image {outside[0][0]} of {place} has the value {value}; LEAF's are 0 to 1.")

    is_class = (labels >= 0) & (labels < len(FEMNIST.classes)) & (labels % 1 == 0)
    wrong = np.flatnonzero(~is_class)
    if wrong.size:
        label = labels[wrong[0]]
        raise DataError(f"Image {wrong[0]} of {place} has label {label:g}, but there are 62 classes, from 0.")
