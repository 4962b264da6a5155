"""Initial weights: published ones of torchvision, timm or the Hugging Face hub, by name, or those in a file."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError
from raypfl.models.parts import common_parts
from raypfl.models.published.weights import published_weights

RANDOM = "random weights"
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Pretrained:
    """A factory of networks with pretrained weights, which it describes in their attribute ``origin``.

    Parameters
    ----------
    name : the model's name: one of torchvision, with or without ``torchvision:``, or ``timm:NAME``, or
        ``transformers:NAME``.
    source : a file (safetensors, or a state dict saved by ``torch.save``), or the name of published weights of the
        model.

    Raises
    ------
    ConfigError : when called, if the weights do not exist, cannot be read or downloaded, or do not fit the network.
    """

    factory: Callable[[], nn.Module]
    name: str
    source: str

    def __call__(self) -> nn.Module:
        network = self.factory()
        weights = _read(Path(self.source)) if is_file(self.source) else published_weights(self.name, self.source)
        filled = fill(network, weights, self.source)
        network.origin = f"weights from {self.source}, {filled}"  # type: ignore[assignment]
        return network


def origin(network: nn.Module) -> str:
    """Say briefly where a network's initial weights come from."""
    return str(getattr(network, "origin", RANDOM))


def digest(source: str | None) -> str:
    """Return what a resumed run compares with the weights it began with: the SHA-256 of a file, or a name."""
    if source is None or not is_file(source) or not Path(source).is_file():
        return source or ""
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_file(source: str) -> bool:
    """Return whether `source` is a file, not the name of published weights."""
    return source.endswith(SUFFIXES) or "/" in source


def fill(network: nn.Module, weights: Mapping[str, Tensor], source: str) -> str:
    """Copy weights into the network; return a description of which tensors were filled.

    The output layer keeps its random weights if `weights` lacks it or has another number of classes; adapters keep
    theirs if `weights` lacks them. All other tensors must match by name and shape, and `weights` may have no further
    ones.

    Raises
    ------
    ConfigError : if tensors do not match; the message names them.
    """
    targets = _tensors(network.state_dict())
    weights = _tensors(weights)
    parts = common_parts(network, targets)
    head = parts["output layer"]
    adapters = parts["adapters"]

    other_classes = _other_classes(targets, weights, head)
    if other_classes:
        head_prefix = head[0].rpartition(".")[0] + "."
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(head_prefix)}

    random = [name for name in targets if name not in weights and (name in head or name in adapters)]
    problems = _mismatches(targets, weights, random)
    if problems:
        listed = "; ".join(problems[:4])
        if len(problems) > 4:
            listed += f"; and {len(problems) - 4} more"
        raise ConfigError(f"The weights of {source} do not fit the network: {listed}.")

    with torch.no_grad():
        for name, tensor in weights.items():
            targets[name].copy_(tensor)

    if not random:
        return f"all {len(targets)} tensors"
    description = f"{len(weights)} of {len(targets)} tensors"
    random_layers = sorted({name.rpartition(".")[0] for name in random if name in head})
    if random_layers:
        description += f"; {', '.join(random_layers)} drawn at random{other_classes}"
    if any(name in adapters for name in random):
        description += "; adapters drawn at random"
    return description


def _tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without batch norm's counts of batches, which `FlatModel` does not have."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def _other_classes(targets: Mapping[str, Tensor], weights: Mapping[str, Tensor], head: list[str]) -> str:
    """Return `` (1000 classes there, 10 here)``; empty if the output layers match."""
    for name in head:
        if name not in weights:
            continue
        target_shape = targets[name].shape
        shape = weights[name].shape
        # A tensor without axes, such as a scale, has no classes.
        have_same_rows = len(shape) == len(target_shape) > 0 and shape[1:] == target_shape[1:]
        if have_same_rows and shape[0] != target_shape[0]:
            return f" ({shape[0]} classes there, {target_shape[0]} here)"
    return ""


def _mismatches(targets: Mapping[str, Tensor], weights: Mapping[str, Tensor], random: list[str]) -> list[str]:
    other_shapes = []
    missing = []
    for name, target in targets.items():
        if name in weights:
            if weights[name].shape != target.shape:
                shapes = f"{tuple(weights[name].shape)} there and {tuple(target.shape)} here"
                other_shapes.append(f"{name} has shape {shapes}")
        elif name not in random:
            missing.append(f"{name} is not in them")

    unknown = [f"the network has no {name}" for name in weights if name not in targets]
    return other_shapes + missing + unknown


def _read(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ConfigError(f"model.weights is {str(path)!r}, but there is no such file.") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"The weights file {path} contains more than tensors, or is damaged. It is not loaded, because that could "
            "run code. Save only a network's state_dict(), with torch.save or as safetensors."
        ) from None
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        raise ConfigError(f"The weights file {path} cannot be read: {str(error).splitlines()[0]}") from error

    if isinstance(state, dict):
        state = state.get("state_dict", state)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"The weights file {path} is not a state dict: it must contain only tensors, by name.")
    return state
