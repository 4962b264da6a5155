"""The names under which an experiment asks for networks."""

from __future__ import annotations

from raypfl.common.errors import ConfigError
from raypfl.common.registry import Registry

MODELS = Registry("model")
"""Each entry is called as ``entry(input_shape=(C, H, W), num_classes=n, **options)`` and returns an ``nn.Module``
with n outputs; `input_shape` is that of a sample, such as ``(features,)``."""


def image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width), for networks of images alone.

    Raises
    ------
    ConfigError : if samples are no images.
    """
    if len(input_shape) != 3:
        raise ConfigError(f"The {name} model takes images, but samples here are {list(input_shape)}; use mlp.")
    channels, height, width = input_shape
    return channels, height, width
