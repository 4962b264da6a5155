"""``ray.gpus_per_actor=auto``: how many client actors share a GPU, by the memory that one of them needs.

A separate process runs a few steps of training and an evaluation, with one client and with a group of eight. A line
through both gives the memory of the run's own groups. More actors on a GPU change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from raypfl.clients.gpu_errors import out_of_memory
from raypfl.common.errors import ConfigError, OutOfMemory, RaypflError
from raypfl.data import FederatedData
from raypfl.engine.backends.actors.actor_pools import reserved, room_for, share_of
from raypfl.engine.backends.cluster import nodes_of
from raypfl.engine.building.devices import CONTEXT_BYTES
from raypfl.engine.building.groups import groups_for
from raypfl.engine.events import Listener, Progress
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.experiment.settings import ActorPool
from raypfl.learning.recording import CudaGraphs
from raypfl.runs.checks.rehearsal import Rehearsal
from raypfl.runs.choices.gpu_task import run_on_gpu

PROBED = (1, 8)
"""Sizes of the two groups whose memory is measured."""

USABLE_SHARE = 0.9
"""Share of a GPU's memory that its actors may use together."""


class GpuMemory(Protocol):
    """Reads the memory of this process on its GPU."""

    def peak(self, work: Callable[[], object]) -> float:
        """Return the most bytes that tensors have reserved at a time during `work`."""
        ...

    def context(self) -> float:
        """Return bytes that the process uses in addition to its tensors."""
        ...


class CudaMemory:
    """Memory as torch and NVIDIA's driver report it; what other processes use counts as this one's context.

    A context counts at least as much as :func:`raypfl.engine.building.devices.limit_memory` leaves for it.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def peak(self, work: Callable[[], object]) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def context(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device)
        return max(total - free - torch.cuda.memory_reserved(self._device), CONTEXT_BYTES)


@dataclass(frozen=True)
class GpuMeasurement:
    """What was measured on a GPU.

    Attributes
    ----------
    total : the GPU's memory, in bytes.
    actor : the bytes that an actor needs, without the data.
    """

    total: float
    actor: float


def fit_line(sizes: Sequence[int], peaks: Sequence[float]) -> tuple[float, float]:
    """Fit ``intercept + slope * size`` bytes to one or two measurements; the slope is never negative."""
    slope = max(0.0, (peaks[-1] - peaks[0]) / max(1, sizes[-1] - sizes[0]))
    intercept = max(peak - slope * size for size, peak in zip(sizes, peaks, strict=True))
    return intercept, slope


def actors_on(gpu: GpuMeasurement, data: float, data_share: float, most: int) -> int:
    """Return how many actors share a GPU: all that its memory holds, but no more than `most`.

    Parameters
    ----------
    data : bytes of the data, of which each actor has a copy if all copies stay within `data_share` of the memory.
    """
    for actors in range(max(1, most), 1, -1):
        data_of_actor = data if actors * data <= data_share * gpu.total else 0.0
        if actors * (gpu.actor + data_of_actor) <= USABLE_SHARE * gpu.total:
            return actors
    return 1


def bytes_needed(prepared: Prepared, memory: GpuMemory) -> float:
    """Return bytes on the device of a process in which this run's largest groups are trained and evaluated.

    Raises
    ------
    OutOfMemory, RuntimeError : if a group of `PROBED` clients does not fit.
    """
    # Masks take no memory, but would need a second client.
    experiment = prepared.experiment.override(["privacy.secure_aggregation=false"])
    evaluate = partial(Rehearsal.evaluate, all_protocols=experiment.evaluation.protocols)
    largest_groups: dict[Callable[[Rehearsal], object], int] = {
        Rehearsal.train: max(groups_for(experiment.engine, prepared.cohort_size)),
        evaluate: max(groups_for(experiment.engine, prepared.num_trained, evaluation=True)),
    }

    # As many as are recorded and repeated in a graph, which takes memory of its own.
    steps = CudaGraphs.min_steps if experiment.engine.executor == "vectorised" else 1
    needed = 0.0
    for work, group in largest_groups.items():
        sizes = sorted({min(size, group) for size in PROBED})
        peaks = []
        for size in sizes:
            # Each rehearsal builds its own network, as the actor will, and records as many graphs.
            rehearsal = Rehearsal(Prepared(experiment, prepared.data, prepared.device), size, steps)
            peaks.append(memory.peak(partial(work, rehearsal)))
        fixed, per_client = fit_line(sizes, peaks)
        needed = max(needed, fixed + per_client * group)
    return memory.context() + needed


def with_gpu_shares(ray: Any, prepared: Prepared, emit: Listener) -> Experiment:
    """Return the experiment with every ``gpus_per_actor=auto`` replaced by a share, measured on a GPU of the cluster.

    Raises
    ------
    ConfigError : if the cluster has no such GPU.
    """
    experiment = prepared.experiment
    settings = experiment.ray
    if not settings.pools:
        share = _share(ray, settings, prepared, emit)
        return experiment.replace(ray=replace(settings, gpus_per_actor=share))

    pools = tuple(replace(pool, gpus_per_actor=_share(ray, pool, prepared, emit)) for pool in settings.pools)
    return experiment.replace(ray=replace(settings, pools=pools))


def _share(ray: Any, pool: ActorPool, prepared: Prepared, emit: Listener) -> float:
    """Return the share of a GPU for each actor of a pool: as the settings say, or as an actor's memory allows."""
    if pool.gpus_per_actor != "auto":
        return pool.gpus_per_actor

    whole_gpu = reserved(replace(pool, gpus_per_actor=1.0))
    nodes_with_gpu = [node for node in nodes_of(ray) if room_for(whole_gpu, [node], {})]
    if not nodes_with_gpu:
        kind = f" of type {pool.accelerator}" if pool.accelerator else ""
        raise ConfigError(
            f"ray.gpus_per_actor is auto, but the cluster has no GPU{kind}; leave it out, so that clients run on CPUs."
        )

    gpu = _measure(ray, whole_gpu, prepared, emit)
    cpus_allow = max(math.floor(node["CPU"] / (pool.cpus_per_actor * node["GPU"])) for node in nodes_with_gpu)
    data = prepared.data
    data_bytes = data.inputs.nbytes + data.labels.nbytes if isinstance(data, FederatedData) else 0
    most = min(cpus_allow, prepared.num_groups)
    actors = actors_on(gpu, data_bytes, prepared.experiment.ray.data_share, most)
    emit(Progress(f"{actors} client actors a GPU: each needs {gpu.actor / 2**30:.2f} of {gpu.total / 2**30:.0f} GiB"))
    return share_of(actors)


def _measure(ray: Any, resources: Mapping[str, Any], prepared: Prepared, emit: Listener) -> GpuMeasurement:
    """Measure in a process with these resources, a whole GPU among them."""
    emit(Progress("measuring how many client actors share a GPU"))
    try:
        return run_on_gpu(ray, resources, _probe, prepared)
    # The network or the method may raise anything.
    except Exception as error:
        raise RaypflError(
            f"The memory that an actor needs could not be measured (ray.gpus_per_actor=auto): {error} Give a number "
            "instead, such as 0.25 for four actors on a GPU."
        ) from error


def _probe(prepared: Prepared) -> GpuMeasurement:
    total = torch.cuda.get_device_properties(prepared.device).total_memory
    try:
        return GpuMeasurement(total, bytes_needed(prepared, CudaMemory(prepared.device)))
    except (RuntimeError, OutOfMemory) as error:
        if not out_of_memory(error):
            raise
        # Give the GPU to one actor: the run itself then fits, or says what does not.
        return GpuMeasurement(total, total)
