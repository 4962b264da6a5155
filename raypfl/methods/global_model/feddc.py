"""Federated learning with local drift decoupling and correction."""

from __future__ import annotations

from typing import Annotated

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

    Client k pulls its model toward ``w_t - h_k`` (alpha), follows its gradient plus ``g - g_k``, and adds its move to
    its drift ``h_k``; ``g_k`` becomes the mean gradient that it met, and ``g`` is the mean of all clients'. The server
    adds the mean of all drifts to the mean of the cohort's models. Sent, both ways: the model and a gradient.

    Attributes
    ----------
    alpha : strength of the pull.
    """

    alpha: Annotated[float, FROM_ZERO] = 0.1

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        zeros = torch.zeros_like(task.model.parameters(theta))
        return {"theta": theta, "h": zeros, "g": zeros.clone()}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model, clients = cohort.task.model, cohort.task.num_trained
        reply = cohort.run(self.train, theta=server["theta"], g=server["g"])
        share = float(cohort.present.sum()) / clients
        server["h"] = server["h"] + share * model.parameters(reply["theta"] - server["theta"])
        server["g"] = server["g"] + reply["moved"] / clients
        server["theta"] = torch.cat([model.parameters(reply["theta"]) + server["h"], model.buffers(reply["theta"])])

    def train(self, clients: Clients, theta: Tensor, g: Tensor) -> dict[str, Mean | Sum]:
        model, zeros = clients.model, torch.zeros_like(g)
        drift, own = (clients.state.get(name, default=zeros) for name in ("drift", "gradient"))
        anchor = model.parameters(theta) - drift
        trained = clients.sgd(clients.loss, theta, penalty=proximal(self.alpha), correction=g - own, anchor=anchor)
        clients.state["drift"] = drift + model.parameters(trained - theta)
        clients.state["gradient"] = own - g + mean_gradient(clients, theta, trained)
        return {"theta": Mean(trained), "moved": Sum(clients.state["gradient"] - own)}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]
