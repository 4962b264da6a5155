"""Federated learning with local drift decoupling and correction."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Sum
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.methods.local_training import mean_gradient, proximal


@METHODS.register("feddc")
class FedDC(Method):
    """Local drift decoupling and correction (Gao et al. 2022).

    Client k pulls its model toward ``w_t - h_k`` with strength alpha, follows its gradient plus ``g - g_k``, and adds
    its move to its drift ``h_k``. ``g_k`` becomes the mean gradient of these steps; ``g`` is the mean over all clients.
    The server adds the mean of all drifts to the mean of the cohort's models. The model and a gradient are sent both
    ways. With momentum, mean gradients are as in SCAFFOLD.

    Attributes
    ----------
    alpha : strength of the pull; the authors' code has 0.01 on CIFAR-10, and divides it by a client's samples relative
        to the mean.
    """

    needs_sgd: ClassVar[bool] = True

    alpha: Annotated[float, FROM_ZERO] = 0.1

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        zeros = torch.zeros_like(task.model.parameters(theta))
        return {"theta": theta, "h": zeros, "g": zeros.clone()}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        num_clients = cohort.task.num_trained
        reply = cohort.run(self.train, theta=server["theta"], g=server["g"])
        mean = reply["theta"]

        # h and g are means over all clients: what changed is the cohort's part of them.
        share = float(cohort.present.sum()) / num_clients
        server["h"] = server["h"] + share * model.parameters(mean - server["theta"])
        server["g"] = server["g"] + reply["moved"] / num_clients

        server["theta"] = torch.cat([model.parameters(mean) + server["h"], model.buffers(mean)])

    def train(self, clients: Clients, theta: Tensor, g: Tensor) -> dict[str, Mean | Sum]:
        model = clients.model
        zeros = torch.zeros_like(g)
        h_k = clients.state.get("drift", default=zeros)
        g_k = clients.state.get("gradient", default=zeros)

        anchor = model.parameters(theta) - h_k
        trained = clients.sgd(clients.loss, theta, penalty=proximal(self.alpha), correction=g - g_k, anchor=anchor)

        clients.state["drift"] = h_k + model.parameters(trained - theta)
        # The steps followed the gradients plus g - g_k.
        clients.state["gradient"] = g_k - g + mean_gradient(clients, theta, trained)
        return {"theta": Mean(trained), "moved": Sum(clients.state["gradient"] - g_k)}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]
