"""Refuse calls of a module that would compute with the weights it was built with, in place of a client's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from raypfl.common.errors import MethodError


class OwnWeights:
    """The tensors that modules have of their own, where a model vector has its segments.

    Parameters
    ----------
    places : the modules with the names of their attributes.
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]]):
        self._tensors: dict[nn.Module, list[tuple[str, Tensor]]] = {}
        for module, attribute in places:
            self._tensors.setdefault(module, []).append((attribute, getattr(module, attribute)))

    @contextmanager
    def refused(self) -> Iterator[None]:
        """While active, a call of a module that has a tensor of its own raises a MethodError."""
        with ExitStack() as hooks:
            for module, tensors in self._tensors.items():
                hooks.callback(module.register_forward_pre_hook(_refusal(tensors)).remove)
            yield


def _refusal(tensors: Sequence[tuple[str, Tensor]]) -> Callable[[nn.Module, object], None]:
    def refuse(module: nn.Module, _: object) -> None:
        if any(getattr(module, attribute) is tensor for attribute, tensor in tensors):
            raise MethodError(
                "The network's module was called. Here it has the weights that it was built with, not a client's; call "
                "clients.model(theta, x) with a model vector instead."
            )

    return refuse
