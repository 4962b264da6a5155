"""Federated averaging."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs
from raypfl.common.limits import BELOW_ONE, POSITIVE
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.models.flat import FlatModel


@METHODS.register("fedavg")
class FedAvg(Method):
    """Federated averaging (McMahan et al. 2017), with the server optimizers of Reddi et al. 2021.

    Attributes
    ----------
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    server_optimizer : ``sgd``, ``momentum`` (Hsu et al. 2019), ``adagrad`` (without momentum), ``adam`` or ``yogi``,
        along ``mean - theta``.
    server_lr : learning rate of the server; None: 0.1 with ``adagrad``, ``adam`` and ``yogi``, else 1. ``sgd`` with 1
        gives the average.
    server_beta1, server_beta2 : decay of the first and of the second moment.
    server_tau : adaptivity, added to the root of the second moment, which starts at tau^2.
    """

    weighting: Weighting = "samples"
    server_optimizer: Literal["sgd", "momentum", "adagrad", "adam", "yogi"] = "sgd"
    server_lr: Annotated[float | None, POSITIVE] = None
    server_beta1: Annotated[float, BELOW_ONE, needs("server_optimizer", "momentum", "adam", "yogi")] = 0.9
    server_beta2: Annotated[float, BELOW_ONE, needs("server_optimizer", "adam", "yogi")] = 0.99
    server_tau: Annotated[float, POSITIVE, needs("server_optimizer", "adagrad", "adam", "yogi")] = 1e-3

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed), "moments": {}}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, theta=server["theta"])
        self.step(server, reply["theta"], cohort.task.model)

    def step(self, server: ServerState, mean: Tensor, model: FlatModel) -> None:
        """Move the server's model toward the clients' mean. Batch-norm statistics become the mean's."""
        lr = self.server_lr
        if lr is None:
            lr = 1.0 if self.server_optimizer in ("sgd", "momentum") else 0.1

        # theta + 1.0 * (mean - theta) is the mean up to rounding; plain FedAvg takes the mean itself.
        if self.server_optimizer == "sgd" and lr == 1.0:
            server["theta"] = mean
            return

        theta = server["theta"]
        size = model.num_parameters
        delta = (mean - theta)[:size]
        moved = theta[:size] + lr * self._direction(delta, server["moments"])
        server["theta"] = torch.cat([moved, mean[size:]])

    def _direction(self, delta: Tensor, moments: dict[str, Tensor]) -> Tensor:
        """Return the server optimizer's step ``[P]`` (Reddi et al. 2021, Algorithm 2), and update its moments."""
        if self.server_optimizer == "sgd":
            return delta

        beta1 = self.server_beta1
        m = moments.get("first", torch.zeros_like(delta))
        if self.server_optimizer == "momentum":
            moments["first"] = beta1 * m + delta
            return moments["first"]

        beta2 = self.server_beta2
        v = moments.get("second", torch.full_like(delta, self.server_tau**2))
        squared = delta.square()
        if self.server_optimizer == "adagrad":
            moments["second"] = v + squared
            return delta / (moments["second"].sqrt() + self.server_tau)

        moments["first"] = beta1 * m + (1 - beta1) * delta
        if self.server_optimizer == "adam":
            moments["second"] = beta2 * v + (1 - beta2) * squared
        else:
            moments["second"] = v - (1 - beta2) * squared * torch.sign(v - squared)

        return moments["first"] / (moments["second"].sqrt() + self.server_tau)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta)
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]
