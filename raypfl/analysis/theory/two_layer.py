"""A round of federated averaging on a two-layer ReLU network, and its exact effect on predictions (FL-NTK)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from raypfl.analysis.theory.kernels import gram, positive


@dataclass(frozen=True)
class TwoLayer:
    """``f(u, x) = a . relu(u x) / sqrt(m)``, with fixed `signs` ``a[m]`` and weights ``u[m, d]``."""

    signs: Tensor

    def outputs(self, u: Tensor, x: Tensor) -> Tensor:
        """Return the outputs ``[n]`` for inputs ``x[n, d]``."""
        return torch.relu(x @ u.T) @ self.signs / math.sqrt(len(self.signs))


@dataclass(frozen=True)
class Terms:
    """The terms that one round adds to the squared error: C1 to C4 of the paper's proof (Section 6.1)."""

    descent: float
    unstable_kernel: float
    unstable_output: float
    second_order: float


@dataclass(frozen=True)
class Round:
    """A round, with every client's activations and predictions before each of its K local steps.

    Samples are in one order for all clients. Column j of a kernel belongs to the client that holds sample j.

    Attributes
    ----------
    x, y : ``[n, d]`` and ``[n]``.
    before, after : the server's weights ``[m, d]``.
    active : for each local step, ``bool[n, m]``: the neurons that are active on a sample, in the model of its client.
    local : ``[K, n]``, the prediction for a sample by the model of its client.
    scale : ``[n]``, the server's rate times the client's weight times the client's rate on the sum of its losses.
    """

    network: TwoLayer
    x: Tensor
    y: Tensor
    before: Tensor
    after: Tensor
    active: Sequence[Tensor]
    local: Tensor
    scale: Tensor

    @property
    def error(self) -> Tensor:
        """``y - y(t)``, ``[n]``."""
        return self.y - self.network.outputs(self.before, self.x)

    def kernel(self, k: int) -> Tensor:
        """Return H(t, k), ``[n, n]``: rows of the server's model, columns of the clients' models after k steps."""
        return gram(self.x, self.x, positive(self.before, self.x), self.active[k])

    def terms(self) -> Terms:
        """Return the four terms, which add up to the change of the squared error.

        Neurons count as stable on a sample if they do not switch between both models of the server.
        """
        inputs_before = self.x @ self.before.T
        inputs_after = self.x @ self.after.T
        active_before = inputs_before >= 0
        changing = active_before != (inputs_after >= 0)

        all_neurons = self._times(active_before)
        unstable_neurons = self._times(active_before & changing)
        jumps = (torch.relu(inputs_after) - torch.relu(inputs_before)) * changing
        unstable_outputs = jumps @ self.network.signs / math.sqrt(len(self.before))
        moved = self.network.outputs(self.after, self.x) - self.network.outputs(self.before, self.x)

        e = self.error
        return Terms(
            descent=-2 * float(e @ all_neurons),
            unstable_kernel=2 * float(e @ unstable_neurons),
            unstable_output=-2 * float(e @ unstable_outputs),
            second_order=float(moved.square().sum()),
        )

    @property
    def effective_eigenvalue(self) -> float:
        """lambda_eff: with H(t, k) = lambda_eff I and no drift, the error would descend as it does to first order."""
        e = self.error
        rho = len(self.local) * float(self.scale.mean())
        return float(e @ self._times(positive(self.before, self.x))) / (rho * float(e.square().sum()))

    @cached_property
    def _pull(self) -> Tensor:
        """The clients' gradients ``[m, d]``, weighted by their errors; without the network's signs."""
        errors = (self.y - self.local) * self.scale
        total = self.before * 0
        for active, error in zip(self.active, errors, strict=True):
            total = total + (active * error[:, None]).T @ self.x
        return total

    def _times(self, slopes: Tensor) -> Tensor:
        """Return the kernels with rows of these slopes, times the clients' errors, without a matrix ``[n, n]``."""
        return ((self.x @ self._pull.T) * slopes).sum(1) / len(self.before)
