"""A pretended GPU: its tensors are in the CPU's memory, but refuse to mix with tensors of the CPU."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.support.pretend_graphs import PretendedGraph, pretended_streams

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)

_EXACT = {"bincount", "cat", "embedding", "equal", "gather", "stack"}
_EXACT |= {"index_add", "index_copy", "index_select", "scatter", "scatter_add"}
"""Operations in which not even a scalar may be on another device."""


class Record(list[str]):
    """The faults so far, and what else happened; each entry ends with the line of code that caused it.

    Attributes
    ----------
    uploads : copies to the GPU from pinned memory, for which nothing waits.
    waits : what makes the host wait for the GPU: copies to it from other memory, copies from it, numbers and sizes that
        are read from its tensors, indices on the CPU into them.
    failure : the message of the error with which the GPU refuses everything from now on; empty: it works.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure = ""
        self.uploads: list[str] = []
        self.waits: list[str] = []


@contextlib.contextmanager
def pretend_gpu() -> Iterator[Record]:
    """Give this thread one GPU, ``cuda:0``, within the context.

    Yields the record so far; the code under test may have caught the errors of faults. A fault is an operation on
    tensors of both devices, an index on the GPU into a tensor on the CPU, a NumPy array of a tensor on the GPU, or a
    generator of the other device. It raises what PyTorch would. The GPU has its own global generator, and its autocast
    rounds like the CPU's, and CUDA graphs are played (:mod:`tests.support.pretend_graphs`).

    It cannot see other threads and processes; kernels, their rounding and time; memory that runs out; unfinished
    copies; which device a saved tensor was on; what a C++ function does within one operation; tensors that hooks and
    custom gradients make; a number on the GPU that is passed as a size or a value.
    """
    gpu = _Gpu()
    patches: dict[str, Callable[..., Any]] = {
        **pretended_streams(),
        "is_available": lambda: True,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**36),
        "is_initialized": lambda: True,
        "synchronize": lambda device=None: gpu.refuse_if_failed(),
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "get_rng_state": lambda device=None: gpu.generator.get_state(),
        "set_rng_state": lambda state, device=None: gpu.generator.set_state(state),
        "manual_seed": gpu.generator.manual_seed,
        "manual_seed_all": gpu.generator.manual_seed,
    }
    autocast = torch.autocast
    numerics = torch.utils.deterministic
    matmul = torch.backends.cuda.matmul
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()

    with contextlib.ExitStack() as stack:
        stack.callback(gpu.forget)
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.multiple(torch.cuda, **patches))
        stack.enter_context(mock.patch("torch.Generator", _Generator))
        stack.enter_context(mock.patch("raypfl.learning.recording.operations.device_of", gpu.device))
        stack.enter_context(mock.patch("torch.autocast", lambda kind, *args, **more: autocast("cpu", *args, **more)))
        stack.callback(torch.use_deterministic_algorithms, deterministic, warn_only=warn_only)
        stack.callback(setattr, numerics, "fill_uninitialized_memory", numerics.fill_uninitialized_memory)
        stack.enter_context(torch.backends.cudnn.flags(enabled=True))
        stack.callback(setattr, matmul, "allow_tf32", matmul.allow_tf32)
        for kernel in ("flash", "mem_efficient", "cudnn"):
            enabled = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
            stack.callback(getattr(torch.backends.cuda, f"enable_{kernel}_sdp"), enabled)
        stack.enter_context(_Operations(gpu))
        stack.enter_context(_Calls(gpu))
        stack.callback(setattr, PretendedGraph, "captures", 0)
        yield gpu.faults


class _Generator(torch.Generator):
    """A generator that reports the device it was made for, and draws on the CPU."""

    def __new__(cls, device: torch.device | str = "cpu") -> _Generator:
        generator = super().__new__(cls, "cpu")
        generator.pretended_device = _pretended(device)
        return generator

    @property
    def device(self) -> torch.device:
        return self.pretended_device


