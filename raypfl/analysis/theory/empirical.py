"""The neural tangent kernel of any network: exact, block by block; sketched; or as a product with vectors.

Rows and columns of a kernel may be of models of their own, as in a round of federated learning, where rows are the
server's and columns the clients'.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, vmap
from torch.autograd import forward_ad
from torch.nn import functional as F

from raypfl.common import rng

ROOM = 2**25
"""Numbers in the Jacobians that are in memory at a time, of one sample on each side at least."""


class Side(NamedTuple):
    """A network ``f(p[P], x[b, ...]) -> [b, C]`` in evaluation mode, its parameters ``[P]`` and inputs ``[n, ...]``."""

    network: Callable[[Tensor, Tensor], Tensor]
    parameters: Tensor
    x: Tensor

    def part(self, start: int, stop: int) -> Side:
        """The same on some of the inputs."""
        return self._replace(x=self.x[start:stop])


def jacobian(side: Side) -> Tensor:
    """Gradients of all outputs for each sample, ``[n, C, P]``.

    Takes one backward pass for each output: every sample has a copy of the parameters, so that gradients do not add up.
    """
    rows = side.parameters.detach().expand(len(side.x), -1).clone().requires_grad_()
    with torch.enable_grad():
        outputs = vmap(lambda p, x: side.network(p, x[None])[0])(rows, side.x)
        count = outputs.shape[1]
        found = [torch.autograd.grad(outputs[:, c].sum(), rows, retain_graph=c + 1 < count)[0] for c in range(count)]
    return torch.stack(found, 1)


def kernel(rows: Side, columns: Side, outputs: int, room: int = ROOM) -> Tensor:
    """The kernel of two models, ``float64[n C, q C]``.

    Parameters
    ----------
    outputs : C.
    room : numbers that Jacobians may take; the result is the same up to rounding.
    """
    each = max(1, room // (2 * outputs * len(rows.parameters)))
    found = torch.empty(len(rows.x) * outputs, len(columns.x) * outputs, dtype=torch.float64)
    for j in range(0, len(columns.x), each):
        right = jacobian(columns.part(j, j + each)).flatten(0, 1)
        for i in range(0, len(rows.x), each):
            block = (jacobian(rows.part(i, i + each)).flatten(0, 1) @ right.T).cpu()
            high, wide = block.shape
            found[i * outputs : i * outputs + high, j * outputs : j * outputs + wide] = block
    return found


def sketch(side: Side, outputs: int, size: int, seed: int = 0, room: int = ROOM) -> Tensor:
    """Gradients as `size` numbers each, ``float64[n C, size]``: two models' products have the kernel as their mean.

    The P entries of a gradient are dealt at random into `size` sums, with random signs, the same in every process (a
    count sketch, Charikar et al. 2002). An entry of the product errs by about ``|J(x_i)| |J(x_j)| / sqrt(size)``, and
    by nothing if `size` is P or more. A sample's Jacobian is computed once, however many samples it is multiplied with.

    Parameters
    ----------
    outputs, room : as of :func:`kernel`.
    """
    count = len(side.parameters)
    draws, length = rng.generator(seed, "sketch", size), -(-count // size)
    order = torch.from_numpy(draws.permutation(count)).to(side.parameters.device)
    signs = torch.from_numpy(draws.integers(2, size=count) * 2 - 1).to(side.parameters)
    each, found = max(1, room // (2 * outputs * count)), []
    for start in range(0, len(side.x), each):
        rows = jacobian(side.part(start, start + each)).flatten(0, 1)[:, order] * signs
        dealt = F.pad(rows, (0, length * size - count)).unflatten(1, (length, size))
        found.append(dealt.sum(1, dtype=torch.float64).cpu())
    return torch.cat(found)


def pull_back(side: Side, cotangent: Tensor) -> Tensor:
    """``J^T v``, ``[P]``, for ``v[n, C]``."""
    p = side.parameters.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(side.network(p, side.x), p, cotangent)[0]


def push_forward(side: Side, direction: Tensor) -> Tensor:
    """``J d``, ``[n, C]``: how outputs change along a direction ``d[P]``, to first order."""
    with forward_ad.dual_level(), torch.no_grad():
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what PyTorch itself calls
            parameters = forward_ad.make_dual(side.parameters.detach(), direction)
        return forward_ad.unpack_dual(side.network(parameters, side.x)).tangent


def product(rows: Side, columns: Sequence[tuple[Side, Tensor]]) -> Tensor:
    """The kernel times a vector, ``[n, C]``, without the kernel.

    Parameters
    ----------
    columns : of each client, its side and its part of the vector, ``[q, C]``.
    """
    return push_forward(rows, torch.stack([pull_back(side, part) for side, part in columns]).sum(0))


def extremes(side: Side, outputs: int) -> tuple[float, float]:
    """The least and the largest eigenvalue of a model's kernel, by Lanczos' method, without the kernel.

    Where the kernel is ill-conditioned, the least one is a rough number: take that of :func:`kernel` on fewer samples.
    """
    from scipy.sparse.linalg import LinearOperator, eigsh  # slow to import

    size = len(side.x) * outputs

    def multiply(vector: np.ndarray) -> np.ndarray:
        part = torch.from_numpy(np.array(vector)).to(side.parameters).view(-1, outputs)
        return product(side, [(side, part)]).flatten().double().cpu().numpy()

    operator = LinearOperator((size, size), matvec=multiply, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(size)
    low, high = eigsh(operator, k=2, which="BE", v0=start, return_eigenvectors=False)
    return float(low), float(high)
