"""Pretrained weights of torchvision's, timm's and the Hugging Face hub's networks, by their names there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.models.published.library import import_library, require_known
from raypfl.models.published.transformers import from_hub, hub_library, without_pooler


def published_weights(name: str, source: str) -> Mapping[str, Tensor]:
    """Return the weights `source` of the network `name`, downloaded unless they were before.

    Raises
    ------
    ConfigError : if the network has no weights of this name, or they cannot be downloaded.
    """
    package, _, member = name.rpartition(":")
    if package == "timm":
        return _from_timm(member, source)
    if package == "transformers":
        return _from_transformers(member, source)
    return _from_torchvision(member, source)


def _from_transformers(name: str, source: str) -> Mapping[str, Tensor]:
    require_known(f"{name} has no weights {source!r}", source, ["pretrained"])
    library = hub_library(f"model.weights is {source!r}")
    model = without_pooler(from_hub(library.AutoModel, name))
    return {f"body.{tensor_name}": tensor for tensor_name, tensor in model.state_dict().items()}


def _from_timm(name: str, source: str) -> Mapping[str, Tensor]:
    timm = import_library("timm", f"model.weights is {source!r}", "timm")
    # timm's names are NETWORK.WEIGHTS.
    available = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{name}.*")]
    require_known(f"timm has no weights {source!r} for {name}", source, available)
    try:
        return timm.create_model(f"{name}.{source}", pretrained=True).state_dict()
    except Exception as error:  # whatever the hub's client raises
        raise ConfigError(
            f"timm's weights {source} for {name} could not be downloaded: {str(error).splitlines()[0]} Set "
            "model.weights to the path of a file, or repeat this with a network."
        ) from error


def _from_torchvision(name: str, source: str) -> Mapping[str, Tensor]:
    models = import_library("torchvision.models", f"model.weights is {source!r}")
    if name not in models.list_models(module=models):
        raise ConfigError(
            f"model.weights is {source!r}, but torchvision has no weights for {name}; name a file instead."
        )

    available = models.get_model_weights(name)
    require_known(f"torchvision has no weights {source!r} for {name}", source, available.__members__)
    weights = available[source]
    try:
        return weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"torchvision's weights {source} for {name} could not be downloaded ({error}). Download {weights.url} to "
            f"{torch.hub.get_dir()}/checkpoints, or set model.weights to the path of a file."
        ) from error
