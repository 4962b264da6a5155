"""The federated two-layer network of FL-NTK in plain torch, to test the theory and the engine against."""

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
        at = positive(self.u, self.x)
        return gram(self.x, self.x, at, at)


def sphere(n: int, d: int, seed: int = 0) -> Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)


def problem(n: int = 20, d: int = 10, m: int = 2048, sigma: float = 1.0, seed: int = 0, paired: bool = False):
    x, g = sphere(n, d, seed), torch.Generator().manual_seed(seed + 1)
    beta = torch.randn(d, generator=g, dtype=torch.float64)
    half = m // 2 if paired else m
    u = sigma * torch.randn(half, d, generator=g, dtype=torch.float64)
    a = torch.randint(0, 2, (half,), generator=g).double() * 2 - 1
    if paired:
        u, a = torch.cat([u, u]), torch.cat([a, -a])
    return Problem(x, torch.tanh(3 * x @ beta / beta.norm()), TwoLayer(a), u)


def split(n: int, clients: int, by: Tensor | None = None) -> list[Tensor]:
    """`clients` parts of n samples, random or in the order of a label."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5)) if by is None else by.argsort(stable=True)
    return list(torch.tensor_split(order, clients))


def gradient(p: Problem, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
    pre = x @ u.T
    error = torch.relu(pre) @ p.network.signs / math.sqrt(len(u)) - y
    return (p.network.signs[:, None] * (error[:, None] * (pre >= 0)).T @ x) / math.sqrt(len(u))


def fl_round(
    p: Problem, u: Tensor, parts: Sequence[Tensor], steps: int, rate: float, server_rate: float = 1.0
) -> tuple[Round, list[list[Tensor]]]:
    """One round of FedAvg, and every client's models before each step and after the last one."""
    snapshots, moved = [], torch.zeros_like(u)
    where = torch.zeros(steps, *p.x[:, :1].shape[:1], len(u), dtype=torch.bool)
    local = torch.zeros(steps, len(p.y), dtype=u.dtype)
    for part in parts:
        w, seen = u.clone(), []
        for k in range(steps):
            seen.append(w)
            where[k, part], local[k, part] = positive(w, p.x[part]), p.network.outputs(w, p.x[part])
            w = w - rate * gradient(p, w, p.x[part], p.y[part])
        snapshots.append([*seen, w])
        moved += (w - u) / len(parts)
    scale = torch.full((len(p.y),), server_rate * rate / len(parts), dtype=u.dtype)
    return Round(p.network, p.x, p.y, u, u + server_rate * moved, list(where), local, scale), snapshots


def simulate(p: Problem, parts: Sequence[Tensor], steps: int, rate: float, rounds: int, server_rate: float = 1.0):
    """Errors ``y(t) - y`` before every round and after the last one ``[T+1, n]``, and the last weights."""
    u, errors = p.u, []
    for _ in range(rounds):
        errors.append(p.network.outputs(u, p.x) - p.y)
        u = fl_round(p, u, parts, steps, rate, server_rate)[0].after
    return torch.stack([*errors, p.network.outputs(u, p.x) - p.y]), u
