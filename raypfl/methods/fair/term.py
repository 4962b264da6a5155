"""Tilted averaging, between the mean over clients and the worst or best of them."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FINITE
from raypfl.common.messages import Broadcast, Each, Mean, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.global_model.fedavg import FedAvg


@METHODS.register("term")
class TERM(FedAvg):
    """Tilted empirical risk (Li et al. 2021): ``min_w 1/t log sum_k p_k exp(t F_k(w))``.

    Clients send ``F_k``, the loss of the received model on their training samples, and train as in FedAvg. The server
    averages their models with the weights ``p_k exp(t F_k)``. With ``t = 0`` it is FedAvg, bit for bit. Losses are in
    evaluation mode, and those of this round; the authors' code normalises the weights by a running mean, and moves 1/m
    of FedAvg's way, with m clients, at ``t = 0``.

    Attributes
    ----------
    t : above 0, clients with a high loss count more (in the limit, the worst client alone); below 0, those with a low
        one.
    """

    t: Annotated[float, FINITE] = 1.0

    def round(self, server: ServerState, cohort: Cohort) -> None:
        theta = server["theta"]
        exponents = self.t * cohort.run(self.losses, theta=theta)["loss"]
        absent = torch.from_numpy(~cohort.present).to(theta.device)
        exponents[absent] = -torch.inf
        # A common factor of the weights changes nothing.
        tilt = torch.exp(exponents - exponents.max())

        # Clients have the model, and the server knows the weights: neither is charged.
        reply = cohort.run(self.tilted, theta=Broadcast(theta, charged=False), tilt=Scatter(tilt, charged=False))
        self.step(server, reply["theta"], cohort.task.model)

    def losses(self, clients: Clients, theta: Tensor) -> dict[str, Each]:
        return {"loss": Each(clients.map(clients.loss, theta))}

    def tilted(self, clients: Clients, theta: Tensor, tilt: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta)
        weight = tilt * clients.num_samples if self.weighting == "samples" else tilt
        return {"theta": Mean(trained, weight)}
