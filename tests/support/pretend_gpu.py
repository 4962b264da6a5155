"""A GPU that this machine does not have: its tensors are in the CPU's memory, but do not mix with the CPU's."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)

_EXACT = {"bincount", "cat", "embedding", "equal", "gather", "stack"}
_EXACT |= {"index_add", "index_copy", "index_select", "scatter", "scatter_add"}
"""Operations in which not even a scalar may be on another device."""


@contextlib.contextmanager
def pretend_gpu() -> Iterator[list[str]]:
    """Within: this thread has one GPU, ``cuda:0``. Gives the faults so far, which the code under test may have caught.

    A fault is an operation on tensors of both devices, an index on the GPU into a tensor on the CPU, a NumPy array of
    a tensor on the GPU, or a generator of the other device. It raises what PyTorch would. The GPU has a global
    generator of its own, and autocast for it rounds as the CPU's.

    It cannot see: other threads and processes; kernels, their rounding and time; memory that runs out; copies that are
    under way; which device a saved tensor was on; what a C++ function does within one operation; tensors that hooks and
    custom gradients make; a number on the GPU that is given as a size or a value.
    """
    gpu = _Gpu()
    patches: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**36),
        "get_rng_state": lambda device=None: gpu.generator.get_state(),
        "set_rng_state": lambda state, device=None: gpu.generator.set_state(state),
        "manual_seed": gpu.generator.manual_seed,
        "manual_seed_all": gpu.generator.manual_seed,
    }
    autocast, numerics = torch.autocast, torch.utils.deterministic
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with contextlib.ExitStack() as stack:
        stack.callback(gpu.forget)
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.multiple(torch.cuda, **patches))
        stack.enter_context(mock.patch("torch.Generator", _Generator))
        stack.enter_context(mock.patch("torch.autocast", lambda kind, *args, **more: autocast("cpu", *args, **more)))
        stack.callback(torch.use_deterministic_algorithms, deterministic[0], warn_only=deterministic[1])
        stack.callback(setattr, numerics, "fill_uninitialized_memory", numerics.fill_uninitialized_memory)
        stack.enter_context(torch.backends.cudnn.flags(enabled=True))
        stack.enter_context(_Operations(gpu))
        stack.enter_context(_Calls(gpu))
        yield gpu.faults


class _Generator(torch.Generator):
    """A generator that says which device it is for, and draws on the CPU."""

    def __new__(cls, device: torch.device | str = "cpu") -> _Generator:
        made = super().__new__(cls, "cpu")
        made.where = _known(device)
        return made

    @property
    def device(self) -> torch.device:
        return self.where


class _Gpu:
    """What is on the GPU.

    Attributes
    ----------
    storages : by address, which is not used again as long as there is a reference.
    makes : the device of tensors that an operation makes from no others.
    """

    storages: ClassVar[dict[int, StorageWeakRef]] = {}

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.generator = _Generator("cuda")
        self.makes = CPU

    @classmethod
    def forget(cls) -> None:
        """Forget tensors that are no more; others may be in a cache, and used when there is a GPU again."""
        cls.storages = {address: one for address, one in cls.storages.items() if not one.expired()}

    def device(self, tensor: Tensor) -> torch.device:
        """Where a tensor is."""
        return GPU if _address(tensor) in self.storages else CPU

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Say where a new tensor is."""
        if device == GPU:
            self.storages[_address(tensor)] = StorageWeakRef(_plain(tensor).untyped_storage())
        else:
            self.storages.pop(_address(tensor), None)

    def moved(self, result: Tensor, device: torch.device, given: Sequence[Tensor]) -> Tensor:
        """The result of a call, on a device: if it is one of the tensors that were given, and elsewhere, a copy."""
        if self.device(result) == device:
            return result
        if _address(result) in map(_address, given):
            return _Copy.apply(result, self, device)
        self.put(result, device)
        return result

    def refuse(self, error: type[Exception], text: str) -> None:
        *_, frame = (f for f in traceback.extract_stack() if "torch/" not in f.filename and f.filename != __file__)
        self.faults.append(f"{text} ({frame.filename}:{frame.lineno}: {frame.line})")
        raise error(text)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Within: what draws from the CPU's global generator draws from the GPU's."""
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
        tensor, ctx.gpu, _ = inputs
        ctx.device = ctx.gpu.device(tensor)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return _Copy.apply(slope, ctx.gpu, ctx.device), None, None


class _Calls(TorchFunctionMode):
    """Calls from Python, which say where results are to be, ask where tensors are, or want them in NumPy."""

    def __init__(self, gpu: _Gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, name, kwargs = self.gpu, getattr(func, "__name__", ""), dict(kwargs or {})
        given = _tensors((args, kwargs))
        where = GPU if any(gpu.device(one) == GPU for one in given) else CPU
        if name == "_parse_to":  # only reads the arguments of nn.Module.to
            return func(*args, **kwargs)
        if name == "__get__":
            known = {"device": where, "is_cuda": where == GPU, "is_cpu": where == CPU}
            attribute = func.__self__.__name__
            return known[attribute] if attribute in known else func(*args, **kwargs)
        if name in ("numpy", "__array__") and where == GPU:
            gpu.refuse(TypeError, "can't convert cuda:0 device type tensor to numpy")
        asked, func, args = self._asked(name, func, args, kwargs)
        if kwargs.get("generator") is not None and kwargs["generator"].device != (asked or where):
            gpu.refuse(RuntimeError, f"Expected a generator for {asked or where}, but that of {name} is for another")
        outside, gpu.makes = gpu.makes, asked or where
        try:
            result = func(*args, **kwargs)
        finally:
            gpu.makes = outside
        return result if asked is None else tree_map_only(Tensor, lambda one: gpu.moved(one, asked, given), result)

    def _asked(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, Any, Any]:
        """The device that a call asks for, if it does, and the same call for the CPU."""
        if name in ("cpu", "cuda", "pin_memory"):
            return GPU if name == "cuda" else CPU, Tensor.to, (args[0], CPU)
        if kwargs.get("device") is not None:
            asked, kwargs["device"] = _known(kwargs["device"]), CPU
            return asked, func, args
        if name == "to":
            for i, one in enumerate(args[1:], 1):
                if isinstance(one, torch.device | str):
                    return _known(one), func, (*args[:i], CPU, *args[i + 1 :])
                if isinstance(one, Tensor):
                    return self.gpu.device(one), func, args
        if name.startswith("new_") or name == "__deepcopy__":
            return self.gpu.device(args[0]), func, args
        return None, func, args


class _Operations(TorchDispatchMode):
    """Every operation, also those of vmap and of a backward pass."""

    def __init__(self, gpu: _Gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        where = self._device(func.overloadpacket.__name__, args, given)
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
        with self.gpu.drawing() if draws and where == GPU else contextlib.nullcontext():
            result = func(*args, **kwargs)
        old = set(map(_address, given))
        for one in _tensors(result):
            if _address(one) not in old:
                self.gpu.put(one, where)
        return result

    def _device(self, name: str, args: Any, given: list[Tensor]) -> torch.device:
        """Where the result is; refuses tensors that are not where they must be."""
        places = [self.gpu.device(one) for one in given]
        if len(set(places)) < 2 or name in ("copy_", "_to_copy"):
            return (places or [self.gpu.makes])[0]
        plain = name.strip("_")
        scalars = [one for one in given if one.dim() == 0 and plain not in _EXACT]
        indices = (
            [one for one in args[1] if one is not None] if plain in ("index", "index_put", "index_put_impl") else []
        )
        free = scalars + (indices if places[0] == GPU else [])
        bound = {place for one, place in zip(given, places, strict=True) if not any(one is other for other in free)}
        if CPU in bound or (name.endswith("_") and places[0] == CPU):
            seen = ", ".join(f"{list(one.shape)} on {place}" for one, place in zip(given, places, strict=True))
            self.gpu.refuse(RuntimeError, f"Expected all tensors to be on the same device, but {name} got {seen}")
        return GPU


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _known(device: torch.device | str) -> torch.device:
    return GPU if torch.device(device).type == "cuda" else CPU


def _plain(tensor: Tensor) -> Tensor:
    """The tensor within those of vmap and of torch.func.grad."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _address(tensor: Tensor) -> int:
    return _plain(tensor).untyped_storage()._cdata
