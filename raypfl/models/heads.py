"""Output layers that methods put in place of a network's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.models.flat import FlatModel


class PrototypeHead(nn.Module):
    """``scale * f @ weight.T`` with ``f = z / max(||z||, 1e-12)`` for features ``z[b, d]`` (Dai et al. 2023).

    Parameters
    ----------
    weight : ``[C, d]``, one prototype in each row.
    scale : factor of the cosines before the softmax.
    trainable : whether the scale is a parameter.
    normalise : whether features are scaled to length one; otherwise ``f = z``.
    """

    scale: Tensor

    def __init__(self, weight: Tensor, scale: float, trainable: bool, normalise: bool):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        if trainable:
            self.scale = nn.Parameter(torch.tensor(scale))
        else:
            self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.normalise = normalise

    def directions(self, z: Tensor) -> Tensor:
        """Return ``f[b, d]``, the features that prototypes are compared with."""
        return F.normalize(z, dim=-1, eps=1e-12) if self.normalise else z

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(self.directions(z), self.weight)


class TwoHeads(nn.Module):
    """The sum of the logits of a generic and a personal head."""

    def __init__(self, generic: nn.Linear, personal: nn.Module):
        super().__init__()
        self.generic = generic
        self.personal = personal

    def forward(self, z: Tensor) -> Tensor:
        return self.generic(z) + self.personal(z)


class GeneratedHead(nn.Module):
    """``z @ H(prior).T``: a small network H generates the head from a client's class shares.

    For a zero prior, the outputs are zeros. The prior is a parameter, and so part of a client's model, but training
    must leave it out.

    Parameters
    ----------
    inputs, classes : the numbers d of features and C of classes; H has C * d outputs.
    hidden : the number of units in H's only hidden layer.
    """

    def __init__(self, inputs: int, classes: int, hidden: int):
        super().__init__()
        self.prior = nn.Parameter(torch.zeros(classes))
        self.generator = nn.Sequential(
            nn.Linear(classes, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes * inputs),
            nn.Unflatten(-1, (classes, inputs)),
        )

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.generator(self.prior)) * (self.prior.sum() > 0)


def zero_head(like: nn.Linear) -> nn.Linear:
    """Return a dense layer of the same shape with all parameters zero."""
    head = nn.Linear(like.in_features, like.out_features, bias=like.bias is not None)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def output_segments(model: FlatModel, *names: str) -> str:
    """Return the pattern of the output layer's own tensors of these names, such as ``weight``."""
    path, _, _ = model.common_parts["output layer"][0].rpartition(".")
    return ",".join(f"{path}.{name}" for name in names if f"{path}.{name}" in model.segments)


def output_layer(network: nn.Module) -> tuple[str, nn.Linear]:
    """Return the name and the module of the network's last layer.

    Raises
    ------
    ConfigError : if the last layer with parameters is not an ``nn.Linear``, or is the network itself.
    """
    last_name = ""
    last_layer = network
    for name, module in network.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters:
            last_name = name
            last_layer = module

    if not last_name or not isinstance(last_layer, nn.Linear):
        description = last_name or "the network itself"
        raise ConfigError(
            f"This method replaces the network's output layer, but its last layer, {description}, is "
            f"a {type(last_layer).__name__}; register an nn.Linear last."
        )
    return last_name, last_layer


def with_output_layer(network: nn.Module, layer: nn.Module) -> nn.Module:
    """Put `layer` in place of the network's output layer, under the same name; return the network."""
    name, _ = output_layer(network)
    network.set_submodule(name, layer)
    return network


class ShiftedLinear(nn.Linear):
    """``W (z + shift) + bias``, with a buffer for a mean of z that a loss keeps; both start at zeros.

    Parameters
    ----------
    like : the output layer, whose weights it copies.
    """

    mean: Tensor

    def __init__(self, like: nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.load_state_dict(like.state_dict())
        self.shift = nn.Parameter(torch.zeros(like.in_features))
        self.register_buffer("mean", torch.zeros(like.in_features))

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z + self.shift)
