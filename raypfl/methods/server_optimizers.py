"""Optimizers of the server ("Adaptive Federated Optimization", Reddi et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer:
    """An optimizer that steps along ``mean - theta``.

    Attributes
    ----------
    name : ``sgd`` (theta + lr * d; at lr = 1 the average itself, bit for bit), ``momentum`` (Hsu et al. 2019),
        ``adam``, ``yogi``.
    lr : server learning rate, eta.
    beta1, beta2 : decay of the first and of the second moment.
    tau : adaptivity. It is added to the root of the second moment, which starts at tau^2.
    """

    name: Literal["sgd", "momentum", "adam", "yogi"] = "sgd"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, theta: Tensor, mean: Tensor, moments: dict[str, Any], num_parameters: int) -> Tensor:
        """The next model ``[P+B]``. Updates `moments` in place. Batch-norm statistics become the mean's."""
        if self.name == "sgd" and self.lr == 1.0:
            return mean
        old, direction = theta[:num_parameters], (mean - theta)[:num_parameters]
        return torch.cat([old + self.lr * self._direction(direction, moments), mean[num_parameters:]])

    def _direction(self, d: Tensor, moments: dict[str, Any]) -> Tensor:
        if self.name == "sgd":
            return d
        first = moments.get("first", torch.zeros_like(d))
        if self.name == "momentum":
            moments["first"] = self.beta1 * first + d
            return moments["first"]
        second = moments.get("second", torch.full_like(d, self.tau**2))
        moments["first"] = self.beta1 * first + (1 - self.beta1) * d
        if self.name == "adam":
            moments["second"] = self.beta2 * second + (1 - self.beta2) * d.square()
        else:
            moments["second"] = second - (1 - self.beta2) * d.square() * torch.sign(second - d.square())
        return moments["first"] / (moments["second"].sqrt() + self.tau)
