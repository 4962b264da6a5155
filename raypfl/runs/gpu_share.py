"""``ray.gpus_per_actor=auto``: how many client actors share a GPU, by the memory that one of them needs.

A process of its own runs a step of training and an evaluation, with one client and with a group of eight. A line
through both gives the memory of the run's own groups. More actors on a GPU change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from raypfl.common.errors import ConfigError, OutOfMemory, RaypflError
from raypfl.common.memory import out_of_memory
from raypfl.data import ClientData, FederatedData
from raypfl.engine.backends.actor_pools import reserved, room_for, share_of
from raypfl.engine.backends.cluster import nodes_of
from raypfl.engine.events import Listener, Progress
from raypfl.engine.setup import groups_for, num_groups
from raypfl.experiment import Experiment
from raypfl.experiment.settings import ActorPool
from raypfl.federation.schedule import cohort_size
from raypfl.runs.rehearsal import Rehearsal

if TYPE_CHECKING:
    from raypfl.engine.backends.shipment import Shipment

PROBED = (1, 8)
"""Clients of the two groups whose memory is measured."""

USED = 0.9
"""Share of a GPU's memory that its actors may need together."""


class Memory(Protocol):
    """Reads the memory of this process on its GPU."""

    def peak(self, work: Callable[[], object]) -> float:
        """The most bytes that tensors have reserved at a time during `work`."""
        ...

    def context(self) -> float:
        """Bytes that the process uses in addition to its tensors."""
        ...


class CudaMemory:
    """Memory as torch and the driver report it; what other processes have on the GPU counts as this one's context."""

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
        return total - free - torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True)
class Card:
    """What was measured on a GPU: its memory in bytes, and what of it an actor needs, without the data."""

    total: float
    actor: float


def line(sizes: Sequence[int], peaks: Sequence[float]) -> tuple[float, float]:
    """``a, b`` with ``a + b * size`` bytes, from one or two measurements; memory never shrinks with the group."""
    each = max(0.0, (peaks[-1] - peaks[0]) / max(1, sizes[-1] - sizes[0]))
    return max(peak - each * size for size, peak in zip(sizes, peaks, strict=True)), each


def actors_on(card: Card, data: float, data_share: float, most: int) -> int:
    """How many actors share a GPU: all that its memory holds, but no more than `most`.

    Parameters
    ----------
    data : bytes of the data, which each actor holds where all of them together stay within `data_share` of the memory.
    """
    for actors in range(max(1, most), 1, -1):
        held = data if actors * data <= data_share * card.total else 0.0
        if actors * (card.actor + held) <= USED * card.total:
            return actors
    return 1


def bytes_needed(experiment: Experiment, data: ClientData, device: torch.device, memory: Memory) -> float:
    """Bytes on `device` of a process in which this run's largest groups are trained and evaluated.

    Raises
    ------
    OutOfMemory, RuntimeError : if a group of `PROBED` clients does not fit.
    """
    experiment = experiment.override(["privacy.secure_aggregation=false"])  # masks need a second client, and no memory
    trained = data.num_clients - len(data.unseen)
    cohort = min(cohort_size(experiment.cohort, trained), trained)
    largest = {
        Rehearsal.train: max(groups_for(experiment, cohort)),
        Rehearsal.evaluate: max(groups_for(experiment, trained, evaluation=True)),
    }
    needed = 0.0
    for work, group in largest.items():
        sizes = sorted({min(size, group) for size in PROBED})
        peaks = [memory.peak(partial(work, Rehearsal(experiment, data, device, size))) for size in sizes]
        fixed, each = line(sizes, peaks)
        needed = max(needed, fixed + each * group)
    return memory.context() + needed


def with_numbers(ray: Any, experiment: Experiment, data: ClientData, emit: Listener) -> Experiment:
    """The experiment with a number for every ``gpus_per_actor=auto``, which is measured on a GPU of the cluster.

    Raises
    ------
    ConfigError : if the cluster has no such GPU.
    """
    settings = experiment.ray
    if settings.pools:
        pools = tuple(
            replace(pool, gpus_per_actor=_share(ray, pool, experiment, data, emit)) for pool in settings.pools
        )
        return experiment.replace(ray=replace(settings, pools=pools))
    return experiment.replace(ray=replace(settings, gpus_per_actor=_share(ray, settings, experiment, data, emit)))


def _share(ray: Any, pool: ActorPool, experiment: Experiment, data: ClientData, emit: Listener) -> float:
    if pool.gpus_per_actor != "auto":
        return pool.gpus_per_actor
    one = replace(pool, gpus_per_actor=1.0)
    with_gpu = [node for node in nodes_of(ray) if room_for(reserved(one), [node], {})]
    if not with_gpu:
        kind = f" of type {pool.accelerator}" if pool.accelerator else ""
        raise ConfigError(
            f"ray.gpus_per_actor is auto, but the cluster has no GPU{kind}; leave it out, so that clients run on CPUs."
        )
    from raypfl.engine.backends.shipment import Shipment  # imports Ray, which inline runs do without

    emit(Progress("measuring how many client actors share a GPU"))
    probe = ray.remote(**reserved(one), max_calls=1, max_retries=0)(_probe)
    try:
        card = ray.get(probe.remote(Shipment.of(experiment, data)))
    except ray.exceptions.RayTaskError as error:
        raise RaypflError(
            f"The memory that an actor needs could not be measured (ray.gpus_per_actor=auto): {error.cause} Give a "
            "number instead, such as 0.25 for four actors on a GPU."
        ) from error
    per_gpu = max(math.floor(node["CPU"] / (pool.cpus_per_actor * node["GPU"])) for node in with_gpu)
    held = data.inputs.nbytes + data.labels.nbytes if isinstance(data, FederatedData) else 0
    actors = actors_on(card, held, experiment.ray.data_share, min(per_gpu, num_groups(experiment, data)))
    emit(Progress(f"{actors} client actors a GPU: each needs {card.actor / 2**30:.2f} of {card.total / 2**30:.0f} GiB"))
    return share_of(actors)


def _probe(shipment: Shipment) -> Card:
    experiment, data = shipment.opened()
    torch.set_num_threads(experiment.engine.threads)
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        return Card(total, bytes_needed(experiment, data, device, CudaMemory(device)))
    except (RuntimeError, OutOfMemory) as error:
        if not out_of_memory(error):
            raise
        # The run itself, alone on the GPU, has room or says what has not.
        return Card(total, total)
