"""Server momentum that clients look ahead along."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import BELOW_ONE, FROM_ZERO
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.methods.local_training import proximal


@METHODS.register("fedacg")
class FedACG(Method):
    """Accelerated client gradients (Kim et al. 2024): clients start ahead of the global model, along its momentum.

    The server sends ``w~ = w + lam v``, client k minimises ``F_k(y) + beta ||y - w~||^2`` from there, and then ``v <-
    lam v + mean(w_k - w~)``, and ``w`` is the mean of the ``w_k``, with equal weights. It is ``w`` that is evaluated.
    Batch-norm statistics have no momentum. They have in the authors' code.

    Attributes
    ----------
    lam : the momentum's decay.
    beta : weight of the proximal term (without FedProx's factor 1/2).
    """

    lam: Annotated[float, BELOW_ONE] = 0.85
    beta: Annotated[float, FROM_ZERO] = 0.001

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        return {"theta": theta, "v": torch.zeros_like(task.model.parameters(theta))}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        theta = server["theta"]
        ahead = torch.cat([model.parameters(theta) + self.lam * server["v"], model.buffers(theta)])
        mean = cohort.run(self.train, theta=ahead)["theta"]

        server["v"] = self.lam * server["v"] + model.parameters(mean - ahead)
        server["theta"] = mean

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        return {"theta": Mean(clients.sgd(clients.loss, theta, penalty=proximal(2 * self.beta), anchor=theta))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]
