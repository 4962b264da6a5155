"""Federated averaging."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, Server
from raypfl.federation.task import Task
from raypfl.methods.server_optimizers import ServerOptimizer
from raypfl.models.flat import FlatModel


@METHODS.register("fedavg")
class FedAvg(Method):
    """Federated averaging (McMahan et al. 2017), with the server optimizers of Reddi et al. 2021.

    Attributes
    ----------
    weighting : whether clients are averaged by their training samples (``samples``) or equally (``uniform``).
    server_optimizer : ``sgd``, ``momentum``, ``adam`` or ``yogi``; see :class:`ServerOptimizer`.
    server_lr : its learning rate; None: 0.1 with ``adam`` and ``yogi``, else 1. 1 with ``sgd`` gives the average.
    server_beta1, server_beta2, server_tau : decay of the first and of the second moment, and adaptivity.
    """

    weighting: Weighting = "samples"
    server_optimizer: Literal["sgd", "momentum", "adam", "yogi"] = "sgd"
    server_lr: float | None = None
    server_beta1: float = 0.9
    server_beta2: float = 0.99
    server_tau: float = 1e-3

    def start(self, task: Task) -> Server:
        return {"theta": task.model.init(task.seed), "moments": {}}

    def round(self, server: Server, cohort: Cohort) -> None:
        reply = cohort.run(self.train, theta=server["theta"])
        self.step(server, reply["theta"], cohort.task.model)

    def step(self, server: Server, mean: Tensor, model: FlatModel) -> None:
        """Move the server's model towards the mean of the clients' models."""
        default = 0.1 if self.server_optimizer in ("adam", "yogi") else 1.0
        optimizer = ServerOptimizer(
            name=self.server_optimizer,
            lr=default if self.server_lr is None else self.server_lr,
            beta1=self.server_beta1,
            beta2=self.server_beta2,
            tau=self.server_tau,
        )
        server["theta"] = optimizer.step(server["theta"], mean, server["moments"], model.num_parameters)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta)
        return {"theta": Mean(trained, weight=self.weights(clients))}

    def weights(self, clients: Clients) -> Tensor | None:
        """The clients' weights ``[K]`` in the average; None: all the same."""
        return clients.weights(self.weighting)

    def global_model(self, server: Server) -> Tensor:
        return server["theta"]
