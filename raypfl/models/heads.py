"""Output layers that methods put in place of a network's own."""

from __future__ import annotations

from collections.abc import Mapping

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
    """Return the pattern of the output layer's own tensors of these names, such as ``weight``.

    Raises
    ------
    ConfigError : if all of them are frozen.
    """
    if not model.output_tensors:
        raise ConfigError("This method trains the output layer, which is frozen; leave it out of model.frozen.")
    return ",".join(model.output_tensors[name] for name in names if name in model.output_tensors)


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


class LinearLike(nn.Linear):
    """Base class of output layers that begin with the weights of the network's own, `like`, and are frozen as it is."""

    def __init__(self, like: nn.Linear):
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.load_state_dict(like.state_dict())
        for name, parameter in like.named_parameters():
            self.get_parameter(name).requires_grad_(parameter.requires_grad)


class ShiftedLinear(LinearLike):
    """``W (z + shift) + bias``, with a buffer for a mean of z that a loss keeps; both start at zeros."""

    mean: Tensor

    def __init__(self, like: nn.Linear):
        super().__init__(like)
        self.shift = nn.Parameter(torch.zeros(like.in_features))
        self.register_buffer("mean", torch.zeros(like.in_features))

    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z + self.shift)


class MatchedLinear(LinearLike):
    """An output layer with a matrix ``match[d, d]`` for a method's loss, which begins as the identity (FedKD)."""

    def __init__(self, like: nn.Linear):
        super().__init__(like)
        self.match = nn.Parameter(torch.eye(like.in_features))


class GatedLinear(LinearLike):
    """Two output layers, one on each part of the features: ``W (r * z) + b + W_g ((1 - r) * z) + b_g`` (FedCP).

    A gate of z and a context v gives both parts' scores, ``relu(layer_norm(G (z * v / ||v||) + g))``: ``[b, 2d]``. The
    softmax over both parts gives ``r[b, d]``. In training mode, Gumbel noise is added to the scores.

    Both layers begin with the weights of `like`, and the context with the sum of their rows.
    """

    draws = True

    def __init__(self, like: nn.Linear):
        super().__init__(like)
        size = like.in_features
        self.global_weight = nn.Parameter(self.weight.detach().clone())
        self.global_bias = None if self.bias is None else nn.Parameter(self.bias.detach().clone())

        gate = nn.Linear(size, 2 * size)
        self.gate_weight = gate.weight
        self.gate_bias = gate.bias
        self.norm_weight = nn.Parameter(torch.ones(2 * size))
        self.norm_bias = nn.Parameter(torch.zeros(2 * size))
        self.context = nn.Parameter(self.weight.detach().sum(0))

    def share(self, z: Tensor) -> Tensor:
        """Return r, ``[b, d]``, each between 0 and 1."""
        direction = F.normalize(self.context, dim=0, eps=1e-12)
        hidden = F.linear(z * direction, self.gate_weight, self.gate_bias)
        scores = F.layer_norm(hidden, hidden.shape[-1:], self.norm_weight, self.norm_bias).relu()
        first, second = scores.chunk(2, dim=-1)
        difference = first - second
        if self.training:
            # The difference of two Gumbel draws has the logistic distribution.
            difference = difference + torch.rand_like(difference).logit()
        return difference.sigmoid()

    def forward(self, z: Tensor) -> Tensor:
        share = self.share(z)
        return super().forward(share * z) + F.linear((1 - share) * z, self.global_weight, self.global_bias)


VALVE = tuple(f"{factor}_{name}" for factor in ("gamma", "beta") for name in ("weight", "bias", "scale", "offset"))
"""Names of the parameters of a :class:`ConditionedLinear`'s valve."""


def conditional_valve(z: Tensor, condition: Tensor, valve: Mapping[str, Tensor]) -> Tensor:
    """Return ``relu((1 + gamma(u)) * z + beta(u))`` for features ``z[b, d]`` and a condition ``u[d]`` (GPFL).

    Both functions are ``layer_norm(relu(A u + a))``, with the parameters in `valve`.
    """

    def factor(name: str) -> Tensor:
        hidden = F.linear(condition, valve[f"{name}_weight"], valve[f"{name}_bias"]).relu()
        return F.layer_norm(hidden, hidden.shape[-1:], valve[f"{name}_scale"], valve[f"{name}_offset"])

    return ((1 + factor("gamma")) * z + factor("beta")).relu()


class ConditionedLinear(LinearLike):
    """An output layer on features that passed a valve with the client's condition (GPFL).

    It also has an embedding of each class, ``[C, d]``, which begins with normal draws, for a method's loss. The
    condition begins with zeros.
    """

    def __init__(self, like: nn.Linear):
        super().__init__(like)
        size = like.in_features
        self.condition = nn.Parameter(torch.zeros(size))
        self.embeddings = nn.Parameter(torch.randn(like.out_features, size))
        for name in ("gamma", "beta"):
            layer = nn.Linear(size, size)
            self.register_parameter(f"{name}_weight", nn.Parameter(layer.weight.detach()))
            self.register_parameter(f"{name}_bias", nn.Parameter(layer.bias.detach()))
            self.register_parameter(f"{name}_scale", nn.Parameter(torch.ones(size)))
            self.register_parameter(f"{name}_offset", nn.Parameter(torch.zeros(size)))

    def forward(self, z: Tensor) -> Tensor:
        valve = {name: getattr(self, name) for name in VALVE}
        return super().forward(conditional_valve(z, self.condition, valve))


class SimplexLinear(LinearLike):
    """An output layer whose weights are a mixture ``sum_m a_m W_m`` of endpoints ``[M, C, d]``, with one bias (Floco).

    The endpoints are drawn independently (Xavier normal). The mixture ``[M]`` begins at the centre.
    """

    def __init__(self, like: nn.Linear, endpoints: int):
        super().__init__(like)
        self.mixture = nn.Parameter(torch.full((endpoints,), 1 / endpoints))
        self.weight = nn.Parameter(self.weight.new_empty(endpoints, *self.weight.shape))
        for endpoint in self.weight.detach():
            nn.init.xavier_normal_(endpoint)

    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, torch.tensordot(self.mixture, self.weight, 1), self.bias)
