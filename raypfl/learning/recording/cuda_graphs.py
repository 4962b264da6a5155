"""Recordings on a GPU: CUDA graphs, which launch all kernels of a step at once."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from raypfl.learning.recording.graph_inputs import GraphInputs
from raypfl.learning.recording.operations import WatchedOperations
from raypfl.learning.recording.replays import Replays, ReusablePlan, StepSignature


class CannotRecord(Exception):
    """Error for work that cannot be recorded; the message says why."""

    @classmethod
    def because(cls, error: Exception) -> CannotRecord:
        """Return the error for work in whose recording another one was raised."""
        return cls(str(error).partition("\n")[0] or type(error).__name__)


@dataclass(frozen=True)
class _KnownGraph:
    """A graph of steps that may come again, and its inputs.

    `steps` : the steps that were recorded, which hold tensors that they made before; the graph reads their memory.
    """

    inputs: GraphInputs
    replay: Callable[[], None]
    steps: Callable[[], None]


class CudaGraphs(Replays):
    """Records CUDA graphs, all in the same memory, since none needs what an earlier one has computed.

    Work with a signature is recorded as operations first, as on a CPU, and these in a graph with inputs of its own: the
    graph is then repeated in every later round. Other work is recorded anew each time, which takes about two steps'
    time on the host.
    """

    warm_up = 2
    """How often work is done before it is recorded, so that libraries have allocated what they keep."""

    min_steps = 6
    """The fewest repetitions that are worth a recording of work that is not known yet."""

    min_repetitions = 3
    """The fewest repetitions for which inputs are copied to a graph."""

    max_graphs = 128
    """The number of graphs that are kept: a group of unequal clients has one for each number of clients left."""

    def __init__(self) -> None:
        super().__init__()
        self._stream: torch.cuda.Stream | None = None
        self._latest: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []
        self._graphs: OrderedDict[Hashable, _KnownGraph] = OrderedDict()
        self._rooms: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        self._unrecordable: set[Hashable] = set()
        self._has_warned = False

    def _do_unknown(self, work: Callable[[], None], times: int) -> bool:
        again = work
        is_recorded = True
        if times >= self.min_steps:
            with WatchedOperations() as operations:
                work()
            for _ in range(self.warm_up - 1):
                work()
            times -= self.warm_up
            # A graph repeats nothing that the host computes or reads.
            if not operations.are_repeatable or len(operations.devices) > 1:
                for _ in range(times):
                    work()
                return True
            try:
                again = self.record(work)
                times -= 1
            except CannotRecord as error:
                is_recorded = False
                self._warn(error)
        for _ in range(times):
            again()
        return is_recorded

    def _repeat(self, plan: ReusablePlan, signature: StepSignature, times: int) -> None:
        graph = None
        # Kernels get a number in the host's memory when they are launched, so a graph would keep the first round's.
        is_on_gpu = len({tensor.device for tensor in signature.inputs.values()}) == 1
        if times >= self.min_repetitions and is_on_gpu:
            graph = self._graph(plan, signature)
        if graph is None:
            super()._repeat(plan, signature, times)
            return

        graph.inputs.load(signature.inputs)
        for _ in range(times):
            graph.replay()
        graph.inputs.store(signature.inputs)

    def _graph(self, plan: ReusablePlan, signature: StepSignature) -> _KnownGraph | None:
        """Return the graph of steps, which is recorded if there is none; None if they cannot be recorded."""
        key = signature.key
        if key in self._unrecordable:
            return None
        graph = self._graphs.get(key)
        if graph is None or not graph.inputs.have_room(signature.inputs):
            try:
                graph = self._recorded(plan, signature)
            except CannotRecord as error:
                self._warn(error)
                self._unrecordable.add(key)
                return None
            self._graphs[key] = graph
            if len(self._graphs) > self.max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def _recorded(self, plan: ReusablePlan, signature: StepSignature) -> _KnownGraph:
        try:
            inputs = GraphInputs(signature, self._rooms)
            steps = plan.function(inputs.tensors)
            # On real numbers: others might be no valid positions of samples.
            inputs.load(signature.inputs)
            inputs.note_changes(steps)
        # For one, memory that runs out; only copies have changed.
        except Exception as error:
            raise CannotRecord.because(error) from error
        return _KnownGraph(inputs, self.record(steps), steps)

    def _warn(self, error: CannotRecord) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            "A training step cannot be recorded as a CUDA graph, so its kernels are launched one by one, which is "
            f"slower and gives the same results (engine.cuda_graphs=false records none). The reason: {error}",
            stacklevel=2,
        )

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do work once; return a function that repeats its operations on the same memory.

        Raises
        ------
        CannotRecord : if the work cannot be recorded; it was not done.
        """
        try:
            graph = self._capture_if_memory_suffices(work)
            if graph is None:
                # During a capture, the allocator does not free what it keeps for other work.
                torch.cuda.empty_cache()
                graph = self._capture(work)
            # What is captured does not run.
            graph.replay()
        except Exception as error:
            raise CannotRecord.because(error) from error
        return graph.replay

    def _capture_if_memory_suffices(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        try:
            return self._capture(work)
        except torch.OutOfMemoryError:
            return None

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return a graph of work, which does not run."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        # Keep the latest graph alive until this one shares its memory pool.
        pool = torch.cuda.graph_pool_handle() if self._latest is None else self._latest.pool()
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)

        # torch.cuda.graph would also wait for the GPU and empty the allocator's cache, each time.
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                work()
                # It may be the first to say that something could not be captured.
                graph.capture_end()
            except BaseException:
                self._abandon(graph, pool)
                raise
        current.wait_stream(self._stream)
        self._latest = graph
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """End a capture that has failed, so that later work finds the allocator and the random stream as before it."""
        with contextlib.suppress(Exception):
            graph.capture_end()
            return

        # CUDA refused to end it, which PyTorch does not expect: the allocator would go on allocating for the capture,
        # never free what it keeps, and refuse to empty its cache.
        device = torch.cuda.current_device()
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(Exception):
                end(device, pool)
        # The allocator of pinned memory still refers to it.
        self._failed.append(graph)

        # The random stream of older versions, such as 2.11, refuses to draw until another capture has ended.
        with contextlib.suppress(Exception):
            harmless = torch.cuda.CUDAGraph()
            harmless.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            torch.zeros((), device="cuda")
            harmless.capture_end()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Let no cycles be collected: they may hold graphs of an earlier run, which CUDA cannot free during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
