"""Trees of dicts, lists and tuples with tensors, such as a server's state: flattened, cloned, or encoded as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypfl.common.errors import CheckpointError, MethodError


@dataclass(frozen=True)
class Leaf:
    """A placeholder for a tensor.

    Attributes
    ----------
    name : the tensor's path in the tree, such as ``"moments/0"``.
    """

    name: str


def flatten(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Return the tree with a :class:`Leaf` in place of each tensor, and the tensors by path.

    Raises
    ------
    MethodError : if two tensors have the same path, such as those of the keys 3 and "3".
    """
    if isinstance(tree, Tensor):
        return Leaf(path), {path: tree}
    if not isinstance(tree, dict | list | tuple):
        return tree, {}

    tensors: dict[str, Tensor] = {}
    parts = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        part, part_tensors = flatten(value, f"{path}/{key}" if path else str(key))
        parts.append((key, part))
        if clash := tensors.keys() & part_tensors.keys():
            raise MethodError(f"The server's state has two tensors that are both called {min(clash)!r}; rename a key.")
        tensors |= part_tensors

    if isinstance(tree, dict):
        return dict(parts), tensors
    return type(tree)(part for _, part in parts), tensors


def equal(tree: Any, other: Any) -> bool:
    """Return whether two trees are the same, tensor by tensor."""
    skeleton, tensors = flatten(tree)
    other_skeleton, other_tensors = flatten(other)
    if skeleton != other_skeleton:
        return False
    for name, tensor in tensors.items():
        other_tensor = other_tensors[name]
        if tensor.dtype != other_tensor.dtype or not torch.equal(tensor, other_tensor):
            return False
    return True


def leaves(skeleton: Any) -> list[str]:
    """Return the names of the tensors of a flattened tree."""
    if isinstance(skeleton, Leaf):
        return [skeleton.name]
    if isinstance(skeleton, dict):
        skeleton = skeleton.values()
    elif not isinstance(skeleton, list | tuple):
        return []
    return [name for part in skeleton for name in leaves(part)]


def unflatten(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put tensors back into a flattened tree; the inverse of :func:`flatten`."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        return {key: unflatten(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(unflatten(value, tensors) for value in skeleton)
    return skeleton


def clone(tree: Any) -> Any:
    """Return a deep copy, whose tensors are detached."""
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, {name: tensor.detach().clone() for name, tensor in tensors.items()})


class Copies:
    """Deep copies of trees, one at a time: the next takes the memory of the last, since new memory takes longer."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def of(self, tree: Any) -> Any:
        """Return a deep copy, whose tensors are detached. It reuses the memory of the previous copy."""
        skeleton, tensors = flatten(tree)
        copies = {}
        for name, tensor in tensors.items():
            memory = self._tensors.get(name)
            if memory is not None and _layout(memory) == _layout(tensor):
                copies[name] = memory.copy_(tensor.detach())
            else:
                copies[name] = tensor.detach().clone()
        self._tensors = copies
        # Detached: whoever reads a copy may ask for its gradients.
        return unflatten(skeleton, {name: copied.detach() for name, copied in copies.items()})


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def on_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on a device.

    They come from pageable memory, which is given back: a run restores its state once, and pinned memory stays pinned.
    """
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, {name: tensor.to(device) for name, tensor in tensors.items()})


def encode(server: dict[str, Any], tensors: dict[str, Tensor]) -> list[Any]:
    """Encode a server's state as JSON and add its tensors to `tensors`; :func:`decode` reads it.

    Raises
    ------
    CheckpointError : if the state has something that a checkpoint cannot store.
    """
    return _encode(server, "", tensors)


def decode(node: list[Any], tensors: dict[str, Tensor]) -> Any:
    """Rebuild a server's state; the inverse of :func:`encode`."""
    kind, content = node
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [decode(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return content


def as_saved(server: dict[str, Any]) -> dict[str, Any]:
    """Return a server's state as a checkpoint would give it back; the errors are those of :func:`encode`.

    Plain dicts, lists, tuples and numbers, and contiguous tensors without gradient, which share no memory with each
    other. A tensor that is like that keeps its memory.
    """
    tensors: dict[str, Tensor] = {}
    tree = encode(server, tensors)
    separate = {}
    memories = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        is_separate = tensor.is_contiguous() and memory not in memories
        separate[name] = tensor if is_separate else tensor.clone(memory_format=torch.contiguous_format)
        memories.add(memory)
    return decode(json.loads(json.dumps(tree)), separate)


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    """Encode a value as JSON, each node a pair ``[kind, content]``, and add its tensors to `tensors` by path."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise CheckpointError(
                f"The server state {path!r} is a sparse tensor ({value.layout}), which a checkpoint cannot store; use "
                "its to_dense()."
            )
        # Several keys can give one path: 3 and "3", or "a/b" and "a" above "b".
        while path in tensors:
            path += "'"

        tensors[path] = value.detach()
        return ["tensor", path]

    if isinstance(value, dict):
        if bad_keys := [key for key in value if not isinstance(key, (str, int))]:
            raise CheckpointError(
                f"The server state {path or '/'} has the key {bad_keys[0]!r}; keys must be str or int."
            )
        return ["dict", [[key, _encode(item, f"{path}/{key}".lstrip("/"), tensors)] for key, item in value.items()]]

    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_encode(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]]

    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise CheckpointError(
        f"The server state {path!r} is of type {type(value).__name__}, which a checkpoint cannot store; use tensors, "
        f"numbers, strings, and dicts, lists or tuples of them."
    )
