"""Which executor and image layout a run uses where its settings leave them open: by a rule or, if asked, by timing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from raypfl.clients.clients import Clients
from raypfl.clients.context import Context, FallbackWarning
from raypfl.clients.group import ClientGroup
from raypfl.common import streams
from raypfl.common.errors import ConfigError
from raypfl.common.user_code import with_location
from raypfl.data import ClientData
from raypfl.engine.setup import groups_for, make_context, make_measures, make_task
from raypfl.experiment import Experiment
from raypfl.federation.backend import ONE_SAMPLE
from raypfl.federation.schedule import cohort_size
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.settings import TrainingSettings
from raypfl.learning.vectorised import Vectorised
from raypfl.models import FlatModel

LARGEST_MODEL = 2**17
"""Parameters up to which clients train faster together (measured: ``docs/performance/executors.md``)."""

LARGEST_STEP = 2**22
"""Multiplications of a client's forward pass up to which they do."""

SMALLEST_GROUP = 3
"""Clients of a group from which on they do."""

LIMIT = 5.0
"""Seconds that timing the candidates may take."""

STEPS, REPEATS = 3, 3
"""Steps of a timed training, and timed trainings of a candidate; the fastest counts."""

FEW = 2
"""Samples of a step that shows whether a candidate works, and clients of a group that does."""


@dataclass(frozen=True, order=True)
class Candidate:
    """One way to train a group's clients; the smallest one asks least of a network."""

    executor: str
    channels_last: bool

    def __str__(self) -> str:
        return self.executor + (", channels last" if self.channels_last else "")


def choose(experiment: Experiment, data: ClientData, device: torch.device) -> tuple[Candidate, str]:
    """The executor and layout of a run whose settings leave one of them open, and the reason.

    ``engine.executor=auto`` follows :func:`rule`. ``fastest`` times every candidate, and follows the rule if that would
    take longer than `LIMIT`. Candidates in which a training step of this network fails are left out.

    Parameters
    ----------
    device : of the clients' network.

    Raises
    ------
    Exception : what the network raises, if it fails in every candidate.
    """
    trial, group = _Trial(experiment, data, device), _largest_group(experiment, data)
    work = trial.batch * _multiplications(trial.model, experiment.training, data)
    candidates, why = _candidates(experiment, trial.model, work, group, len(data.input_shape) == 3)
    measures = experiment.engine.executor == "fastest"
    working: list[Candidate] = []
    errors: dict[Candidate, Exception] = {}
    for candidate in candidates:
        if (error := trial.error(candidate)) is not None:
            errors[candidate] = error
            continue
        working.append(candidate)
        if not measures:
            break
    if not working:
        plainest = min(candidates)
        if _raised(trial.model, experiment.training, data, plainest.channels_last) is not None:
            raise errors[plainest]
        # The network works but its outputs do not suit clients.loss: the method's own loss may take them.
        return plainest, f"not tried, since clients.loss failed: {_said(errors[plainest])}"
    seconds = trial.seconds(working, group) if measures else {}
    best = min(working, key=seconds.__getitem__) if seconds else working[0]
    if measures and not seconds:
        why = f"timing would take more than {LIMIT:g} s; {why}"
    if seconds:
        why = ", ".join(f"{one} {1000 * seconds[one]:.3g} ms a client's step" for one in working)
    elif best != candidates[0]:
        why = ""
    failed = [f"{one} does not work with this network: {_said(error)}" for one, error in errors.items()]
    return best, "; ".join(filter(None, [why, *failed]))


def rule(parameters: int, work: int, group: int) -> tuple[str, str]:
    """The executor that is expected to be faster, and the reason.

    A step of a small network costs much the same for one client as for many. The work of large ones grows with their
    clients, and `vmap` makes it slower.

    Parameters
    ----------
    work : multiplications of a client's forward pass in a step.
    group : clients of the largest group.
    """
    if parameters > LARGEST_MODEL:
        return "sequential", f"a large network: {parameters:,} parameters"
    if work > LARGEST_STEP:
        return "sequential", f"large steps: {work:,} multiplications"
    if group < SMALLEST_GROUP:
        return "sequential", f"groups of fewer than {SMALLEST_GROUP} clients"
    return "vectorised", f"a small network: {parameters:,} parameters, {work:,} multiplications a step"


