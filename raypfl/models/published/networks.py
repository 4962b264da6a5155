"""Networks of torchvision and timm by their names there: ``torchvision:NAME`` and ``timm:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raypfl.common.errors import ConfigError
from raypfl.models.networks import MODELS, image_shape
from raypfl.models.published.library import import_library, require_known


@MODELS.register("torchvision:NAME")
def torchvision_network(member: str) -> Callable[..., nn.Module]:
    """Any classification network of torchvision, such as torchvision:efficientnet_b0, and its options."""
    models = import_library("torchvision.models", f"model is 'torchvision:{member}'")
    require_known(f"torchvision has no network {member!r}", member, models.list_models(module=models))

    def network(input_shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
        channels, *_ = image_shape(member, input_shape)
        if channels != 3:
            raise ConfigError(
                f"torchvision's networks take 3 channels, but images here have {channels}: use timm:NAME."
            )
        return models.get_model(member, weights=None, num_classes=num_classes, **options)

    return network


@MODELS.register("timm:NAME")
def timm_network(member: str) -> Callable[..., nn.Module]:
    """Any network of timm, such as timm:vit_tiny_patch16_224, and the options of timm.create_model."""
    timm = import_library("timm", f"model is 'timm:{member}'", "timm")
    require_known(f"timm has no network {member!r}", member, timm.list_models())

    def network(input_shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
        channels, *_ = image_shape(member, input_shape)
        return timm.create_model(member, in_chans=channels, num_classes=num_classes, **options)

    return network
