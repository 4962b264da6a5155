"""The parts of a network: which of its tensors are the output layer or the batch norm, and which are frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def common_parts(module: nn.Module, tensors: Iterable[str]) -> dict[str, list[str]]:
    """Names of the tensors in each part that most networks have; an empty list if a network has no such part.

    - ``input layer``, ``output layer``: the first and the last layer with trainable parameters, in the order in which
      the network registers them.
    - ``feature extractor``: everything except the output layer.
    - ``batch norm``: scales, shifts and statistics of all batch-norm layers.
    - ``adapters``: modules whose names start with ``adapter``.

    Parameters
    ----------
    tensors : names of all tensors to choose from.
    """
    names, modules = list(tensors), list(module.named_modules())
    layers = [path for path, child in modules if any(p.requires_grad for p in child.parameters(recurse=False))]
    layers = [path for path in layers if path] or layers  # parameters of the network itself are no layer
    output = _below(layers[-1:], names)
    return {
        "input layer": _below(layers[:1], names),
        "output layer": output,
        "feature extractor": [name for name in names if name not in output],
        "batch norm": _below([path for path, child in modules if isinstance(child, _BatchNorm)], names),
        "adapters": _below([path for path, _ in modules if path.rpartition(".")[2].startswith("adapter")], names),
    }


def _below(paths: list[str], names: list[str]) -> list[str]:
    return [name for name in names if any(not path or name.startswith(path + ".") for path in paths)]


def freeze(network: nn.Module, names: Collection[str]) -> None:
    """Set ``requires_grad`` of the parameters with these names to False."""
    for name, parameter in network.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def stored(network: nn.Module) -> dict[str, Tensor]:
    """All floating-point tensors in a network's state dict, parameters first."""
    saved = network.state_dict()
    buffers = {name: b for name, b in network.named_buffers() if b.is_floating_point() and name in saved}
    return dict(network.named_parameters()) | buffers


def trainable(network: nn.Module) -> list[str]:
    """Names of the tensors that training changes: trainable parameters, and buffers of modules that are not frozen."""
    parameters = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    return [
        name
        for name in stored(network)
        if parameters.get(name, name not in parameters and not _is_frozen(network, name.rpartition(".")[0]))
    ]


def frozen_norms(network: nn.Module) -> list[nn.Module]:
    """Frozen modules with buffers, such as batch norm that must keep its statistics during training."""
    owners = {name.rpartition(".")[0] for name in stored(network)} - {""}
    return [
        module
        for path, module in network.named_modules()
        if path in owners and any(True for _ in module.buffers(recurse=False)) and _is_frozen(network, path)
    ]


def _is_frozen(network: nn.Module, path: str) -> bool:
    """Whether no parameter of the module at `path` is trainable.

    A module without parameters is frozen if the nearest module around it that has parameters is.
    """
    flags = [parameter.requires_grad for parameter in network.get_submodule(path).parameters()]
    if flags or not path:
        return bool(flags) and not any(flags)
    return _is_frozen(network, path.rpartition(".")[0])
