"""Pretrained weights of torchvision's and timm's networks, by their names there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.models.published.library import library, require


def published_weights(name: str, source: str) -> Mapping[str, Tensor]:
    """The weights `source` of the network `name`, downloaded unless they were before.

    Raises
    ------
    ConfigError : if there are none of this name, or they cannot be downloaded.
    """
    package, _, member = name.rpartition(":")
    return (_from_timm if package == "timm" else _from_torchvision)(member, source)


def _from_timm(name: str, source: str) -> Mapping[str, Tensor]:
    timm = library("timm", f"model.weights is {source!r}", "timm")
    known = [tagged.partition(".")[2] for tagged in timm.list_pretrained(f"{name}.*")]
    require(f"timm has no weights {source!r} for {name}", source, known)
    try:
        return timm.create_model(f"{name}.{source}", pretrained=True).state_dict()
    except Exception as error:  # whatever the hub's client raises
        raise ConfigError(
            f"timm's weights {source} for {name} could not be downloaded: {str(error).splitlines()[0]} Set "
            "model.weights to the path of a file, or repeat this with a network."
        ) from error


def _from_torchvision(name: str, source: str) -> Mapping[str, Tensor]:
    zoo = library("torchvision.models", f"model.weights is {source!r}")
    if name not in zoo.list_models(module=zoo):
        raise ConfigError(
            f"model.weights is {source!r}, but torchvision has no weights for {name}; name a file instead."
        )
    known = zoo.get_model_weights(name)
    require(f"torchvision has no weights {source!r} for {name}", source, known.__members__)
    weights = known[source]
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"torchvision's weights {source} for {name} could not be downloaded ({error}). Download {weights.url} to "
            f"{torch.hub.get_dir()}/checkpoints, or set model.weights to the path of a file."
        ) from error
