"""A run's settings as a contender gets them, its samples, and its report. Needs NumPy and torch alone."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import networks

RESIDENT = 1 << 24
"""Numbers up to which samples are made floating-point at once; of larger data, a client's when its turn comes."""


@dataclass(frozen=True)
class Order:
    """One run of one contender.

    Attributes
    ----------
    method : ``fedavg``, ``ditto`` or ``evaluation`` (of every client's own model, which nobody trains).
    network : a name in `benchmarks.networks`; raypfl's own network of this name computes the same.
    source : the samples in raypfl's own store. files : the same, dealt out in the same way, as `Shards` reads them.
    report : the file for `Stamps`.
    clients, cohort, batch, lr, momentum, epochs : the federation, and a client's local training.
    lam : Ditto's pull.
    options : the contender's own settings.
    """

    method: str
    network: str
    source: dict[str, Any]
    files: str
    report: str
    clients: int
    cohort: int
    batch: int
    lr: float
    momentum: float
    epochs: int
    lam: float = 0.75
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str) -> Order:
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class Stamps:
    """A line for every finished round, ``{"begin": s or null, "end": s}``, on a clock that all processes share.

    A round without a beginning of its own began when the one before it ended.
    """

    def __init__(self, path: str):
        self._path = path

    def add(self, begin: float | None = None) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps({"begin": begin, "end": time.monotonic()}) + "\n")

    def note(self, **notes: Any) -> None:
        """Note something about the run besides its rounds."""
        self._notes.write_text(json.dumps(notes))

    def notes(self) -> dict[str, Any]:
        """What was noted."""
        return json.loads(self._notes.read_text()) if self._notes.exists() else {}

    @property
    def _notes(self) -> Path:
        return Path(f"{self._path}.notes")


class Shards:
    """Every client's samples, memory-mapped: client k holds rows ``offsets[k]:offsets[k + 1]``."""

    def __init__(self, folder: str, split: str = "train", dtype: torch.dtype = torch.float32):
        about = json.loads((Path(folder) / "about.json").read_text())
        self.input_shape: tuple[int, int, int] = tuple(about["input_shape"])
        self.num_classes: int = about["num_classes"]
        self.offsets = np.load(Path(folder) / f"{split}_offsets.npy")
        self._inputs = np.load(Path(folder) / f"{split}_inputs.npy", mmap_mode="r")
        self._labels = torch.from_numpy(np.load(Path(folder) / f"{split}_labels.npy"))
        self.dtype = dtype
        mean, std = (torch.tensor(about[name], dtype=dtype).reshape(-1, 1, 1) for name in ("mean", "std"))
        self._gain, self._offset = 1 / (about["scale"] * std), -mean / std
        self._resident = self._normalised(slice(None)) if self._inputs.size <= RESIDENT else None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """``int64[clients]``"""
        return np.diff(self.offsets)

    def client(self, k: int) -> tuple[Tensor, Tensor]:
        """``(float32[n, C, H, W], int64[n])``, normalised."""
        rows = slice(int(self.offsets[k]), int(self.offsets[k + 1]))
        x = self._normalised(rows) if self._resident is None else self._resident[rows]
        return x, self._labels[rows]

    def _normalised(self, rows: slice) -> Tensor:
        return torch.addcmul(self._offset, torch.from_numpy(np.array(self._inputs[rows])).to(self.dtype), self._gain)


def network(order: Order, shards: Shards) -> nn.Module:
    """The job's network, with the same first weights everywhere."""
    torch.manual_seed(0)
    return networks.network(order.network, shards.input_shape, shards.num_classes)


def fit(net: nn.Module, x: Tensor, y: Tensor, order: Order, anchor: Sequence[Tensor] | None = None) -> None:
    """SGD over freshly shuffled epochs, for systems that leave it to their user; with Ditto's pull toward `anchor`."""
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=order.lr, momentum=order.momentum)
    for _ in range(order.epochs):
        for index in torch.randperm(len(y)).split(order.batch):
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), y[index]).backward()
            for p, a in zip(parameters, anchor or [], strict=False):
                p.grad.add_(p.detach() - a, alpha=order.lam)
            optimizer.step()
