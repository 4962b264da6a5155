"""Low-rank adaptation (LoRA, Hu et al. 2022) of dense layers, which are adapters of any network."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from raypfl.common.errors import ConfigError
from raypfl.models.layout import VectorLayout
from raypfl.models.low_rank import LowRank
from raypfl.models.parts import layers_with_parameters

TRAINED = "adapters, output layer"
"""The parts that clients train unless the settings name others."""


def with_lora(factory: Callable[[], nn.Module], rank: int) -> nn.Module:
    """Build a network with adapters of this rank in all its dense layers but the output layer.

    A layer that the network has in several places gets one adapter. Layers whose weights torch reads without calling
    them get none: those in ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``.

    Raises
    ------
    ConfigError : if there is no such layer.
    """
    network = factory()
    output_layer = network.get_submodule(layers_with_parameters(network)[-1])
    paths_of_layer: dict[nn.Linear, list[str]] = {}
    unadapted: set[nn.Module] = {network, output_layer}
    for path, layer in network.named_modules(remove_duplicate=False):
        # Exactly nn.Linear: nn.MultiheadAttention has a subclass of it.
        if type(layer) is nn.Linear:
            paths_of_layer.setdefault(layer, []).append(path)
        elif isinstance(layer, nn.TransformerEncoderLayer):
            unadapted.update(layer.children())

    paths_to_adapt = {layer: paths for layer, paths in paths_of_layer.items() if layer not in unadapted}
    if not paths_to_adapt:
        raise ConfigError(
            f"model.lora is {rank}, but {type(network).__name__} has no nn.Linear besides its output layer to adapt."
        )
    for layer, paths in paths_to_adapt.items():
        adapted = LowRank(layer, rank)
        for path in paths:
            network.set_submodule(path, adapted)
    return network


def factor_pairs(model: VectorLayout) -> list[tuple[str, str]]:
    """Return the names of A ``[r, inputs]`` and B ``[outputs, r]`` of each adapter of which neither is frozen."""
    pairs = zip(model.common_parts["lora A"], model.common_parts["lora B"], strict=True)
    return [(a, b) for a, b in pairs if a in model.segments and b in model.segments]