def refuse_misfit(experiment: Experiment, model: FlatModel, data: ClientData) -> None:
    """Raise a ConfigError if the network fails for samples of the data's shape."""
    if (error := _raised(model, experiment.training, data, channels_last=False)) is not None:
        tokens = " Its inputs are int64, which are tokens; numbers must be float32 or float64." if data.discrete else ""
        raise ConfigError(
            f"model is {experiment.model.name!r}, which fails for samples of {experiment.data.name!r}, whose shape is "
            f"{tuple(data.input_shape)}.{tokens} {type(error).__name__}: {with_location(error)}"
        ) from error


def refuse_lone_samples(experiment: Experiment, model: FlatModel, data: ClientData) -> None:
    """Raise a ConfigError if a client has a mini-batch of one sample, in which the network's batch norm fails."""
    training = experiment.training
    skips = experiment.failures.on_client_failure == "skip"
    if (
        skips
        or experiment.privacy.protects_samples
        or not any(isinstance(m, _BatchNorm) for m in model.module.modules())
    ):
        return
    clients = np.setdiff1d(np.arange(data.num_clients), data.unseen)
    sizes = data.sizes("train")[clients]
    alone = _have_lone_samples(training, sizes)
    if not alone.any():
        return
    error = _raised(model, training, data, channels_last=False, samples=1)
    if error is None or ONE_SAMPLE not in str(error):
        return

    first = int(np.flatnonzero(alone)[0])
    client, size = clients[first], sizes[first]
    cause = f"client {client}'s {size} training samples leave one in batches of {training.batch_size}"
    mend = "Set training.smallest_batch=2, which leaves such batches out"
    if training.batch_size == 1:
        cause = "training.batch_size is 1"
        mend = "Raise it"
    elif size == 1:
        cause = f"client {client} has one training sample"
        mend = "Let the partition give every client two, such as by partition.min_samples"
    raise ConfigError(
        f"model is {experiment.model.name!r}, whose batch norm cannot train on a mini-batch of one sample, but "
        f"{cause}. {mend}, or choose a network without batch norm (model.norm=group where the model has it)."
    )


def _have_lone_samples(training: TrainingSettings, sizes: np.ndarray) -> np.ndarray:
    """Which clients, of so many training samples ``[K]``, train on a mini-batch of one sample: ``bool[K]``."""
    size = training.batch_size
    leaves_one = (sizes > size) & (sizes % size == 1) & (training.smallest_batch < 2)
    if training.steps is not None:
        leaves_one &= training.steps > sizes // size
    return leaves_one | (sizes == 1) | (size == 1)


def refuse_outputs(experiment: Experiment, model: FlatModel, data: ClientData) -> None:
    """Raise a ConfigError if the method has a global model, and its outputs do not suit the objective."""
    outputs = _outputs(model, experiment.training, data, channels_last=False, train=False)
    if wrong := make_measures(experiment, data).output_mismatch(outputs):
        # Personal models may make predictions of other outputs, but every global model is judged by its own.
        method, task = experiment.method, make_task(experiment, data, model.device)
        if method.global_model(method.start(task)) is not None:
            raise ConfigError(f"model is {experiment.model.name!r}, which does not fit {data.name!r}: it {wrong}")


def refuse_channels_last(model: FlatModel, training: TrainingSettings, data: ClientData) -> None:
    """Raise a ConfigError if the network fails on images channels last, and only on those."""
    error = _raised(model, training, data, channels_last=True)
    if error is not None and _raised(model, training, data, channels_last=False) is None:
        raise ConfigError(
            f"training.channels_last is true, but the network ({type(model.module).__name__}) does not work on images "
            f"in that layout: {_said(error)} In its forward, replace x.view(len(x), -1) by x.flatten(1), or leave "
            "training.channels_last out."
        ) from error


def _largest_group(experiment: Experiment, data: ClientData) -> int:
    """Clients of the largest group that this run would train together."""
    trained = data.num_clients - len(data.unseen)
    cohort = min(cohort_size(experiment.cohort, trained), trained)
    return max(groups_for(experiment.override(["engine.executor=vectorised"]), cohort))


def _candidates(
    experiment: Experiment, model: FlatModel, work: int, group: int, images: bool
) -> tuple[list[Candidate], str]:
    """The candidates that the settings allow, the rule's choice first, and the rule's reason."""
    executor, layout = experiment.engine.executor, experiment.training.channels_last
    preferred, why = rule(model.size, work, group) if executor in ("auto", "fastest") else (executor, "")
    last = images and any(isinstance(module, nn.Conv2d) for module in model.module.modules())
    layouts = [last, *([not last] if images else [])] if layout is None else [layout]
    candidates = [Candidate("sequential", layout) for layout in layouts]
    together = Candidate("vectorised", bool(layout))
    if preferred == "vectorised":
        candidates.insert(0, together)
    elif executor == "fastest" and group > 1:
        candidates.append(together)
    return candidates, why


