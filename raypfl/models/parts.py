"""The parts of a network: which of its tensors are the output layer or the batch norm, and which are frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raypfl.models.low_rank import LowRank


def common_parts(module: nn.Module, tensors: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the tensors in each part that most networks have; none if a network lacks the part.

    - ``input layer``, ``output layer``: the first and the last layer with trainable parameters, in the order in which
      the network registers them.
    - ``feature extractor``: everything except the output layer.
    - ``batch norm``: scales, shifts and statistics of all batch-norm layers.
    - ``adapters``: modules whose names start with ``adapter``.
    - ``lora A``, ``lora B``: the two factors of the low-rank adapters.

    `tensors` : names of all tensors to choose from.
    """
    names = list(tensors)
    layers = layers_with_parameters(module)
    batch_norms = []
    adapters = []
    low_rank = []
    for path, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            batch_norms.append(path)
        if path.rpartition(".")[2].startswith("adapter"):
            adapters.append(path)
        if isinstance(child, LowRank):
            low_rank.append(path)

    output_layer = _tensors_of(module, layers[-1:], names)
    return {
        "input layer": _tensors_of(module, layers[:1], names),
        "output layer": output_layer,
        "feature extractor": [name for name in names if name not in output_layer],
        "batch norm": _tensors_of(module, batch_norms, names),
        "adapters": _tensors_of(module, adapters, names),
        "lora A": _tensors_of(module, [f"{path}.adapter.0" for path in low_rank], names),
        "lora B": _tensors_of(module, [f"{path}.adapter.1" for path in low_rank], names),
    }


def layers_with_parameters(module: nn.Module) -> list[str]:
    """Return the paths of the layers that have trainable parameters, in the order in which they are registered.

    Parameters of the network itself, whose path is empty, count as a layer only if there are no others.
    """
    layers = []
    for path, child in module.named_modules():
        if any(parameter.requires_grad for parameter in child.parameters(recurse=False)):
            layers.append(path)
    return [path for path in layers if path] or layers


def _tensors_of(module: nn.Module, paths: list[str], names: list[str]) -> list[str]:
    """Return the names of the tensors in the modules at these paths, including those shared with other modules."""
    # A shared tensor has the name that it has in the first module.
    name_of_tensor = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters: set[str] = set()
    for path in paths:
        parameters |= {name_of_tensor[id(parameter)] for parameter in module.get_submodule(path).parameters()}
    below = tuple(f"{path}." if path else "" for path in paths)
    return [name for name in names if name in parameters or name.startswith(below)]


def freeze(network: nn.Module, names: Collection[str]) -> None:
    """Set ``requires_grad`` of the parameters with these names to False."""
    for name, parameter in network.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all floating-point tensors in a network's state dict by name, parameters first."""
    state = network.state_dict()
    buffers = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point() and name in state}
    return dict(network.named_parameters()) | buffers


def trainable_names(network: nn.Module) -> list[str]:
    """Return the names of the tensors that training changes.

    These are trainable parameters, and buffers of modules that are not frozen.
    """
    requires_grad = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    names = []
    for name in stored_tensors(network):
        if name in requires_grad:
            is_trainable = requires_grad[name]
        else:
            is_trainable = not _is_frozen(network, name.rpartition(".")[0])
        if is_trainable:
            names.append(name)
    return names


def frozen_norms(network: nn.Module) -> list[nn.Module]:
    """Return the frozen modules with buffers, such as batch norm that must keep its statistics during training."""
    owners = {name.rpartition(".")[0] for name in stored_tensors(network)} - {""}
    norms = []
    for path, module in network.named_modules():
        has_buffers = any(True for _ in module.buffers(recurse=False))
        if path in owners and has_buffers and _is_frozen(network, path):
            norms.append(module)
    return norms


def _is_frozen(network: nn.Module, path: str) -> bool:
    """Return whether no parameter of the module at `path` is trainable.

    A module without parameters is frozen if the nearest module around it that has parameters is.
    """
    flags = [parameter.requires_grad for parameter in network.get_submodule(path).parameters()]
    if flags or not path:
        return bool(flags) and not any(flags)
    return _is_frozen(network, path.rpartition(".")[0])
