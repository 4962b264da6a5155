"""Work on a GPU before a run begins, in a process that has reserved it; the driver itself opens none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from raypfl.common.errors import ConfigError
from raypfl.engine.backends.actors.actor_pools import room_for
from raypfl.engine.backends.cluster import nodes_of
from raypfl.engine.prepared import Prepared

if TYPE_CHECKING:
    from raypfl.engine.backends.shipment import Shipment

Result = TypeVar("Result")


def run_on_gpu(
    ray: Any, resources: Mapping[str, Any], work: Callable[[Prepared], Result], prepared: Prepared
) -> Result:
    """Return ``work(prepared)`` of a process with these resources, some of a GPU among them; Ray ends it afterwards.

    Parameters
    ----------
    resources : what the process reserves, as options for Ray.
    work : a function of a module; it gets the same experiment and data on the GPU.

    Raises
    ------
    ConfigError : if no node of the cluster has that much.
    Exception : what `work` raises.
    """
    if not room_for(resources, nodes_of(ray), {}):
        kind = f" of type {resources['accelerator_type']}" if "accelerator_type" in resources else ""
        raise ConfigError(
            f"Preparing the run needs a process with {resources['num_cpus']:g} CPUs and {resources['num_gpus']:g} "
            f"GPUs{kind}, but no node of this cluster has them. Lower ray.gpus_per_actor or ray.gpus_for_server, or "
            "the CPUs with them."
        )
    # Imports Ray, which inline runs do without.
    from raypfl.engine.backends.shipment import Shipment

    task = ray.remote(**resources, max_calls=1, max_retries=0)(_work)
    try:
        return ray.get(task.remote(work, Shipment.pack(prepared.experiment, prepared.data)))
    except ray.exceptions.RayTaskError as error:
        raise error.cause or error from None


def _work(work: Callable[[Prepared], Result], shipment: Shipment) -> Result:
    experiment, data = shipment.unpack()
    torch.set_num_threads(experiment.engine.threads)
    return work(Prepared(experiment, data, torch.device("cuda")))
