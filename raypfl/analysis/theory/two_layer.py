"""One round of federated averaging on a two-layer ReLU network, and what it does to predictions, exactly (FL-NTK)."""

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
        """``[n]``, for inputs ``x[n, d]``."""
        return torch.relu(x @ u.T) @ self.signs / math.sqrt(len(self.signs))

    @staticmethod
    def stable(u: Tensor, x: Tensor, radius: float) -> Tensor:
        """``bool[n, m]``: neurons that no weights within `radius` of u switch on or off, for inputs of length 1."""
        return (x @ u.T).abs() > radius


@dataclass(frozen=True)
class Terms:
    """What one round adds to the squared error: C1 to C4 of the paper's proof (Section 6.1)."""

    descent: float
    unstable_kernel: float
    unstable_output: float
    second_order: float

    @property
    def total(self) -> float:
        return self.descent + self.unstable_kernel + self.unstable_output + self.second_order


@dataclass(frozen=True)
class Round:
    """A round, with what every client computed before each of its K local steps.

    Samples are in one order for all clients. Column j of a kernel belongs to the client that holds sample j.

    Attributes
    ----------
    x, y : ``[n, d]`` and ``[n]``.
    before, after : the server's weights ``[m, d]``.
    active : for each local step, ``bool[n, m]``: which neurons are active on a sample, in the model of its client.
    local : ``[K, n]``: prediction for a sample, by the model of its client.
    scale : ``[n]``: the server's rate times the client's weight times the client's rate on the sum of its losses.
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
        """H(t, k), ``[n, n]``: rows of the server's model, columns of the clients' models after k steps."""
        return gram(self.x, self.x, positive(self.before, self.x), self.active[k])

    def change(self, secant: bool = True) -> Tensor:
        """``[n]``: how the round moves the server's predictions, as the clients' kernels times their errors.

        Parameters
        ----------
        secant : use the slope of each neuron between both models of the server, which is exact; else its slope before
            the round, as H(t, k) does, which is exact if no neuron of the server switches.
        """
        return self._times(self._slopes if secant else positive(self.before, self.x))

    def terms(self, stable: Tensor | None = None) -> Terms:
        """The four terms, which add up to the change of the squared error.

        Parameters
        ----------
        stable : ``bool[n, m]``, neurons that switch in no model of the round; None: those that are the same before and
            after it in the server's model.
        """
        first, last = self.x @ self.before.T, self.x @ self.after.T
        changing = (first >= 0) != (last >= 0) if stable is None else ~stable
        whole, unstable = self._times(first >= 0), self._times((first >= 0) & changing)
        jumps = ((torch.relu(last) - torch.relu(first)) * changing) @ self.network.signs / math.sqrt(len(self.before))
        moved = self.network.outputs(self.after, self.x) - self.network.outputs(self.before, self.x)
        e = self.error
        return Terms(-2 * float(e @ whole), 2 * float(e @ unstable), -2 * float(e @ jumps), float(moved.square().sum()))

    @property
    def effective_eigenvalue(self) -> float:
        """lambda_eff: with H(t, k) = lambda_eff I and no drift, the error would descend as it does to first order."""
        e = self.error
        steps = len(self.local) * float(self.scale.mean())
        return float(e @ self._times(positive(self.before, self.x))) / (steps * float(e.square().sum()))

    @property
    def switched(self) -> float:
        """Share of neurons, over all samples, that switch on or off in the server's model."""
        return float((positive(self.before, self.x) != positive(self.after, self.x)).double().mean())

    @cached_property
    def _pull(self) -> Tensor:
        """``[m, d]``: the clients' gradients, weighted by their errors; without the network's signs."""
        errors = (self.y - self.local) * self.scale
        return sum(((a * e[:, None]).T @ self.x for a, e in zip(self.active, errors, strict=True)), self.before * 0)

    def _times(self, slopes: Tensor) -> Tensor:
        """The kernels with rows of these slopes, times the clients' errors, without a matrix ``[n, n]``."""
        return ((self.x @ self._pull.T) * slopes).sum(1) / len(self.before)

    @property
    def _slopes(self) -> Tensor:
        first, last = self.x @ self.before.T, self.x @ self.after.T
        moved = last - first
        slope = (torch.relu(last) - torch.relu(first)) / torch.where(moved == 0, 1.0, moved)
        return torch.where(moved == 0, (first >= 0).to(slope.dtype), slope)
