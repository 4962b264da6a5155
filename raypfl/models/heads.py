"""What a network computes before its output layer, and output layers other than a dense one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.errors import ConfigError


class PrototypeHead(nn.Module):
    """``scale * f @ weight.T`` with ``f = z / max(||z||, 1e-12)`` of the features ``z[b, d]`` (Dai et al. 2023).

    Parameters
    ----------
    weight : ``[C, d]``, a prototype a row.
    scale : what cosines are multiplied by before the softmax.
    trainable : whether the scale is a parameter.
    normalise : whether features are brought to length one; otherwise ``f = z``.
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
        """``f[b, d]``."""
        return F.normalize(z, dim=-1, eps=1e-12) if self.normalise else z

    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(self.directions(z), self.weight)


class TwoHeads(nn.Module):
    """The sum of the logits of two heads; the second one, ``personal``, gives zeros at first."""

    def __init__(self, generic: nn.Linear, personal: nn.Module):
        super().__init__()
        self.generic = generic
        self.personal = personal

    def forward(self, z: Tensor) -> Tensor:
        return self.generic(z) + self.personal(z)


class GeneratedHead(nn.Module):
    """``z @ H(prior).T``: a head that a small network makes of a client's class shares; zeros for a prior of zeros.

    The prior is a parameter, so that it is a part of a client's model; whoever trains the model must leave it out.

    Parameters
    ----------
    inputs, classes : d and C; H gives C * d numbers.
    hidden : units of the one hidden layer of H.
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
    """A dense layer of the same shape whose parameters are zeros."""
    head = nn.Linear(like.in_features, like.out_features, bias=like.bias is not None)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def output_layer(network: nn.Module) -> tuple[str, nn.Linear]:
    """Name and module of the network's last dense layer.

    Raises
    ------
    ConfigError : if there is none with a name, or another layer that learns comes after it.
    """
    layers = [(n, m) for n, m in network.named_modules() if any(True for _ in m.parameters(recurse=False))]
    name, last = layers[-1] if layers else ("", network)
    if not name or not isinstance(last, nn.Linear):
        raise ConfigError(
            f"This method replaces the network's output layer, but its last layer, {name or 'the network itself'}, is "
            f"a {type(last).__name__}; register an nn.Linear last."
        )
    return name, last


def with_output_layer(network: nn.Module, layer: nn.Module) -> nn.Module:
    """The network, its output layer exchanged for another one of the same name."""
    network.set_submodule(output_layer(network)[0], layer)
    return network
