"""Features, and classes or numbers to predict, in a pair of ``.npy`` files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.data.datasets.labels import checked_labels, class_count, warn_of_classes
from raypfl.data.datasets.raw_data import RawData
from raypfl.data.datasets.readers.npy import open_npy
from raypfl.data.datasets.source import DATASETS, Reader


@DATASETS.register("arrays")
@dataclass(frozen=True, kw_only=True)
class ArrayPair(Reader):
    """Two files in data.root: inputs ``[n, ...]`` in floating point, and targets.

    Targets are classes, integers ``[n]`` from 0; or numbers in floating point, ``[n]`` or ``[n, T]``.

    Attributes
    ----------
    input : name of the file of inputs.
    target : name of the file of targets.
    """

    input: str = "inputs.npy"
    target: str = "targets.npy"

    def paths(self) -> list[Path]:
        root = self.config.folder("the .npy files")
        for name in (self.input, self.target):
            if not (root / name).is_file():
                raise ConfigError(f"There is no {name} in {root}; see data.root, data.input and data.target.")
        return [root / self.input, root / self.target]

    def read(self) -> RawData:
        inputs, targets = (open_npy(path) for path in self.paths())
        if inputs.ndim == 1:
            raise DataError(f"{self.input} has the shape {list(inputs.shape)}; one number a sample is [n, 1].")
        inputs = _as_numbers(
            inputs,
            self.input,
            "inputs in floating point: save x.astype('float32'). data.name=npy reads images in uint8",
        )

        if targets.dtype.kind in "iu":
            targets = checked_labels(targets, None, self.target)
            names = [str(label) for label in range(class_count([(self.target, targets)]))]
        else:
            targets = _as_numbers(
                targets,
                self.target,
                "classes, integers from 0, or numbers in floating point. np.unique(y, return_inverse=True)[1] numbers "
                "classes of any other kind",
            )
            if targets.ndim == 1:
                warn_of_classes(targets, self.target, "save y.astype('int64')")
            num_targets = targets[0].size if len(targets) else 1
            names = [f"target {number}" for number in range(num_targets)]

        if len(inputs) != len(targets):
            raise DataError(f"{self.input} has {len(inputs)} samples, but {self.target} has {len(targets)}.")
        return RawData(inputs, targets, names)


def _as_numbers(array: np.ndarray, file: str, expected: str) -> np.ndarray:
    if array.dtype.kind != "f" or not array.ndim:
        raise DataError(f"{file} holds {array.dtype}{list(array.shape)}, not {expected}.")
    return array.astype(np.float64)
