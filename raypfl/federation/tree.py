"""A server's state, nested dicts and lists with tensors among them, taken apart and put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raypfl.errors import MethodError


@dataclass(frozen=True)
class Leaf:
    """Stands where a tensor was."""

    name: str


def taken_apart(tree: Any, path: str = "") -> tuple[Any, dict[str, Tensor]]:
    """The tree with a :class:`Leaf` for each tensor, and the tensors by name."""
    if isinstance(tree, Tensor):
        return Leaf(path), {path: tree}
    if not isinstance(tree, dict | list | tuple):
        return tree, {}
    tensors: dict[str, Tensor] = {}
    parts = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        part, below = taken_apart(value, f"{path}/{key}" if path else str(key))
        parts.append((key, part))
        if clash := tensors.keys() & below.keys():
            raise MethodError(f"The server's state has two tensors that are both called {min(clash)!r}; rename a key.")
        tensors |= below
    return dict(parts) if isinstance(tree, dict) else type(tree)(part for _, part in parts), tensors


def put_together(skeleton: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`taken_apart`."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.name]
    if isinstance(skeleton, dict):
        return {key: put_together(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list | tuple):
        return type(skeleton)(put_together(value, tensors) for value in skeleton)
    return skeleton


def cloned(tree: Any) -> Any:
    """A copy whose tensors are copies too."""
    skeleton, tensors = taken_apart(tree)
    return put_together(skeleton, {name: tensor.detach().clone() for name, tensor in tensors.items()})