class _Gpu:
    """The tensors on the GPU, and the faults.

    Attributes
    ----------
    storages : storages on the GPU by address, which is not used again as long as there is a reference.
    default_device : the device of tensors that an operation makes from no others.
    """

    storages: ClassVar[dict[int, StorageWeakRef]] = {}

    def __init__(self) -> None:
        self.faults = Record()
        self.generator = _Generator("cuda")
        self.pinned: dict[int, StorageWeakRef] = {}
        self.default_device = CPU

    @classmethod
    def forget(cls) -> None:
        """Forget freed tensors; living ones may be in a cache, and used when a GPU is pretended again."""
        cls.storages = {address: storage for address, storage in cls.storages.items() if not storage.expired()}

    def device(self, tensor: Tensor) -> torch.device:
        """Return the device of a tensor."""
        return GPU if _address(tensor) in self.storages else CPU

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Record the device of a new tensor."""
        if device == GPU:
            self.storages[_address(tensor)] = StorageWeakRef(_plain(tensor).untyped_storage())
        else:
            self.storages.pop(_address(tensor), None)

    def moved(
        self,
        result: Tensor,
        device: torch.device,
        arguments: Sequence[Tensor],
        non_blocking: bool = False,
        converts: bool = False,
    ) -> Tensor:
        """Put the result of a call on a device; an argument that is on the other device is copied.

        `converts` says that a new result is the first argument in another dtype. PyTorch converts on the side that the
        tensor comes from, into memory that is not pinned.
        """
        if self.device(result) == device:
            return result
        if _address(result) in map(_address, arguments):
            self.crosses(arguments[0], device, non_blocking)
            return _Copy.apply(result, self, device)
        if converts and self.device(arguments[0]) != device:
            self.waits(f"a copy to {device} in another dtype")
        self.put(result, device)
        return result

    def refuse(self, error: type[Exception], text: str) -> None:
        """Record a fault at the innermost line outside torch and this file, and raise its error."""
        self.faults.append(f"{text} {_line()}")
        raise error(text)

    def refuse_if_failed(self) -> None:
        """Raise the error with which the GPU has failed, if it has."""
        if self.faults.failure:
            raise torch.AcceleratorError(self.faults.failure)

    def waits(self, text: str) -> None:
        """Record that the host waits for the GPU, which it cannot do while a graph is captured."""
        self.faults.waits.append(f"{text} {_line()}")
        if PretendedGraph.captures:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def crosses(self, source: Tensor, target: torch.device, non_blocking: bool) -> None:
        """Record a copy between the devices."""
        if target == GPU and non_blocking and _address(source) in self.pinned:
            self.faults.uploads.append(_line())
        else:
            self.waits(f"a copy to {target}")

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let draws from the CPU's global generator come from the GPU's, within the context."""
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(state)


