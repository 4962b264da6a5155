"""The federated two-layer network of FL-NTK in plain torch, as a reference for the theory and the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raypfl.analysis.theory.kernels import gram, positive
from raypfl.analysis.theory.two_layer import Round, TwoLayer


@dataclass(frozen=True)
class Problem:
    """Inputs on the sphere ``[n, d]``, targets ``[n]``, a network and its initial weights ``[m, d]``."""

    x: Tensor
    y: Tensor
    network: TwoLayer
    u: Tensor

    @property
    def h0(self) -> Tensor:
        active = positive(self.u, self.x)
        return gram(self.x, self.x, active, active)


def sphere(n: int, d: int, seed: int = 0) -> Tensor:
    """Return random points on the unit sphere ``[n, d]``."""
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)


def problem(n: int = 20, d: int = 10, m: int = 2048, sigma: float = 1.0, seed: int = 0, paired: bool = False):
    """Draw a problem; `paired` neurons have the same weights and opposite signs, so the first outputs are 0."""
    x = sphere(n, d, seed)
    g = torch.Generator().manual_seed(seed + 1)
    beta = torch.randn(d, generator=g, dtype=torch.float64)

    drawn_neurons = m // 2 if paired else m
    u = sigma * torch.randn(drawn_neurons, d, generator=g, dtype=torch.float64)
    a = torch.randint(0, 2, (drawn_neurons,), generator=g).double() * 2 - 1
    if paired:
        u = torch.cat([u, u])
        a = torch.cat([a, -a])

    y = torch.tanh(3 * x @ beta / beta.norm())
    return Problem(x, y, TwoLayer(a), u)


def split(n: int, clients: int, by: Tensor | None = None) -> list[Tensor]:
    """Divide n samples into `clients` parts, at random or in the order of a label."""
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(5))
    order = shuffled if by is None else by.argsort(stable=True)
    return list(torch.tensor_split(order, clients))


def gradient(p: Problem, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of half the summed squared error in the weights, by its formula."""
    preactivation = x @ u.T
    error = torch.relu(preactivation) @ p.network.signs / math.sqrt(len(u)) - y
    return (p.network.signs[:, None] * (error[:, None] * (preactivation >= 0)).T @ x) / math.sqrt(len(u))


def fl_round(
    p: Problem, u: Tensor, parts: Sequence[Tensor], steps: int, rate: float, server_rate: float = 1.0
) -> tuple[Round, list[list[Tensor]]]:
    """Run a round of FedAvg; returns it, and every client's models before each step and after the last one."""
    snapshots = []
    mean_update = torch.zeros_like(u)
    active = torch.zeros(steps, len(p.x), len(u), dtype=torch.bool)
    outputs = torch.zeros(steps, len(p.y), dtype=u.dtype)

    for part in parts:
        w = u.clone()
        models = []
        for k in range(steps):
            models.append(w)
            active[k, part] = positive(w, p.x[part])
            outputs[k, part] = p.network.outputs(w, p.x[part])
            w = w - rate * gradient(p, w, p.x[part], p.y[part])
        snapshots.append([*models, w])
        mean_update += (w - u) / len(parts)

    scale = torch.full((len(p.y),), server_rate * rate / len(parts), dtype=u.dtype)
    after = u + server_rate * mean_update
    return Round(p.network, p.x, p.y, u, after, list(active), outputs, scale), snapshots


def simulate(p: Problem, parts: Sequence[Tensor], steps: int, rate: float, rounds: int, server_rate: float = 1.0):
    """Run rounds of FedAvg; returns the errors ``y(t) - y`` before every round and after the last one ``[T+1, n]``,
    and the last weights."""
    u = p.u
    errors = []
    for _ in range(rounds):
        errors.append(p.network.outputs(u, p.x) - p.y)
        u = fl_round(p, u, parts, steps, rate, server_rate)[0].after
    errors.append(p.network.outputs(u, p.x) - p.y)
    return torch.stack(errors), u
