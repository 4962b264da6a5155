"""Which executor is faster for a network: tried once on a machine, and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import raypfl
from raypfl.errors import ClientError
from raypfl.federation.batches import Samples
from raypfl.federation.clients import Bench, Clients
from raypfl.federation.executor import Precision, Sequential, Vectorised
from raypfl.models.flat import FlatModel
from raypfl.settings import TrainingSettings

STEPS = 3
"""Steps of each of a trial's trainings."""

REPEATS = 3
"""Trainings that are timed, by turns; the fastest counts."""

CLEARLY = 1.1
"""How many times as fast clients must be together before they are trained so: one by one takes less memory."""

LARGEST = 2**26
"""Numbers of a group's models; networks of which not even two would fit are trained one by one, without a trial."""


@dataclass(frozen=True)
class Trial:
    """What was found out.

    Attributes
    ----------
    executor : the faster one.
    seconds : a client's step took, by executor; empty if clients of this network cannot be trained together.
    """

    executor: str
    seconds: dict[str, float]

    @property
    def why(self) -> str:
        """The reason, in a few words."""
        if not self.seconds:
            return "its clients cannot be trained together"
        fast, slow = sorted(1000 * s for s in self.seconds.values())
        return f"{fast:.3g} against {slow:.3g} ms a client's step"


def faster(
    model: FlatModel, training: TrainingSettings, input_shape: Sequence[int], num_classes: int, group: int, folder: Path
) -> Trial:
    """The executor to train this network's clients with, on the device that it is on.

    Parameters
    ----------
    group : clients that would be trained together.
    folder : where earlier findings are, and this one will be: the same network, settings, device and versions are tried
        but once on a machine, so that its runs agree to the last bit.
    """
    group = min(group, LARGEST // model.size)
    if group < 2:
        return Trial("sequential", {})
    path = folder / "executors" / f"{_key(model, training, input_shape, num_classes, group)}.json"
    if path.exists():
        return Trial(**json.loads(path.read_text()))
    trial = _try(model, training, input_shape, num_classes, group)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"executor": trial.executor, "seconds": trial.seconds}))
    try:
        os.link(draft, path)  # the first of several processes that try at the same time decides for all
    except FileExistsError:
        return Trial(**json.loads(path.read_text()))
    finally:
        draft.unlink()
    return trial


def _key(model: FlatModel, training: TrainingSettings, input_shape: Sequence[int], num_classes: int, group: int) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor()
    parts = [str(model.module), input_shape, num_classes, training.batch_size, training.precision]
    parts += [training.channels_last, group, device, torch.get_num_threads(), torch.__version__, raypfl.__version__]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), platform.processor())


def _try(
    model: FlatModel, training: TrainingSettings, input_shape: Sequence[int], num_classes: int, group: int
) -> Trial:
    precision = Precision(training.precision == "bf16", training.channels_last)
    contenders = {
        "sequential": _clients(Sequential(model, precision), model, training, input_shape, num_classes, 2),
        "vectorised": _clients(Vectorised(model, precision), model, training, input_shape, num_classes, group),
    }
    seconds = dict.fromkeys(contenders, float("inf"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a network that cannot be vectorised says so
            for clients in contenders.values():
                _train(clients)
    except (ClientError, UserWarning, torch.OutOfMemoryError):
        return Trial("sequential", {})
    for _ in range(REPEATS):
        for name, clients in contenders.items():
            seconds[name] = min(seconds[name], _train(clients) / (len(clients) * STEPS))
    together = seconds["vectorised"] * CLEARLY < seconds["sequential"]
    return Trial("vectorised" if together else "sequential", seconds)


def _train(clients: Clients) -> float:
    begun = time.perf_counter()
    trained = clients.sgd(clients.loss, clients.initial, steps=STEPS)
    trained.sum().item()  # waits for a GPU
    return time.perf_counter() - begun


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
