"""Features and targets that are numbers, in a pair of ``.npy`` files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raypfl.common.errors import ConfigError, DataError
from raypfl.datasets.base import DATASETS, RawData, Reader
from raypfl.datasets.readers.npy import opened


@DATASETS.register("arrays")
@dataclass(frozen=True, kw_only=True)
class ArrayPair(Reader):
    """Two files in data.root: inputs ``[n, ...]`` and targets ``[n]`` or ``[n, T]``, both in floating point.

    Attributes
    ----------
    input, target : names of the files.
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
        inputs, targets = (self._numbers(path) for path in self.paths())
        if len(inputs) != len(targets):
            raise DataError(f"{self.input} has {len(inputs)} samples, but {self.target} has {len(targets)}.")
        return RawData(inputs, targets, [f"target {i}" for i in range(targets[0].size if len(targets) else 1)])

    @staticmethod
    def _numbers(path: Path) -> np.ndarray:
        array = opened(path)
        if array.dtype.kind != "f" or not array.ndim:
            raise DataError(f"{path} holds {array.dtype}{list(array.shape)}, not numbers in floating point.")
        return array.astype(np.float64)