class _Trial:
    """Some of a run's clients, the largest ones, which train as candidates do; what they learn is thrown away."""

    def __init__(self, experiment: Experiment, data: ClientData, device: torch.device):
        self._context: Context = make_context(experiment, data, make_task(experiment, data, device))
        self._sizes = data.sizes("train")
        self.model = self._context.model
        self.batch = min(experiment.training.batch_size, int(self._sizes.max()))

    def error(self, candidate: Candidate) -> Exception | None:
        """What a step of a few samples raises, or None."""
        try:
            self._step(candidate, FEW, FEW)
        except Exception as error:
            return error
        return None

    def seconds(self, candidates: Sequence[Candidate], group: int) -> dict[Candidate, float]:
        """Seconds of a client's step by candidate; empty if finding out would take longer than `LIMIT`."""
        begun, seconds = time.perf_counter(), dict[Candidate, float]()
        for candidate in sorted(candidates):  # one by one first, which tells how long a group may take
            count = group if candidate.executor == "vectorised" else 1
            few = min(self.batch, 16 * FEW)
            step = min(seconds.values(), default=0.0) or self._step(candidate, count, few) * self.batch / few
            if time.perf_counter() - begun + 2 * step * count * STEPS * REPEATS > LIMIT:
                return {}
            seconds[candidate] = min(self._step(candidate, count, self.batch, STEPS) for _ in range(REPEATS))
        return seconds

    def _step(self, candidate: Candidate, count: int, samples: int, steps: int = 1) -> float:
        """Seconds of a client's step in a training of so many clients and samples a step."""
        precision = Precision(self._context.training.precision == "bf16", candidate.channels_last)
        kind = Vectorised if candidate.executor == "vectorised" else Executor
        training = replace(self._context.training, batch_size=samples)
        executor = kind(self.model, precision)
        context = replace(self._context, executor=executor, training=training, loss_limit=float("inf"))
        largest = np.argsort(-self._sizes, kind="stable")[:count]
        clients = Clients(ClientGroup(context, tuple(largest.tolist()), 0, lr=1e-6))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the run's own steps repeat them
            warnings.simplefilter("error", FallbackWarning)
            begun = time.perf_counter()
            clients.sgd(clients.loss, clients.initial, steps=steps).sum().item()  # waits for a GPU
            return (time.perf_counter() - begun) / (len(clients) * steps)


def _raised(
    model: FlatModel, training: TrainingSettings, data: ClientData, channels_last: bool, samples: int = FEW
) -> Exception | None:
    """What the network raises for a batch, in training or evaluation."""
    for train in (True, False):
        try:
            _outputs(model, training, data, channels_last, train, samples)
        except Exception as error:
            return error
    return None


def _outputs(
    model: FlatModel,
    training: TrainingSettings,
    data: ClientData,
    channels_last: bool,
    train: bool,
    samples: int = FEW,
) -> Any:
    """What the network returns for a batch."""
    precision = Precision(training.precision == "bf16", channels_last)
    kind = torch.int64 if data.discrete else model.dtype
    x = precision.layout(torch.zeros((samples, *data.input_shape), dtype=kind, device=model.device))
    with torch.no_grad(), streams.forked(model.device), precision.context(model.device), model.mode(train):
        return model(model.init(0), x)


def _multiplications(model: FlatModel, training: TrainingSettings, data: ClientData) -> int:
    """Those of a forward pass for one sample in linear and convolution layers; at least one for each parameter."""
    counted = 0

    def count(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal counted
        weight = cast(torch.Tensor, layer.weight)
        counted += weight.numel() * (output.numel() // len(weight))

    layers = [module for module in model.module.modules() if isinstance(module, (nn.Linear, _ConvNd))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    _raised(model, training, data, channels_last=False)  # a forward pass in training and one in evaluation
    for hook in hooks:
        hook.remove()
    return max(counted // (2 * FEW), model.size)


def _said(error: Exception) -> str:
    """The first line of an error; of a fallback, that of the error which caused it."""
    text = str(error).rpartition(FallbackWarning.BECAUSE)[2]
    return (text if isinstance(error, FallbackWarning) else f"{type(error).__name__}: {text}").splitlines()[0]
