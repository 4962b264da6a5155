"""LoRA whose products are averaged, and not their factors."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Each, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.models.lora import factor_pairs


@METHODS.register("flexlora")
class FlexLoRA(Method):
    """FlexLoRA (Bai et al. 2024), with clients of one rank.

    Clients train both factors of their adapters, and send them. The server makes ``D = sum_k p_k B_k A_k`` of each
    adapter, and sends the factors of the best approximation of D that has the adapters' rank r, from the singular value
    decomposition ``D = U S V^T``: ``B = U_r S_r`` and ``A = V_r^T``. Everything else that clients train, such as the
    output layer, is averaged. In the paper, ranks may differ between clients, and adapters have the factor alpha / r,
    with alpha = 16.

    Attributes
    ----------
    weighting : the weights p_k of clients: training samples (``samples``) or equal (``uniform``).
    """

    needs_lora: ClassVar[bool] = True

    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        # The server gets each client's factors, which are far smaller than their products.
        rows = cohort.run(self.train, theta=server["theta"])["theta"]

        weight = torch.from_numpy(cohort.present).to(rows)
        if self.weighting == "samples":
            weight *= cohort.rows(torch.from_numpy(cohort.task.num_samples)).to(rows)
        share = weight / weight.sum()

        theta = share @ rows
        for name_of_a, name_of_b in factor_pairs(model):
            a, b = best_factors(model.segment(rows, name_of_a), model.segment(rows, name_of_b), share)
            model.segment(theta, name_of_a).copy_(a)
            model.segment(theta, name_of_b).copy_(b)
        server["theta"] = theta

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Each]:
        return {"theta": Each(clients.sgd(clients.loss, theta))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]


def best_factors(a: Tensor, b: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return A ``[r, in]`` and B ``[out, r]`` whose product is the best of rank r for ``D = sum_k share_k b_k a_k``.

    A's rows are orthonormal, and the largest entry of each is positive, which settles the signs. If r is more than in
    or out, further rows of A and columns of B are zeros.

    Parameters
    ----------
    a, b, share : ``[C, r, in]``, ``[C, out, r]`` and ``[C]``.
    """
    rank = a.shape[1]
    # D = scaled_b @ stacked_a. With their QR decompositions, the SVD is of a matrix with at most C r rows and columns.
    scaled_b = (share[:, None, None] * b).double().transpose(0, 1).flatten(1)
    stacked_a = a.double().flatten(0, 1)
    basis_b, triangle_b = torch.linalg.qr(scaled_b)
    basis_a, triangle_a = torch.linalg.qr(stacked_a.T)
    u, s, vt = torch.linalg.svd(triangle_b @ triangle_a.T, full_matrices=False)
    columns = basis_b @ (u * s)[:, :rank]
    rows = vt[:rank] @ basis_a.T

    signs = rows.gather(1, rows.abs().argmax(1, keepdim=True)).sign()
    best_a = torch.zeros_like(a[0])
    best_b = torch.zeros_like(b[0])
    best_a[: len(rows)] = (signs * rows).to(a.dtype)
    best_b[:, : len(rows)] = (columns * signs.T).to(b.dtype)
    return best_a, best_b
