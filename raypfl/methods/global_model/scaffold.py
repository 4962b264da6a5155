"""Stochastic controlled averaging."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Mean, Sum, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import mean_gradient


@METHODS.register("scaffold")
class Scaffold(FedAvg):
    """Stochastic controlled averaging (Karimireddy et al. 2020), with control variates by option II.

    Client k follows its gradient plus ``c - c_k``; then ``c_k`` becomes the mean gradient of these steps. ``c`` is the
    mean of ``c_k`` over all clients. The model and a control variate are sent both ways. `server_lr` is the paper's
    global learning rate. With ``training.momentum``, the mean gradient is the move divided by the sum of the gradients'
    weights in it; the paper divides by steps and learning rate, which holds without momentum.
    """

    needs_sgd: ClassVar[bool] = True

    weighting: Weighting = "uniform"

    def start(self, task: Task) -> ServerState:
        state = super().start(task)
        return {**state, "c": torch.zeros_like(task.model.parameters(state["theta"]))}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.controlled, theta=server["theta"], c=server["c"])
        self.step(server, reply["theta"], cohort.task.model)
        server["c"] = server["c"] + reply["moved"] / cohort.task.num_trained

    def controlled(self, clients: Clients, theta: Tensor, c: Tensor) -> dict[str, Mean | Sum]:
        c_k = clients.state.get("c", default=torch.zeros_like(c))
        trained = clients.sgd(clients.loss, theta, correction=c - c_k)

        # The steps followed the gradients plus c - c_k.
        clients.state["c"] = c_k - c + mean_gradient(clients, theta, trained)
        return {
            "theta": Mean(trained, weight=clients.weights(self.weighting)),
            "moved": Sum(clients.state["c"] - c_k, counts_late=True),
        }
