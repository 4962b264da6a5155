"""Choose the executor and image layout that settings leave open: by a rule or, on request, by timing."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import nn

from raypfl.clients.clients import Clients
from raypfl.clients.context import FallbackWarning
from raypfl.clients.group import ClientGroup
from raypfl.engine.building.groups import groups_for
from raypfl.engine.prepared import Prepared
from raypfl.learning.executor import Executor, Precision
from raypfl.learning.vectorised import Vectorised
from raypfl.models.cost import Cost, measured_cost
from raypfl.runs.checks.network import FEW, error_of_batch, first_line

GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """The limits within which clients train faster together, on a type of device.

    Attributes
    ----------
    parameters : the most of a client's model.
    work : the most multiplications in a client's forward pass of a step.
    bytes : the most that a group may need.
    smallest_group : the fewest clients of the largest group.
    """

    parameters: float
    work: float
    bytes: float
    smallest_group: int = 3


LIMITS = {
    # Measured: docs/performance/executors.md.
    "cpu": Limits(parameters=2**17, work=2**22, bytes=math.inf),
    # Measured on an H200: docs/performance/executors.md. The host launches a group's step in much the same time as a
    # client's, and the card computes it meanwhile, up to ResNet-18 and 2**29.6 multiplications. Every card in use has
    # 16 GiB, and a rule that asked which one it is would give other bits on another card.
    "cuda": Limits(parameters=math.inf, work=2**30, bytes=0.9 * 16 * GIB, smallest_group=4),
}
"""Type of device -> the limits within which clients train faster together."""

MAX_SECONDS = 5.0
"""The most seconds that timing all candidates may take."""

STEPS = 3
"""Steps of a timed training."""

REPEATS = 3
"""Timed trainings of a candidate; the fastest counts."""


@dataclass(frozen=True, order=True)
class Candidate:
    """An executor and an image layout; the smallest candidate in order makes the fewest demands on a network."""

    executor: Literal["sequential", "vectorised"]
    channels_last: bool

    def __str__(self) -> str:
        return self.executor + (", channels last" if self.channels_last else "")


def choose(prepared: Prepared) -> tuple[Candidate, str]:
    """Return the executor and layout of a run whose settings leave one of them open, and the reason.

    ``engine.executor=auto`` follows :func:`rule`. ``fastest`` times every candidate, and follows the rule if that would
    take longer than `MAX_SECONDS`. Candidates in which a training step of this network fails are left out.

    Raises
    ------
    Exception : what the network raises, if it fails in every candidate.
    """
    trial = _Trial(prepared)
    group = _largest_group(prepared)
    candidates, why = _candidates(prepared, _cost(prepared), trial.batch, group)
    by_timing = prepared.experiment.engine.executor == "fastest"

    working, errors = _tried(trial, candidates, stops_at_first=not by_timing)
    if not working:
        plainest = min(candidates)
        if error_of_batch(prepared, plainest.channels_last) is not None:
            raise errors[plainest]
        # The network works but its outputs do not suit clients.loss: the method's own loss may take them.
        return plainest, f"not tried, since clients.loss failed: {first_line(errors[plainest])}"

    best = working[0]
    seconds = trial.seconds(working, group) if by_timing else {}
    if seconds:
        best = min(working, key=seconds.__getitem__)
        why = ", ".join(f"{candidate} {1000 * seconds[candidate]:.3g} ms a client's step" for candidate in working)
    elif best != candidates[0]:
        why = ""
    elif by_timing:
        why = f"timing would take more than {MAX_SECONDS:g} s; {why}"

    failures = [
        f"{candidate} does not work with this network: {first_line(error)}" for candidate, error in errors.items()
    ]
    return best, "; ".join(filter(None, [why, *failures]))


def _tried(
    trial: _Trial, candidates: Sequence[Candidate], stops_at_first: bool
) -> tuple[list[Candidate], dict[Candidate, Exception]]:
    """Return the candidates in which a step works, and the errors of those in which it fails."""
    working: list[Candidate] = []
    errors: dict[Candidate, Exception] = {}
    for candidate in candidates:
        error = trial.error(candidate)
        if error is None:
            working.append(candidate)
        else:
            errors[candidate] = error
        if working and stops_at_first:
            break
    return working, errors


def expected_executor(prepared: Prepared) -> tuple[str, str]:
    """Return the executor that a run is expected to have, before any step is tried, and the reason."""
    largest = int(prepared.data.sizes("train").max())
    batch = min(prepared.experiment.training.batch_size, largest)
    candidates, why = _candidates(prepared, _cost(prepared), batch, _largest_group(prepared))
    return candidates[0].executor, why


@dataclass(frozen=True)
class Load:
    """What the largest group of a run computes.

    Attributes
    ----------
    parameters : number of the network's parameters.
    work : multiplications of a client's forward pass in a step.
    clients : number of clients in the group.
    bytes : about what the group needs on its device.
    statistics : number of a model vector's further entries.
    """

    parameters: int
    work: int
    clients: int
    bytes: float = 0.0
    statistics: int = 0


def rule(load: Load, device: str = "cpu", share: float = 1.0) -> tuple[str, str]:
    """Return the executor that is expected to be faster, and the reason.

    A step of a small network costs much the same for one client as for many. The work of large ones grows with their
    clients, and `vmap` makes it slower.

    Parameters
    ----------
    device : the type of the clients' device, one of `LIMITS`.
    share : the share of the device that each actor has.
    """
    limits = LIMITS[device]
    if load.parameters + load.statistics > limits.parameters:
        return "sequential", f"a large network: {load.parameters:,} parameters"
    if load.work > limits.work:
        return "sequential", f"large steps: {load.work:,} multiplications"
    if load.clients < limits.smallest_group:
        return "sequential", f"groups of fewer than {limits.smallest_group} clients"
    if load.bytes > share * limits.bytes:
        return "sequential", (
            f"{load.clients} clients together may need {load.bytes / GIB:.1f} GiB of a GPU, more than "
            f"{share * limits.bytes / GIB:.1f}; with a lower engine.group_size they would fit"
        )
    return "vectorised", f"a small network: {load.parameters:,} parameters, {load.work:,} multiplications a step"


def device_of_clients(prepared: Prepared) -> str:
    """Return the type of the device that clients compute on: of this process or, on Ray, of their actors."""
    if prepared.experiment.engine.backend == "inline":
        return prepared.device.type
    return "cuda" if prepared.experiment.ray.on_gpu else "cpu"


def _largest_group(prepared: Prepared) -> int:
    """Return the number of clients in the largest group that this run would train together."""
    engine = replace(prepared.experiment.engine, executor="vectorised")
    return max(groups_for(engine, prepared.cohort_size))


def _candidates(prepared: Prepared, cost: Cost, batch: int, group: int) -> tuple[list[Candidate], str]:
    """Return the candidates that the settings allow, the rule's choice first, and the rule's reason.

    Parameters
    ----------
    cost : the cost of a sample's forward pass.
    batch : the samples of a step.
    group : number of clients in the largest group.
    """
    experiment = prepared.experiment
    executor = experiment.engine.executor
    layout = experiment.training.channels_last
    device = device_of_clients(prepared)
    why = ""
    preferred: str = executor
    if executor in ("auto", "fastest"):
        model = prepared.model
        # Layers that are not counted, such as recurrent ones, multiply by each weight at least once.
        weights = sum(segment.size for segment in model.segments.values() if len(segment.shape) > 1)
        work = batch * max(cost.multiplications, weights)
        num_bytes = group * cost.client_bytes(model.size, batch)
        load = Load(model.num_parameters, work, group, num_bytes, statistics=model.num_buffers)
        # A share that is still to be measured (auto) counts as a whole GPU.
        share = min(experiment.ray.gpus or 1.0, 1.0)
        preferred, why = rule(load, device, share)

    layouts = [layout] if layout is not None else _layouts(prepared, device)
    candidates = [Candidate("sequential", channels_last) for channels_last in layouts]
    together = Candidate("vectorised", bool(layout))
    if preferred == "vectorised":
        candidates.insert(0, together)
    elif executor == "fastest" and group > 1:
        candidates.append(together)
    return candidates, why


def _layouts(prepared: Prepared, device: str) -> list[bool]:
    """Return whether images are channels last: first the layout that convolutions prefer, then the other one."""
    if len(prepared.data.input_shape) != 3:
        return [False]
    if device == "cuda":
        # With channels last, the backward pass of max-pooling on a GPU is not deterministic.
        return [False, True]
    has_convolutions = any(isinstance(module, nn.Conv2d) for module in prepared.model.module.modules())
    return [has_convolutions, not has_convolutions]


class _Trial:
    """Trains a run's largest clients with a candidate, and discards what they learn."""

    def __init__(self, prepared: Prepared):
        self._context = prepared.context
        self._sizes = prepared.data.sizes("train")
        self.batch = min(prepared.experiment.training.batch_size, int(self._sizes.max()))

    def error(self, candidate: Candidate) -> Exception | None:
        """Return the error that a step of a few samples raises; None if it works."""
        try:
            self._step(candidate, FEW, FEW)
        except Exception as error:
            return error
        return None

    def seconds(self, candidates: Sequence[Candidate], group: int) -> dict[Candidate, float]:
        """Return the seconds of a client's step by candidate; empty if timing would take longer than `MAX_SECONDS`."""
        start = time.perf_counter()
        seconds: dict[Candidate, float] = {}
        # Sequential candidates come first: from their time follows about how long a group may take.
        for candidate in sorted(candidates):
            count = group if candidate.executor == "vectorised" else 1
            estimate = min(seconds.values(), default=0.0)
            if not estimate:
                few = min(self.batch, 16 * FEW)
                estimate = self._step(candidate, count, few) * self.batch / few
            if time.perf_counter() - start + 2 * estimate * count * STEPS * REPEATS > MAX_SECONDS:
                return {}
            seconds[candidate] = min(self._step(candidate, count, self.batch, STEPS) for _ in range(REPEATS))
        return seconds

    def _step(self, candidate: Candidate, count: int, samples: int, steps: int = 1) -> float:
        """Return the seconds of a client's step in a training of `count` clients, with `samples` in each step."""
        precision = Precision.named(self._context.training.precision, candidate.channels_last)
        executor_class = Vectorised if candidate.executor == "vectorised" else Executor
        context = replace(
            self._context,
            executor=executor_class(self._context.model, precision),
            training=replace(self._context.training, batch_size=samples),
            loss_limit=float("inf"),
        )
        largest = np.argsort(-self._sizes, kind="stable")[:count]
        clients = Clients(ClientGroup(context, tuple(largest.tolist()), 0, lr=1e-6))

        with warnings.catch_warnings():
            # The run's own steps repeat what this one would warn of.
            warnings.simplefilter("ignore", UserWarning)
            warnings.simplefilter("error", FallbackWarning)
            start = time.perf_counter()
            # item() waits for a GPU.
            clients.sgd(clients.loss, clients.initial, steps=steps).sum().item()
            return (time.perf_counter() - start) / (len(clients) * steps)


def _cost(prepared: Prepared) -> Cost:
    """Return the cost of a sample's forward pass."""
    # A forward pass in training and one in evaluation, of a few samples each.
    with measured_cost(prepared.model.module, samples=2 * FEW) as cost:
        error_of_batch(prepared, channels_last=False)
    return cost
