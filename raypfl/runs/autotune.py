"""Which executor and layout of images are faster for a network: tried once on a machine, and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raypfl.clients.clients import Clients
from raypfl.clients.context import Context
from raypfl.clients.fallback import FallbackWarning
from raypfl.common.errors import ConfigError
from raypfl.common.version import __version__
from raypfl.data import ClientData
from raypfl.evaluation import Measures
from raypfl.models.flat import FlatModel
from raypfl.training.batches import Samples
from raypfl.training.executor import Precision
from raypfl.training.pool import Pools
from raypfl.training.sequential import Sequential
from raypfl.training.settings import TrainingSettings
from raypfl.training.vectorised import Vectorised

STEPS = 3
"""Steps of each of a trial's trainings."""

MOMENT = 0.02
"""Seconds in which short trainings are repeated wherever one is timed: the fastest counts, for any single one may have
been held up by something else on the machine."""

REPEATS = 3
"""Turns at most, in which every way is timed; the fastest counts."""

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
class Looks:
    """What samples look like.

    Attributes
    ----------
    discrete : whether inputs are tokens. kind : of the targets. target_shape : of one.
    """

    input_shape: tuple[int, ...]
    discrete: bool
    kind: str
    target_shape: tuple[int, ...]
    measures: Measures

    @classmethod
    def of(cls, data: ClientData, measures: Measures) -> Looks:
        """Those of data, of whose samples one is taken if its kind does not tell the shape of a target."""
        shape: tuple[int, ...] = ()
        if data.kind != "classes":
            first = int(data.sizes("train").argmax())
            shape = data.take(data.indices(first, "train")[:1])[1].shape[1:]
        return cls(data.input_shape, data.discrete, data.kind, shape, measures)

    def noise(self, count: int, draws: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of so many samples."""
        inputs = draws.integers(0, 256, (count, *self.input_shape), dtype=np.uint8)
        shape = (count, *self.target_shape)
        if self.kind == "numbers":
            return inputs, draws.normal(size=shape)
        targets = draws.integers(0, 2 if self.kind == "labels" else self.measures.targets, shape)
        tokens = np.zeros(inputs.shape, dtype=np.int64)
        return tokens if self.discrete else inputs, targets.astype(np.int8) if self.kind == "labels" else targets


@dataclass(frozen=True, order=True)
class Way:
    """One way to train a group's clients; the least one is the plainest, which asks least of a network."""

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
    left_out : what was said of the ways in which this network cannot be trained.
    """

    seconds: Mapping[Way, float]
    left_out: Mapping[Way, str] = field(default_factory=dict)

    @property
    def best(self) -> Way:
        """The fastest; training clients together must be worth its memory. The plainest, if no way could be timed."""
        if not self.seconds:
            return min(self.left_out)
        return min(self.seconds, key=lambda way: self.seconds[way] * (CLEARLY if way.executor == "vectorised" else 1))

    @property
    def why(self) -> str:
        """The reason, in a few words."""
        if not self.seconds:
            return f"not timed, since clients.loss failed on noise: {self.left_out[self.best]}"
        others = ", ".join(f"{way} {1000 * s:.3g}" for way, s in self.seconds.items() if way != self.best)
        failed = [f"{way} does not work with this network: {said}" for way, said in self.left_out.items()]
        return "; ".join(filter(None, [f"{1000 * self.seconds[self.best]:.3g} ms a client's step", others, *failed]))


def faster(
    model: FlatModel,
    training: TrainingSettings,
    executor: str,
    looks: Looks,
    group: int,
    folder: Path,
) -> Trial:
    """How to train this network's clients, on the device that it is on, where the settings leave it open.

    Parameters
    ----------
    executor : ``auto`` or ``sequential``: which it must be; ``training.channels_last`` likewise.
    group : clients that would be trained together.
    folder : where earlier findings are, and this one will be: the same network, settings, group, device and versions
        are tried but once on a machine, so that its runs agree to the last bit.

    Raises
    ------
    Exception : what the network raises, if it does in every way.
    """
    group = 1 if executor == "sequential" else max(1, min(group, LARGEST // model.size))
    layouts = (False, True) if len(looks.input_shape) == 3 else (False,)
    ways = [Way("sequential", last) for last in layouts if training.channels_last in (None, last)]
    if group > 1:
        ways.append(Way("vectorised", bool(training.channels_last)))
    path = folder / "trials" / f"{_key(ways, model, training, looks, group)}.json"
    if (known := _known(path)) is not None:
        return known
    trial = _try(ways, model, training, looks, group)
    if trial.seconds:
        with contextlib.suppress(OSError):  # what cannot be kept is tried again by the next run
            _keep(trial, path)
    return _known(path) or trial


def refuse_channels_last(model: FlatModel, training: TrainingSettings, looks: Looks) -> None:
    """Raise a ConfigError if this network takes images in the usual layout alone, and channels last is asked for."""
    error = _raised(model, training, looks, channels_last=True)
    if error is not None and _raised(model, training, looks, channels_last=False) is None:
        raise ConfigError(
            f"training.channels_last is true, but the network ({type(model.module).__name__}) does not work on images "
            f"in that layout: {_said(error)} Mend its forward, where x.flatten(1) or x.reshape(len(x), -1) does what "
            "x.view(len(x), -1) is meant to, or leave training.channels_last out."
        ) from error


def _raised(model: FlatModel, training: TrainingSettings, looks: Looks, channels_last: bool) -> Exception | None:
    """What the network raises at a batch, in training or evaluation."""
    precision = Precision(training.precision == "bf16", channels_last)
    kind = torch.int64 if looks.discrete else model.dtype
    x = precision.layout(torch.zeros((training.batch_size, *looks.input_shape), dtype=kind, device=model.device))
    with torch.no_grad(), torch.random.fork_rng(devices=[]), precision.context(model.device):
        for train in (True, False):
            try:
                with model.mode(train):
                    model(model.init(0), x)
            except Exception as error:
                return error
    return None


def _said(error: Exception) -> str:
    """The first line of what an error says; torch's own words, if clients fell back because of them."""
    text = str(error).rpartition(FallbackWarning.BECAUSE)[2]
    return (text if isinstance(error, FallbackWarning) else f"{type(error).__name__}: {text}").splitlines()[0]


def _known(path: Path) -> Trial | None:
    """What a trial found out, if that is there and can be read."""
    try:
        rows = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    seconds, left_out = ({Way(*way): value for *way, value in rows[part]} for part in ("seconds", "left_out"))
    return Trial(seconds, left_out)


def _keep(trial: Trial, path: Path) -> None:
    """Write a trial down, unless another process has done so meanwhile: the first one decides for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    parts = {"seconds": trial.seconds, "left_out": trial.left_out}
    try:
        draft.write_text(json.dumps({p: [[*astuple(way), v] for way, v in of.items()] for p, of in parts.items()}))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # there are file systems without hard links
            if not path.exists():
                os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _key(ways: Sequence[Way], model: FlatModel, training: TrainingSettings, *others: Any) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _processor()
    network = (str(model.module), _source(model.module), list(model.segments))
    parts = [ways, network, training.batch_size, training.precision, others, device, torch.get_num_threads()]
    if training.optimizer != "sgd":
        parts.append(training.optimizer)
    return hashlib.sha256(repr([*parts, torch.__version__, __version__]).encode()).hexdigest()[:24]


def _source(network: nn.Module) -> list[str]:
    """The code of a network's own classes, for one that is mended may work in other ways than before."""
    classes = {one for module in network.modules() for one in type(module).__mro__}
    own = (one for one in classes if one.__module__.partition(".")[0] not in ("torch", "torchvision", "builtins"))
    sources = []
    for one in own:
        with contextlib.suppress(OSError, TypeError):  # typed at a prompt, it has none
            sources.append(inspect.getsource(one))
    return sorted(sources)


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
    looks: Looks,
    group: int,
) -> Trial:
    def clients_of(way: Way, count: int) -> Clients:
        precision = Precision(training.precision == "bf16", way.channels_last)
        executor = Vectorised(model, precision) if way.executor == "vectorised" else Sequential(model, precision)
        return _clients(executor, model, training, looks, count)

    seconds: dict[Way, float] = {}
    left_out: dict[Way, str] = {}
    contenders: dict[Way, Clients] = {}
    plainest, broken = min(ways), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a run's own steps will give them
        warnings.simplefilter("error", FallbackWarning)
        for way in sorted(ways):  # one by one first
            together = way.executor == "vectorised"
            try:
                clients = clients_of(way, min(group, GLANCE) if together else 2)
                _train(clients)
                seconds[way] = _timed(clients)
                if together and _is_hopeless(len(clients), seconds[way], clients_of(way, 1), min(seconds.values())):
                    continue
                if together and group > GLANCE:
                    clients = clients_of(way, group)
                    seconds[way] = _timed(clients)
                contenders[way] = clients
            except Exception as error:
                seconds.pop(way, None)
                left_out[way] = _said(error)
                broken = error if way == plainest else broken
        begun = time.perf_counter()
        for _ in range(REPEATS):
            if time.perf_counter() < begun + ENOUGH:
                for way, clients in contenders.items():
                    seconds[way] = min(seconds[way], _timed(clients))
    # A network that works may still give what clients.loss cannot take, but its method's own loss can.
    if broken is not None and not seconds and _raised(model, training, looks, plainest.channels_last) is not None:
        raise broken
    return Trial(seconds, left_out)


