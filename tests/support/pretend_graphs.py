"""CUDA graphs, played on a CPU: what is captured has no effect until it is replayed, on the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Notes operations on memory, without the Python around them, as CUDA does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            address = address_of(tensor)
            if address not in self.before and address not in self.made:
                whole = tensor.detach().as_strided(
                    (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
                )
                self.before[address] = (whole, whole.clone())

        result = func(*args, **kwargs)
        used = {address_of(tensor) for tensor in inputs}
        new = [(i, tensor) for i, tensor in enumerate(tensors_in(result)) if address_of(tensor) not in used]
        self.made.update(address_of(tensor) for _, tensor in new)

        def again() -> None:
            outputs = tensors_in(func(*args, **kwargs))
            for i, tensor in new:
                tensor.copy_(outputs[i])

        self.operations.append(again)
        return result

    def undo(self) -> None:
        """Bring all memory back to what it was: what is captured has no effect."""
        for storage, copy in self.before.values():
            storage.copy_(copy)

    def replay(self) -> None:
        """Do the operations again."""
        with torch.no_grad():
            for operation in self.operations:
                operation()


class PretendedGraph:
    """Stands for ``torch.cuda.CUDAGraph``.

    Attributes
    ----------
    captures : the number of graphs that are being captured.
    """

    captures: ClassVar[int] = 0

    def __init__(self) -> None:
        self._tape = Tape()
        self._pool: tuple[int, int] | None = None

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self._pool = pool
        PretendedGraph.captures += 1
        self._tape.__enter__()

    def capture_end(self) -> None:
        if not PretendedGraph.captures:
            raise RuntimeError("There is no capture.")
        PretendedGraph.captures -= 1
        self._tape.__exit__(None, None, None)
        self._tape.undo()

    def replay(self) -> None:
        self._tape.replay()

    def pool(self) -> tuple[int, int] | None:
        return self._pool


def pretended_streams() -> dict[str, Callable[..., Any]]:
    """Return what stands for the parts of ``torch.cuda`` with which graphs are captured."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    handles = iter(range(1, 2**20))
    return {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": PretendedGraph,
        "graph_pool_handle": lambda: (0, next(handles)),
        "is_current_stream_capturing": lambda: PretendedGraph.captures > 0,
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
    }


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def address_of(tensor: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return tensor.untyped_storage()._cdata