class _Copy(torch.autograd.Function):
    """A copy to a device, whose gradient goes back to the other one."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, gpu: _Gpu, device: torch.device) -> Tensor:
        copy = tensor.clone()
        gpu.put(copy, device)
        return copy

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensor, gpu, _ = inputs
        ctx.gpu = gpu
        ctx.device = gpu.device(tensor)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _Copy.apply(slope, ctx.gpu, ctx.device), None, None


class _Calls(TorchFunctionMode):
    """Intercept calls from Python: those with a device for results, for a tensor's device, or for NumPy."""

    def __init__(self, gpu: _Gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = self.gpu
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name == "_parse_to":  # only reads the arguments of nn.Module.to
            return func(*args, **kwargs)
        attribute = func.__self__.__name__ if name == "__get__" else ""
        if attribute and attribute not in ("device", "is_cuda", "is_cpu"):
            return func(*args, **kwargs)

        tensors = _tensors((args, kwargs))
        device = GPU if any(gpu.device(tensor) == GPU for tensor in tensors) else CPU
        if attribute:
            return {"device": device, "is_cuda": device == GPU, "is_cpu": device == CPU}[attribute]
        if name in ("numpy", "__array__") and device == GPU:
            gpu.refuse(TypeError, "can't convert cuda:0 device type tensor to numpy")

        if name == "tolist" and device == GPU:
            gpu.waits("tolist")
        takes_numbers = name in ("tensor", "as_tensor", "asarray", "new_tensor")
        if takes_numbers and not tensors[name == "new_tensor" :] and _pretended(kwargs.get("device") or device) == GPU:
            gpu.waits(f"a copy of {name}'s numbers")

        non_blocking = kwargs.get("non_blocking", False)
        pins = name == "pin_memory" or kwargs.pop("pin_memory", False)
        target, func, args = self._on_cpu(name, func, args, kwargs)
        if kwargs.get("generator") is not None and kwargs["generator"].device != (target or device):
            gpu.refuse(RuntimeError, f"Expected a generator for {target or device}, but that of {name} is for another")

        outer_default = gpu.default_device
        gpu.default_device = target or device
        try:
            result = func(*args, **kwargs)
        finally:
            gpu.default_device = outer_default

        if pins:
            result = result.clone() if name == "pin_memory" else result
            gpu.pinned[_address(result)] = StorageWeakRef(_plain(result).untyped_storage())
        if target is None:
            return result
        converts = name in ("to", "cpu", "cuda")
        return tree_map_only(Tensor, lambda tensor: gpu.moved(tensor, target, tensors, non_blocking, converts), result)

    def _on_cpu(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, Any]:
        """Return the device that a call asks for, if it does, and the same call for the CPU."""
        if name in ("cpu", "cuda", "pin_memory"):
            return GPU if name == "cuda" else CPU, Tensor.to, (args[0], CPU)

        if kwargs.get("device") is not None:
            target = _pretended(kwargs["device"])
            kwargs["device"] = CPU
            return target, func, args

        if name == "to":
            for i, argument in enumerate(args[1:], 1):
                if isinstance(argument, torch.device | str):
                    return _pretended(argument), func, (*args[:i], CPU, *args[i + 1 :])
                if isinstance(argument, Tensor):
                    return self.gpu.device(argument), func, args

        if name.startswith("new_") or name == "__deepcopy__":
            return self.gpu.device(args[0]), func, args
        return None, func, args


class _Operations(TorchDispatchMode):
    """Intercept every operation, also those of vmap and of a backward pass."""

    def __init__(self, gpu: _Gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        device = self._device(func.overloadpacket.__name__, args, tensors)
        if device == GPU or any(self.gpu.device(tensor) == GPU for tensor in tensors):
            self.gpu.refuse_if_failed()
            self._record_waits(func, args, tensors)

        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        with self.gpu.drawing() if draws and device == GPU else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if func.overloadpacket.__name__.startswith("_foreach") and not result:
            # In place: the CPU counts such changes above this mode, CUDA's kernels count them themselves.
            torch.autograd.graph.increment_version(args[0])

        old = set(map(_address, tensors))
        for tensor in _tensors(result):
            if _address(tensor) not in old:
                self.gpu.put(tensor, device)
        return result

    def _record_waits(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """Record whether the host waits for an operation on the GPU."""
        name = func.overloadpacket.__name__
        if name == "copy_":
            target, source = (self.gpu.device(tensor) for tensor in tensors)
            if target != source:
                self.gpu.crosses(tensors[1], target, bool(args[2:] and args[2]))
        elif name.strip("_") in ("index", "index_put", "index_put_impl"):
            indices = [index for index in args[1] if index is not None]
            if any(self.gpu.device(index) == CPU or index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.gpu.waits("an index that is on the CPU, or a mask")
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
            self.gpu.waits(name)

    def _device(self, name: str, args: Any, tensors: list[Tensor]) -> torch.device:
        """Return the device of the result; refuse tensors on the wrong device."""
        devices = [self.gpu.device(tensor) for tensor in tensors]
        if len(set(devices)) < 2 or name in ("copy_", "_to_copy"):
            return (devices or [self.gpu.default_device])[0]

        # As in PyTorch: scalars may be on either device, and so may indices into a tensor on the GPU.
        plain_name = name.strip("_")
        exempt = [tensor for tensor in tensors if tensor.dim() == 0 and plain_name not in _EXACT]
        if plain_name in ("index", "index_put", "index_put_impl") and devices[0] == GPU:
            exempt += [index for index in args[1] if index is not None]

        bound = set()
        for tensor, device in zip(tensors, devices, strict=True):
            if not any(tensor is exempt_tensor for exempt_tensor in exempt):
                bound.add(device)

        if CPU in bound or (name.endswith("_") and devices[0] == CPU):
            shapes = ", ".join(f"{list(t.shape)} on {device}" for t, device in zip(tensors, devices, strict=True))
            self.gpu.refuse(RuntimeError, f"Expected all tensors to be on the same device, but {name} got {shapes}")
        return GPU


def _line() -> str:
    """Return the innermost line outside torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back and ("torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"({file}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()})"


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts; several times faster than PyTorch's `tree_leaves`."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []

    tensors = []
    for part in tree:
        tensors += _tensors(part)
    return tensors


def _pretended(device: torch.device | str) -> torch.device:
    return GPU if torch.device(device).type == "cuda" else CPU


def _plain(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of vmap and torch.func.grad."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _address(tensor: Tensor) -> int:
    return _plain(tensor).untyped_storage()._cdata
