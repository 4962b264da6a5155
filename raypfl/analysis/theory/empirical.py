"""The neural tangent kernel of any network: exact, block by block; sketched; or as a product with vectors.

Rows and columns of a kernel may belong to different models, as in a round of federated learning: rows to the server's,
columns to the clients'.
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

JACOBIAN_NUMBERS = 2**25
"""Most numbers in the Jacobians that are in memory at a time; each side has at least one sample's."""


class Side(NamedTuple):
    """The rows or the columns of a kernel.

    Attributes
    ----------
    network : ``f(p[P], x[b, ...]) -> [b, C]``, in evaluation mode.
    parameters : the network's parameters ``[P]``.
    x : inputs ``[n, ...]``.
    """

    network: Callable[[Tensor, Tensor], Tensor]
    parameters: Tensor
    x: Tensor

    def part(self, start: int, stop: int) -> Side:
        """Return this side with some of its inputs only."""
        return self._replace(x=self.x[start:stop])


def jacobian(side: Side) -> Tensor:
    """Return the gradients of all outputs for each sample, ``[n, C, P]``.

    It takes one backward pass for each output. Every sample has a copy of the parameters, so that gradients do not add
    up.
    """
    rows = side.parameters.detach().expand(len(side.x), -1).clone().requires_grad_()
    with torch.enable_grad():
        outputs = vmap(lambda p, x: side.network(p, x[None])[0])(rows, side.x)
        num_outputs = outputs.shape[1]
        gradients = []
        for c in range(num_outputs):
            (gradient,) = torch.autograd.grad(outputs[:, c].sum(), rows, retain_graph=c + 1 < num_outputs)
            gradients.append(gradient)
    return torch.stack(gradients, 1)


def kernel(rows: Side, columns: Side, outputs: int, max_numbers: int = JACOBIAN_NUMBERS) -> Tensor:
    """Return the kernel of two models, ``float64[n C, q C]``.

    Parameters
    ----------
    outputs : C, the number of outputs.
    max_numbers : most numbers of the Jacobians in memory; the result is the same up to rounding.
    """
    samples = max(1, max_numbers // (2 * outputs * len(rows.parameters)))
    result = torch.empty(len(rows.x) * outputs, len(columns.x) * outputs, dtype=torch.float64)
    for j in range(0, len(columns.x), samples):
        right = jacobian(columns.part(j, j + samples)).flatten(0, 1)
        for i in range(0, len(rows.x), samples):
            left = jacobian(rows.part(i, i + samples)).flatten(0, 1)
            block = (left @ right.T).cpu()

            top = i * outputs
            first_column = j * outputs
            height, width = block.shape
            result[top : top + height, first_column : first_column + width] = block
    return result


def sketch(side: Side, outputs: int, size: int, seed: int = 0, max_numbers: int = JACOBIAN_NUMBERS) -> Tensor:
    """Sketch each gradient as `size` numbers, ``float64[n C, size]``.

    The product of two models' sketches is the kernel in expectation. The P entries of a gradient are dealt at random
    into `size` sums, with random signs, the same in every process (a count sketch, Charikar et al. 2002). An entry of
    the product errs by about ``|J(x_i)| |J(x_j)| / sqrt(size)``, and is exact if `size` is P or more. A sample's
    Jacobian is computed once, however many samples it is multiplied with.

    Parameters
    ----------
    outputs, max_numbers : as in :func:`kernel`.
    """
    num_parameters = len(side.parameters)
    generator = rng.generator(seed, "sketch", size)
    order = torch.from_numpy(generator.permutation(num_parameters)).to(side.parameters.device)
    signs = torch.from_numpy(generator.integers(2, size=num_parameters) * 2 - 1).to(side.parameters)

    # Entry i of a shuffled gradient belongs to sum i % size; zeros fill the last row up.
    length = -(-num_parameters // size)
    padding = length * size - num_parameters
    samples = max(1, max_numbers // (2 * outputs * num_parameters))
    sketches = []
    for start in range(0, len(side.x), samples):
        rows = jacobian(side.part(start, start + samples)).flatten(0, 1)[:, order] * signs
        dealt = F.pad(rows, (0, padding)).unflatten(1, (length, size))
        sketches.append(dealt.sum(1, dtype=torch.float64).cpu())
    return torch.cat(sketches)


def pull_back(side: Side, cotangent: Tensor) -> Tensor:
    """Return ``J^T v``, ``[P]``, for ``v[n, C]``."""
    p = side.parameters.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(side.network(p, side.x), p, cotangent)[0]


def push_forward(side: Side, direction: Tensor) -> Tensor:
    """Return ``J d``, ``[n, C]``: how outputs change along a direction ``d[P]``, to first order."""
    with forward_ad.dual_level(), torch.no_grad():
        # PyTorch warns of functions that it calls itself.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            parameters = forward_ad.make_dual(side.parameters.detach(), direction)
        return forward_ad.unpack_dual(side.network(parameters, side.x)).tangent


def product(rows: Side, columns: Sequence[tuple[Side, Tensor]]) -> Tensor:
    """Return the kernel times a vector, ``[n, C]``, without computing the kernel.

    Parameters
    ----------
    columns : each client's side and its part of the vector, ``[q, C]``.
    """
    pulled_back = [pull_back(side, part) for side, part in columns]
    return push_forward(rows, torch.stack(pulled_back).sum(0))


def extremes(side: Side, outputs: int) -> tuple[float, float]:
    """Return the least and the largest eigenvalue of a model's kernel, by Lanczos' method, without the kernel.

    If the kernel is ill-conditioned, the least one is rough: compute :func:`kernel` on fewer samples instead.
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
