"""Which executor and layout of images are faster for a network: tried once on a machine, and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raypfl
from raypfl.federation.batches import Samples
from raypfl.federation.bench import Bench
from raypfl.federation.clients import Clients
from raypfl.federation.executor import Precision, Sequential, Vectorised
from raypfl.models.flat import FlatModel
from raypfl.settings import TrainingSettings

STEPS = 3
"""Steps of each of a trial's trainings."""

REPEATS = 3
"""Trainings that are timed at most, by turns; the fastest counts."""

ENOUGH = 1.0
"""Seconds of such turns, after which none begins: differences of long steps are told from a few."""

CLEARLY = 1.1
"""How many times as fast clients must be together before they are trained so: one by one takes less memory."""

GLANCE = 4
"""Clients of a first look at training together."""

HOPELESS = 2.0
"""How many times as long as one by one it may take at that look; if it takes longer, whole groups are not tried."""

LARGEST = 2**26
"""Numbers of a group's models; networks of which not even two would fit are trained one by one."""


@dataclass(frozen=True)
class Way:
    """One way to train a group's clients."""

    executor: str
    channels_last: bool

    def __str__(self) -> str:
        return self.executor + (", channels last" if self.channels_last else "")


@dataclass(frozen=True)
class Trial:
    """What was found out.

    Attributes
    ----------
    seconds : a client's step took, by way.
    """

    seconds: dict[Way, float]

    @property
    def best(self) -> Way:
        """The fastest; training clients together must be worth its memory."""
        return min(self.seconds, key=lambda way: self.seconds[way] * (CLEARLY if way.executor == "vectorised" else 1))

    @property
    def why(self) -> str:
        """The reason, in a few words."""
        others = [f"{way} {1000 * s:.3g}" for way, s in self.seconds.items() if way != self.best]
        return f"{1000 * self.seconds[self.best]:.3g} ms a client's step; {', '.join(others)}"


def faster(
    model: FlatModel,
    training: TrainingSettings,
    executor: str,
    input_shape: Sequence[int],
    num_classes: int,
    group: int,
    folder: Path,
) -> Trial:
    """How to train this network's clients, on the device that it is on, where the settings leave it open.

    Parameters
    ----------
    executor : ``auto``, or the one that it must be; ``training.channels_last`` likewise.
    group : clients that would be trained together.
    folder : where earlier findings are, and this one will be: the same network, settings, device and versions are tried
        but once on a machine, so that its runs agree to the last bit.
    """
    group = max(1, min(group, LARGEST // model.size))
    ways = [Way("sequential", last) for last in (False, True) if training.channels_last in (None, last)]
    together = [Way("vectorised", bool(training.channels_last))]
    if executor == "vectorised" or (executor == "auto" and group > 1):
        ways = together + (ways if executor == "auto" else [])
    path = folder / "trials" / f"{_key(ways, model, training, input_shape, num_classes, group)}.json"
    if not path.exists():
        _keep(_try(ways, model, training, input_shape, num_classes, group), path)
    return Trial({Way(*way): seconds for *way, seconds in json.loads(path.read_text())})


def _keep(trial: Trial, path: Path) -> None:
    """Write a trial down, unless another process has done so meanwhile: the first one decides for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps([[*astuple(way), seconds] for way, seconds in trial.seconds.items()]))
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def _key(ways: Sequence[Way], model: FlatModel, training: TrainingSettings, *others: Any) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor()
    parts = [ways, str(model.module), training.batch_size, training.precision, others, device, torch.get_num_threads()]
    return hashlib.sha256(repr([*parts, torch.__version__, raypfl.__version__]).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def _try(
    ways: Sequence[Way],
    model: FlatModel,
    training: TrainingSettings,
    input_shape: Sequence[int],
    num_classes: int,
    group: int,
) -> Trial:
    def clients_of(way: Way, count: int) -> Clients:
        precision = Precision(training.precision == "bf16", way.channels_last)
        executor = Vectorised(model, precision) if way.executor == "vectorised" else Sequential(model, precision)
        return _clients(executor, model, training, input_shape, num_classes, count)

    seconds: dict[Way, float] = {}
    contenders: dict[Way, Clients] = {}
    for way in sorted(ways, key=lambda way: way.executor):  # one by one first
        together = way.executor == "vectorised"
        with contextlib.suppress(UserWarning, torch.OutOfMemoryError), warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a network that cannot be vectorised says so
            clients = clients_of(way, min(group, GLANCE) if together else 2)
            _train(clients)
            seconds[way] = _train(clients)
            if together and seconds[way] > HOPELESS * min(seconds.values()):
                continue
            if together and group > GLANCE:
                clients = clients_of(way, group)
                seconds[way] = _train(clients)
            contenders[way] = clients
    begun = time.perf_counter()
    for _ in range(REPEATS):
        if time.perf_counter() < begun + ENOUGH:
            for way, clients in contenders.items():
                seconds[way] = min(seconds[way], _train(clients))
    return Trial(seconds or dict.fromkeys(ways, float("inf")))


def _train(clients: Clients) -> float:
    """Seconds of a client's step."""
    begun = time.perf_counter()
    trained = clients.sgd(clients.loss, clients.initial, steps=STEPS)
    trained.sum().item()  # waits for a GPU
    return (time.perf_counter() - begun) / (len(clients) * STEPS)


def _clients(
    executor: Sequential | Vectorised,
    model: FlatModel,
    training: TrainingSettings,
    input_shape: Sequence[int],
    num_classes: int,
    count: int,
) -> Clients:
    """`count` clients with a batch of noise each."""
    draws, size = np.random.default_rng(0), training.batch_size
    inputs = draws.integers(0, 256, (count * size, *input_shape), dtype=np.uint8)
    labels = draws.integers(0, num_classes, count * size)
    scale = torch.full((input_shape[0], 1, 1), 1 / 255, dtype=model.dtype, device=model.device)
    bench = Bench(
        model=model,
        executor=executor,
        samples=Samples(inputs, labels, scale, torch.zeros_like(scale)),
        split=lambda client, _: np.arange(client * size, (client + 1) * size),
        num_clients=count,
        num_classes=num_classes,
        training=training,
        seed=0,
        loss_limit=float("inf"),
    )
    return Clients(bench, tuple(range(count)), 0, 1e-6)
