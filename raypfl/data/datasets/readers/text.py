"""Text, character by character: the target of a sequence is the same sequence one character later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypfl.common.errors import DataError
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.source import DATASETS, Reader, files_under, require_size

_NO_TARGET = -1


@DATASETS.register("text")
@dataclass(frozen=True, kw_only=True)
class Text(Reader):
    """Text files under ``data.root``, cut into sequences of characters whose targets are the next characters.

    With ``partition: by_column``, each file is a client.

    Attributes
    ----------
    files : pattern of the files' names.
    size : number of characters of a sequence.
    """

    files: str = "*.txt"
    size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require_size(self.size)

    def paths(self) -> list[Path]:
        paths = [path for path in files_under(self._root()) if path.match(self.files)]
        if not paths:
            raise DataError(f"There is no {self.files} in {self.config.root}; each writer needs a text file.")
        return paths

    def read(self) -> RawData:
        paths = self.paths()
        texts = [_read_text(path) for path in paths]
        characters = sorted(set().union(*texts))
        code_of = {character: code for code, character in enumerate(characters)}

        inputs = []
        targets = []
        for text in texts:
            codes = np.array([code_of[character] for character in text], dtype=np.int64)
            text_inputs, text_targets = cut_into_sequences(codes, self.size)
            inputs.append(text_inputs)
            targets.append(text_targets)

        file_names = [str(path.relative_to(self._root())) for path in paths]
        return RawData(
            inputs=np.concatenate(inputs),
            labels=np.concatenate(targets),
            class_names=characters,
            groups=np.repeat(file_names, [len(text_inputs) for text_inputs in inputs]),
        )

    def _root(self) -> Path:
        return self.config.folder("text files, one for each writer")


def _read_text(path: Path) -> str:
    try:
        # Without the mark of UTF-8 at the beginning that Windows writes.
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}") from error
    if len(text) < 2:
        raise DataError(f"{path} has {len(text)} characters; at least two are needed for one to have a next one.")
    return text


def cut_into_sequences(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text into sequences: inputs and targets, ``int64[n, length]`` each, in order.

    The padding of the last sequence has no targets.
    """
    num_targets = len(codes) - 1
    count = -(-num_targets // length)
    inputs = np.zeros(count * length, np.int64)
    targets = np.full(count * length, _NO_TARGET, np.int64)
    inputs[:num_targets] = codes[:-1]
    targets[:num_targets] = codes[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)
