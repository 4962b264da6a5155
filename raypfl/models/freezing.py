"""What of a network is frozen: parameters that do not learn, and the statistics that belong to them."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn


def freeze(network: nn.Module, names: Collection[str]) -> None:
    """Let the parameters of these names learn no more."""
    for name, parameter in network.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def stored(network: nn.Module) -> dict[str, Tensor]:
    """Everything of a network that is a floating-point number and saved with it: parameters first."""
    saved = network.state_dict()
    buffers = {name: b for name, b in network.named_buffers() if b.is_floating_point() and name in saved}
    return dict(network.named_parameters()) | buffers


def moving(network: nn.Module) -> list[str]:
    """Names of what training moves: parameters that learn, and buffers of modules that are not frozen whole."""
    learn = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    parameters = {name for name, _ in network.named_parameters()}
    return [
        name
        for name in stored(network)
        if (name in learn if name in parameters else not _frozen_whole(network, name.rpartition(".")[0]))
    ]


def resting(network: nn.Module) -> list[nn.Module]:
    """Modules with buffers that are frozen whole: batch norm that normalises by the statistics that it has."""
    owners = {name.rpartition(".")[0] for name in stored(network)} - {""}
    return [
        module
        for path, module in network.named_modules()
        if path in owners and any(True for _ in module.buffers(recurse=False)) and _frozen_whole(network, path)
    ]


def _frozen_whole(network: nn.Module, path: str) -> bool:
    """Whether nothing learns in the module at `path` or, if it has no parameters, in the nearest around it that has."""
    learns = [parameter.requires_grad for parameter in network.get_submodule(path).parameters()]
    if learns or not path:
        return bool(learns) and not any(learns)
    return _frozen_whole(network, path.rpartition(".")[0])