def _is_hopeless(count: int, seconds: float, one: Clients, best: float) -> bool:
    """Whether no group can be as fast as `best` a client: one of `count` takes `seconds` a client.

    A step together takes its overhead, and then some for each client: if that alone takes longer than a client one by
    one, as for convolutions on CPUs, larger groups do not help. It is what `count` take beyond `one`.
    """
    if seconds > HOPELESS * best:
        return True
    if seconds <= best:
        return False
    _train(one)
    return (count * seconds - _timed(one)) / (count - 1) > best


def _timed(clients: Clients) -> float:
    """Seconds of a client's step: the least of as many trainings as `MOMENT` has room for, and of one at least."""
    begun, least = time.perf_counter(), _train(clients)
    while time.perf_counter() < begun + MOMENT:
        least = min(least, _train(clients))
    return least


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
    looks: Looks,
    count: int,
) -> Clients:
    """`count` clients with a batch of noise each."""
    draws, size = np.random.default_rng(0), training.batch_size
    inputs, labels = looks.noise(count * size, draws)
    channels = (looks.input_shape[0], 1, 1) if len(looks.input_shape) == 3 else (1,)
    scale = torch.full(channels, 1 / 255, dtype=model.dtype, device=model.device)
    samples = Samples(inputs, labels, scale, torch.zeros_like(scale))
    context = Context(
        model=model,
        executor=executor,
        samples=samples,
        pools=Pools(samples),
        split=lambda client, _: np.arange(client * size, (client + 1) * size),
        num_clients=count,
        num_classes=looks.measures.targets,
        training=training,
        seed=0,
        measures=looks.measures,
        loss_limit=float("inf"),
    )
    return Clients(context, tuple(range(count)), 0, 1e-6)
