"""Text, character by character: the target of a sequence is the same sequence one character later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, Reader, files_under, require_size

_NONE = -1


@DATASETS.register("text")
@dataclass(frozen=True, kw_only=True)
class Text(Reader):
    """Text files under ``data.root``, cut into sequences of characters whose targets are the next characters.

    With ``partition: by_column``, each file is a client.

    Attributes
    ----------
    files : pattern of the files' names.
    size : characters of a sequence.
    """

    files: str = "*.txt"
    size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)

    def paths(self) -> list[Path]:
        found = [path for path in files_under(self._root()) if path.match(self.files)]
        if not found:
            raise DataError(f"There is no {self.files} in {self.config.root}; each writer needs a text file.")
        return found

    def read(self) -> RawData:
        files = self.paths()
        texts = [_read(path) for path in files]
        characters = sorted(set().union(*texts))
        code = {character: i for i, character in enumerate(characters)}
        parts = [sequences(np.array([code[c] for c in one], dtype=np.int64), self.size) for one in texts]
        names = [str(path.relative_to(self._root())) for path in files]
        return RawData(
            inputs=np.concatenate([inputs for inputs, _ in parts]),
            labels=np.concatenate([targets for _, targets in parts]),
            class_names=characters,
            groups=np.repeat(names, [len(inputs) for inputs, _ in parts]),
        )

    def _root(self) -> Path:
        return self.config.folder("text files, one for each writer")


def _read(path: Path) -> str:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}") from error
    if len(text) < 2:
        raise DataError(f"{path} has {len(text)} characters; at least two are needed for one to have a next one.")
    return text


def sequences(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets ``int64[n, length]``, in order; the padding of the last sequence has no targets."""
    count = -(-(len(codes) - 1) // length)
    inputs, targets = np.zeros(count * length, np.int64), np.full(count * length, _NONE, np.int64)
    inputs[: len(codes) - 1], targets[: len(codes) - 1] = codes[:-1], codes[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)
