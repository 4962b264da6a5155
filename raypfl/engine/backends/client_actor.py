"""The actor in which virtual clients work.

Its process begins by importing this module, so the module imports nothing slow. The rest is imported when the actor is
made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from raypfl.common.errors import LostState
from raypfl.engine.backends.processes import importing
from raypfl.engine.backends.shipment import Shipment

if TYPE_CHECKING:
    import numpy as np
    import torch

    from raypfl.clients.worker import Call, Group, Reply, Worker
    from raypfl.federation.exchange.backend import BundleReply, Failed
    from raypfl.federation.exchange.tree_sum import Subtree
    from raypfl.storage.stacks import Contents, Fetch, Stack
    from raypfl.storage.states import StateFile, StateShard


class Home(NamedTuple):
    """Where a client actor is.

    Attributes
    ----------
    node : the id of its node.
    device : the type of its device; see :func:`type_of`.
    gpus : the ids of the GPUs that Ray has assigned to it.
    is_time_sliced : whether it shares a GPU that computes for one process at a time, since MPS does not run.
    """

    node: str
    device: str = "CPU"
    gpus: tuple[str, ...] = ()
    is_time_sliced: bool = False


class ClientActor:
    """A process in which virtual clients work, one group at a time."""

    def __init__(self) -> None:
        with importing():
            import raypfl.engine.prepared
            import raypfl.experiment  # noqa: F401
        self._worker: Worker | None = None

    def prepare(self, shipment: Shipment) -> Home:
        """Build the network and open the data of a job, which later groups belong to."""
        import torch

        from raypfl.clients.worker import Worker
        from raypfl.engine.backends.processes import keep_freed_memory
        from raypfl.engine.building.devices import limit_memory, mps_runs
        from raypfl.engine.prepared import Prepared

        keep_freed_memory()
        # The last job's data and models leave the device before this job's arrive.
        self._worker = None
        job, data = shipment.unpack()
        torch.set_num_threads(job.experiment.engine.threads)

        gpus = reserved_gpus()
        limit_memory(gpus)
        device = reserved_device()
        prepared = Prepared(job.experiment, data, device, gpus)
        self._worker = Worker(prepared.context, job.experiment.method, job.experiment.analyses)
        is_time_sliced = 0 < gpus < 1 and sys.platform == "linux" and not mps_runs()
        gpu_ids = tuple(map(str, ray.get_gpu_ids()))
        return Home(ray.get_runtime_context().get_node_id(), type_of(device), gpu_ids, is_time_sliced)

    def work(self, call: Call, groups: Sequence[Group], are_separate: bool) -> tuple[BundleReply | Stack | None, ...]:
        """Run a bundle's groups one after the other.

        Return their replies, with their sums added up, and the clients' new states: for each group a stack or, if
        `are_separate`, one for each client. Each returned stack is a Ray object that the caller, the server, owns.
        """
        from raypfl.federation.exchange.aggregation import take_sums
        from raypfl.federation.exchange.backend import BundleReply, failure, states_of
        from raypfl.federation.exchange.tree_sum import TreeSum

        assert self._worker is not None
        sums = TreeSum()
        outcomes: list[Reply | Failed] = []
        stacks: list[Stack | None] = []
        for group in groups:
            stack = None
            try:
                reply, stack = self._worker.work(call, get_broadcasts, group, states_of(group.states, get_states))
                if len(groups) > 1:
                    sums.add(take_sums(group, reply))
                outcomes.append(reply)
            except Exception as error:
                failed = failure(error)
                if failed.gpu_failure:
                    # The bundle's other groups would fail likewise; all of them run again in another process.
                    num_stacks = sum(len(group.clients) if are_separate else 1 for group in groups)
                    return BundleReply([failed] * len(groups), ()), *[None] * num_stacks
                outcomes.append(failed)

            if are_separate:
                stacks += [None if stack is None else stack.single(slot) for slot in range(len(group.clients))]
            else:
                stacks.append(stack)
        return BundleReply(outcomes, sums.subtrees() if len(groups) > 1 else None), *stacks

    def work_leaving_sums(
        self, call: Call, groups: Sequence[Group], are_separate: bool
    ) -> tuple[BundleReply | Sequence[Subtree] | Stack | None, ...]:
        """Do as `work`, but return the sums as an object of their own, which stays on this node until it is fetched."""
        from raypfl.federation.exchange.aggregation import take_sums
        from raypfl.federation.exchange.backend import BundleReply, Failed

        reply, *stacks = self.work(call, groups, are_separate)
        assert isinstance(reply, BundleReply)
        subtrees = reply.subtrees
        if subtrees is None:
            (outcome,) = reply.outcomes
            subtrees = [] if isinstance(outcome, Failed) else [take_sums(groups[0], outcome)]
        return BundleReply(reply.outcomes, ()), subtrees, *stacks

    def add_up(self, parts: Sequence[Any]) -> tuple[list[int], Sequence[Subtree]]:
        """Add up sums behind references, which may be on other nodes; return the places of those that are lost, too."""
        from raypfl.federation.exchange.tree_sum import TreeSum

        # Start all transfers before waiting for the first one.
        ray.wait(list(parts), num_returns=len(parts), timeout=0)
        sums = TreeSum()
        lost = []
        for place, part in enumerate(parts):
            try:
                subtrees = ray.get(part)
            except ray.exceptions.ObjectLostError:
                lost.append(place)
                continue
            for subtree in subtrees:
                sums.add(subtree)
        return lost, sums.subtrees()

    def map_states(self, function: Callable[[Fetch, Any], Any], job: Any) -> Any:
        """Compute something from states, which should be on this node."""
        return function(get_states, job)

    @ray.method(num_returns="streaming")
    def read_states(self, location: str, files: Sequence[StateFile]) -> Iterator[tuple[StateShard, Contents] | Stack]:
        """Read a checkpoint's files; yield of each shard its outline with the contents of its stack, and the stack.

        As in `work`, each is an object that the server owns.
        """
        from raypfl.federation.exchange.backend import read_stacks

        for stored in read_stacks(location, files):
            yield stored.shard, stored.contents
            yield stored.stack


def reserved_gpus() -> float:
    """Return the number of GPUs, or the share of one, that Ray has reserved for this process."""
    return ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)


def reserved_device() -> torch.device:
    """Return the device of this process: CUDA if Ray has reserved any share of a GPU for it, else CPU."""
    import torch

    return torch.device("cuda" if ray.get_gpu_ids() else "cpu")


def type_of(device: torch.device) -> str:
    """Return the type on which rounding depends: a GPU's model, or the CPU instructions that torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}"


def get_broadcasts(handles: list[Any]) -> list[Mapping[str, np.ndarray]]:
    """Return the arrays of broadcasts; a handle is a reference or, for small arrays, the arrays themselves."""
    references = [handle for handle in handles if isinstance(handle, ray.ObjectRef)]
    fetched = iter(ray.get(references) if references else [])
    return [next(fetched) if isinstance(handle, ray.ObjectRef) else handle for handle in handles]


def get_states(handles: Sequence[Any]) -> Sequence[Stack]:
    """Return the states behind references, in shared memory.

    Raises
    ------
    LostState : if they were on a node that is gone.
    """
    try:
        return ray.get(list(handles))
    except ray.exceptions.ObjectLostError as error:
        raise LostState("The node that held some clients' states is gone, and their states with it.") from error
