"""Text, character by character: each sequence's target is the sequence one character on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raypfl.common.errors import DataError
from raypfl.datasets.base import DATASETS, DataConfig, RawData, reads, under

LENGTH = 64
"""Characters of a sequence, unless ``data.size`` says otherwise."""

_NONE = -1


def _texts(config: DataConfig) -> list[Path]:
    root = config.folder("text files, one for each writer")
    return [path for path in under(root) if path.match(config.files or "*.txt")]


@DATASETS.register("text")
@reads(_texts)
def text(config: DataConfig) -> RawData:
    """Text files under ``data.root``, ``*.txt`` or as ``data.files`` says: sequences of ``data.size`` characters (64),
    whose targets are the next ones; ``partition: by_column`` makes each file a client."""
    files = _texts(config)
    if not files:
        raise DataError(f"There is no {config.files or '*.txt'} in {config.root}; each writer needs a text file.")
    length, written = config.size or LENGTH, [_read(path) for path in files]
    characters = sorted(set().union(*written))
    code = {character: i for i, character in enumerate(characters)}
    parts = [_sequences(np.array([code[c] for c in one], dtype=np.int64), length) for one in written]
    names = [str(path.relative_to(Path(config.root or "").expanduser())) for path in files]
    return RawData(
        inputs=np.concatenate([inputs for inputs, _ in parts]),
        labels=np.concatenate([targets for _, targets in parts]),
        class_names=characters,
        groups=np.repeat(names, [len(inputs) for inputs, _ in parts]),
    )


def _read(path: Path) -> str:
    try:
        written = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text in UTF-8: {error}") from error
    if len(written) < 2:
        raise DataError(f"{path} has {len(written)} characters; of less than two there is no next one.")
    return written


def _sequences(codes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets ``int64[n, length]``, one after the other; what the last one lacks has no target."""
    count = -(-(len(codes) - 1) // length)
    inputs, targets = np.zeros(count * length, np.int64), np.full(count * length, _NONE, np.int64)
    inputs[: len(codes) - 1], targets[: len(codes) - 1] = codes[:-1], codes[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)
