"""Agnostic federated learning: the best model for the worst mixture of clients."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Each, Mean, Scatter, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.simplex import on_simplex


@METHODS.register("afl")
class AFL(FedAvg):
    """Agnostic federated learning (Mohri et al. 2019): ``min_w max_lambda sum_k lambda_k F_k(w)`` over the simplex.

    The server averages clients' models with the weights ``lambda_k``. Clients also send ``F_k``, the loss of the
    received model on their training samples; then ``lambda`` becomes the projection of ``lambda + lambda_lr F`` onto
    the simplex. The model that is evaluated is the mean of the rounds' models. With ``training.steps=1``, these are the
    paper's steps. With ``lambda_lr = 0`` the rounds' models are FedAvg's.

    In the paper, all clients take part in each round. Here, a round raises the ``lambda_k`` of its cohort alone, and
    the projection, of all clients, lowers the others. The cohort's weights are scaled to sum to 1 in the average;
    if all of them are 0, the model stays.

    Attributes
    ----------
    lambda_lr : learning rate of lambda.
    weighting : where lambda starts: equal (``uniform``), or in proportion to training samples.
    """

    lambda_lr: Annotated[float, FROM_ZERO] = 0.1
    weighting: Weighting = "uniform"

    def start(self, task: Task) -> ServerState:
        state = super().start(task)
        start = np.zeros(task.num_clients)
        start[task.trained] = task.num_samples[task.trained] if self.weighting == "samples" else 1
        weights = torch.from_numpy(start / start.sum()).to(state["theta"])
        return {**state, "lambda": weights, "sum": torch.zeros_like(state["theta"]), "rounds": 0}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        weights = server["lambda"]
        # Not charged: the server uses the weights itself, and clients need not know them.
        lam = Scatter(cohort.rows(weights), charged=False)
        reply = cohort.run(self.weighted, theta=server["theta"], lam=lam)
        if "theta" in reply:
            self.step(server, reply["theta"], cohort.task.model)

        raised = weights.clone()
        raised[list(cohort.ids)] += self.lambda_lr * reply["loss"]
        trained = torch.from_numpy(cohort.task.trained).to(weights.device)
        server["lambda"] = torch.zeros_like(weights)
        server["lambda"][trained] = on_simplex(raised[trained])

        server["sum"] = server["sum"] + server["theta"]
        server["rounds"] += 1

    def weighted(self, clients: Clients, theta: Tensor, lam: Tensor) -> dict[str, Mean | Each]:
        loss = clients.map(clients.loss, theta)
        return {"theta": Mean(clients.sgd(clients.loss, theta), weight=lam, can_be_empty=True), "loss": Each(loss)}

    def global_model(self, server: ServerState) -> Tensor:
        if server["rounds"] == 0:
            return server["theta"]
        return server["sum"] / server["rounds"]
