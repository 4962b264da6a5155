"""Initial weights: pretrained ones of torchvision or timm, by name, or those of a file."""

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
    """A factory of networks with given initial weights, which it describes in their attribute ``origin``.

    Parameters
    ----------
    factory : builds the network.
    name : of the model: one of torchvision, with or without ``torchvision:``, or of timm, with ``timm:``.
    source : a file (safetensors, or a state dict saved by ``torch.save``), or the name of weights of that model there.

    Raises
    ------
    ConfigError : when called, if the weights do not exist, cannot be read or downloaded, or do not fit the network.
    """

    factory: Callable[[], nn.Module]
    name: str
    source: str

    def __call__(self) -> nn.Module:
        network = self.factory()
        given = _read(Path(self.source)) if is_file(self.source) else published_weights(self.name, self.source)
        network.origin = f"weights from {self.source}, {fill(network, given, self.source)}"  # type: ignore[assignment]
        return network


def origin(network: nn.Module) -> str:
    """A short description of where a network's initial weights come from."""
    return str(getattr(network, "origin", RANDOM))


def digest(source: str | None) -> str:
    """What identifies the weights when a run is resumed: the SHA-256 of a file, or a name."""
    if source is None or not is_file(source) or not Path(source).is_file():
        return source or ""
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_file(source: str) -> bool:
    """Whether `source` is a file, not the name of published weights."""
    return source.endswith(SUFFIXES) or "/" in source


def fill(network: nn.Module, given: Mapping[str, Tensor], source: str) -> str:
    """Copy `given` tensors into the network; returns a description of which ones.

    The output layer keeps its random weights if `given` lacks it or has another number of classes. So do adapters that
    `given` lacks. All other tensors must match by name and shape, and `given` must have no further ones.

    Raises
    ------
    ConfigError : naming the tensors that do not match.
    """
    own = _tensors(network.state_dict())
    given = _tensors(given)
    parts = common_parts(network, own)
    head = parts["output layer"]
    kept = _other_classes(own, given, head)
    if kept:
        given = {name: t for name, t in given.items() if not name.startswith(_layer(head))}
    drawn = [n for n in own if n not in given and n in (*parts["output layer"], *parts["adapters"])]
    if problems := _misfits(own, given, drawn):
        shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
        raise ConfigError(f"The weights of {source} do not fit the network: {shown}.")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)
    said = f"{len(given)} of {len(own)} tensors" if drawn else f"all {len(own)} tensors"
    layers = sorted({name.rpartition(".")[0] for name in drawn if name in head})
    said += f"; {', '.join(layers)} drawn at random{kept}" if layers else ""
    return said + ("; adapters drawn at random" if any(name in parts["adapters"] for name in drawn) else "")


def _tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def _layer(names: list[str]) -> str:
    return names[0].rpartition(".")[0] + "." if names else ""


def _other_classes(own: Mapping[str, Tensor], given: Mapping[str, Tensor], head: list[str]) -> str:
    """`` (1000 classes there, 10 here)``; empty if the output layers match."""
    for name in head:
        if name in given and given[name].shape != own[name].shape and given[name].shape[1:] == own[name].shape[1:]:
            return f" ({len(given[name])} classes there, {len(own[name])} here)"
    return ""


def _misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor], drawn: list[str]) -> list[str]:
    shapes = [
        f"{name} has shape {tuple(given[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    missing = [f"{name} is not in them" for name in own if name not in given and name not in drawn]
    strange = [f"the network has no {name}" for name in given if name not in own]
    return shapes + missing + strange


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
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"The weights file {path} is not a state dict: it must contain only tensors, by name.")
    return state
