"""Weights to begin with: torchvision's pretrained ones, by name, or those of a file."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.models.roles import roles

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Pretrained:
    """A factory of networks that begin with given weights.

    A network that it makes says in its attribute ``origin`` which those are.

    Parameters
    ----------
    factory : makes the network.
    name : of the model, under which torchvision may have weights for it.
    source : a file (safetensors, or a state dict of ``torch.save``), or the name of torchvision's weights.

    Raises
    ------
    ConfigError : when called, if there are no such weights, they cannot be had, or they do not fit the network.
    """

    factory: Callable[[], nn.Module]
    name: str
    source: str

    def __call__(self) -> nn.Module:
        network = self.factory()
        given = _read(Path(self.source)) if is_file(self.source) else _from_torchvision(self.name, self.source)
        network.origin = f"weights from {self.source}, {fill(network, given, self.source)}"  # type: ignore[assignment]
        return network


def origin(network: nn.Module) -> str:
    """Where the initial weights of a network come from, in a few words."""
    return str(getattr(network, "origin", "random weights"))


def digest(source: str | None) -> str:
    """What a run that begins with these weights must find again: the SHA-256 of a file, the name of torchvision's."""
    if source is None or not is_file(source) or not Path(source).is_file():
        return source or ""
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_file(source: str) -> bool:
    """Whether `source` means a file rather than the name of torchvision's weights."""
    return source.endswith(SUFFIXES) or "/" in source


def fill(network: nn.Module, given: Mapping[str, Tensor], source: str) -> str:
    """Copy `given` tensors into the network, and say which were.

    The output layer stays as it was drawn if it is for another number of classes, or is not given; so do adapters that
    are not given. Everything else must be there, in the same shape, and nothing else.

    Raises
    ------
    ConfigError : naming the tensors that do not fit.
    """
    own = _tensors(network.state_dict())
    given = _tensors(given)
    parts = roles(network, own)
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
    """`` (1000 classes there, 10 here)``, or nothing if the output layers agree."""
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
            f"The weights file {path} holds more than tensors, or is damaged, so it is not loaded: it could run code. "
            "Save a network's state_dict() alone, with torch.save or as safetensors."
        ) from None
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        raise ConfigError(f"The weights file {path} cannot be read: {str(error).splitlines()[0]}") from error
    state = state.get("state_dict", state) if isinstance(state, dict) else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"The weights file {path} is no state dict: it must hold tensors by name, and nothing else.")
    return state


def _from_torchvision(name: str, source: str) -> Mapping[str, Tensor]:
    try:
        import torchvision.models as zoo
    except ImportError:
        raise ConfigError(f"model.weights is {source!r}: such weights need torchvision; name a file instead.") from None
    if name not in zoo.list_models(module=zoo):
        raise ConfigError(
            f"model.weights is {source!r}, but torchvision has no weights for {name}; name a file instead."
        )
    known: Any = zoo.get_model_weights(name)
    if source not in known.__members__:
        raise ConfigError(
            f"torchvision has no weights {source!r} for {name}; {did_you_mean(source, known.__members__)} "
            f"A file's name ends in {', '.join(SUFFIXES)}."
        )
    weights = known[source]
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"torchvision's weights {source} for {name} cannot be had ({error}). Put {weights.url} into "
            f"{torch.hub.get_dir()}/checkpoints, or give the path of a file that you have as model.weights."
        ) from error
