"""Several architectures with a common output layer, of which each client has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.models.heads import output_layer
from raypfl.models.networks import MODELS, facts_for

NETWORKS = ("mlp", "cnn")
"""The default of :attr:`Heterogeneous.networks`."""


@MODELS.register("heterogeneous")
class Heterogeneous(nn.Module):
    """Several architectures with a common output layer: each client trains one of them, for methods that average none.

    A client's network is ``body``, an architecture up to the inputs of its output layer, and ``head``, the common
    layer, which has the same initial values for all. See docs/own_network.md.

    Parameters
    ----------
    networks : the architectures: a name, or a mapping of name and options, for each.
    feature_dim : number of inputs of the common output layer; None: as many as that of the first network has.
    projection : how features of another number become `feature_dim`: averages over neighbours (``pool``), or a dense
        layer that is trained with the body (``linear``).
    shares : share of the clients that has each network, relative to each other; None: equal shares, so that client k
        has the network ``k mod len(networks)``.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        networks: Sequence[str | dict[str, Any]] = NETWORKS,
        feature_dim: int | None = None,
        projection: Literal["pool", "linear"] = "pool",
        shares: Sequence[float] | None = None,
        num_tokens: int | None = None,
    ):
        super().__init__()
        bodies = []
        heads = []
        for description in networks:
            network = _built(description, input_shape, num_classes, num_tokens)
            name, head = _output_layer(description, network)
            heads.append(head)
            size = feature_dim or heads[0].in_features
            network.set_submodule(name, _projection(projection, head.in_features, size))
            bodies.append(network)
        self.bodies = nn.ModuleList(bodies)
        # With the first network's own output layer, its clients begin as in a run of that network alone.
        self.head = heads[0] if heads[0].in_features == size else nn.Linear(size, num_classes)

    def network(self, number: int) -> nn.Module:
        """Return one of the architectures with the common output layer."""
        return BodyAndHead(self.bodies[number], self.head)

    def common(self) -> nn.Module:
        """Return the common output layer, from features ``[b, feature_dim]`` to outputs."""
        return BodyAndHead(nn.Identity(), self.head)


class BodyAndHead(nn.Module):
    """An output layer on the features that a body computes."""

    def __init__(self, body: nn.Module, head: nn.Module):
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class AverageFeatures(nn.Module):
    """Averages of neighbouring features, ``[..., inputs] -> [..., outputs]``, like ``nn.AdaptiveAvgPool1d``.

    They are a product with a constant matrix, since its gradients are deterministic on a GPU, too.
    """

    matrix: Tensor

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        matrix = torch.zeros(outputs, inputs, dtype=torch.float64)
        for number in range(outputs):
            start = number * inputs // outputs
            stop = -(-(number + 1) * inputs // outputs)
            matrix[number, start:stop] = 1 / (stop - start)
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.matrix)


def architectures_of(options: Mapping[str, Any], num_clients: int) -> np.ndarray:
    """Return the position of each client's architecture, ``int64[num_clients]``, from the options of `Heterogeneous`.

    Each client in turn gets the architecture that lacks most clients to reach its share.
    """
    num_networks = len(options.get("networks", NETWORKS))
    shares = np.array(options.get("shares") or [1.0] * num_networks, dtype=float)
    shares /= shares.sum()
    counts = np.zeros(num_networks)
    network_of_client = np.empty(num_clients, dtype=np.int64)
    for client in range(num_clients):
        network = int(np.argmax(shares * (client + 1) - counts))
        counts[network] += 1
        network_of_client[client] = network
    return network_of_client


def _built(
    description: str | dict[str, Any], input_shape: tuple[int, ...], num_classes: int, num_tokens: int | None
) -> nn.Module:
    options = {"name": description} if isinstance(description, str) else dict(description)
    name = options.pop("name")
    entry = MODELS.get(name)
    network = entry(**facts_for(name, entry, input_shape, num_classes, num_tokens), **options)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model.networks has {description!r}, which makes a {type(network).__name__}, not a network.")
    return network


def _output_layer(description: str | dict[str, Any], network: nn.Module) -> tuple[str, nn.Linear]:
    try:
        return output_layer(network)
    except ConfigError as error:
        raise ConfigError(f"model.networks has {description!r}, which has no dense output layer. {error}") from None


def _projection(kind: str, inputs: int, outputs: int) -> nn.Module:
    if inputs == outputs:
        return nn.Identity()
    return AverageFeatures(inputs, outputs) if kind == "pool" else nn.Linear(inputs, outputs)
