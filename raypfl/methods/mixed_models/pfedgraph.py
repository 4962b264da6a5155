"""Personal models along a graph of clients that the server infers from their models."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Each, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.simplex import on_simplex


@METHODS.register("pfedgraph")
class PFedGraph(Method):
    """Personalization on an inferred collaboration graph (Ye et al. 2023).

    After a round, client i's weights are ``argmin_a alpha ||a - p||^2 + sum_j a_j d_ij`` over the simplex, which is the
    projection of ``p - d_i / (2 alpha)``: p are shares of the cohort's training samples, and ``d_ij = -cos(w_i - w0,
    w_j - w0)`` with the initial model w0. It next starts from ``sum_j a_ij w_j``, and trains on its loss minus ``lam
    <c_i, w> / ||w||`` with ``c_i = sum_j a_ij w_j / ||w_j||``, once it has been drawn. Its model is the one it has
    trained itself, which stays on the client. Down: its start and ``c_i``; up: its model. The graph joins those that
    are drawn together; clients that are not drawn keep their start. A client that was never drawn has the initial
    model. There is no global model. With ``lam = 0`` and a very large alpha, clients start as in FedAvg.

    Attributes
    ----------
    alpha : weight of the distance to shares of samples: if it is large, models are averaged; near 0, clients are alone.
    lam : weight of the cosine with ``c_i``.
    direction : sign of this term: clients are drawn ``closer`` to ``c_i``, as the paper's text has it, or pushed
        ``apart``, as the authors' code does. That code also sets cosines above 0.9 to 1.
    """

    alpha: Annotated[float, POSITIVE] = 0.8
    lam: Annotated[float, FROM_ZERO] = 0.01
    direction: Literal["closer", "apart"] = "closer"

    def start(self, task: Task) -> ServerState:
        initial = task.model.init(task.seed)
        starts = initial.repeat(task.num_clients, 1)
        return {"initial": initial, "starts": starts, "targets": torch.zeros_like(task.model.parameters(starts))}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        start = Scatter(cohort.rows(server["starts"]))
        arguments = {"target": Scatter(cohort.rows(server["targets"]))} if self.lam else {}
        trained = cohort.run(self.train, start=start, **arguments)["model"]

        present = torch.from_numpy(cohort.present).to(trained.device)
        models = trained[present]
        parameters = cohort.task.model.parameters(models)
        samples = torch.from_numpy(cohort.task.num_samples).to(trained)
        shares = cohort.rows(samples)[present]

        weights = torch.zeros(len(trained), len(models), dtype=trained.dtype, device=trained.device)
        weights[present] = self.graph(
            parameters - cohort.task.model.parameters(server["initial"]), shares / shares.sum()
        )
        server["starts"] = cohort.with_rows(server["starts"], weights @ models)
        server["targets"] = cohort.with_rows(server["targets"], weights @ F.normalize(parameters))

    def graph(self, updates: Tensor, shares: Tensor) -> Tensor:
        """Return the weights ``[C, C]`` of clients with ``updates[C, P]`` and shares of samples ``[C]``."""
        directions = F.normalize(updates)
        cosines = directions @ directions.T
        return on_simplex(shares + cosines / (2 * self.alpha))

    def train(self, clients: Clients, start: Tensor, target: Tensor | None = None) -> dict[str, Each]:
        sign = -1.0 if self.direction == "closer" else 1.0

        def cosine(p: Tensor, batch: Batch, target: Tensor) -> Tensor:
            return sign * self.lam * (target @ p) / p.norm()

        if target is None:
            trained = clients.sgd(clients.loss, start)
        else:
            trained = clients.sgd(clients.loss, start, penalty=cosine, target=target)
        clients.state["personal"] = trained
        return {"model": Each(trained)}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
