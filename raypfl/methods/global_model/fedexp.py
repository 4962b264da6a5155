"""A server step as long as clients' moves disagree."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import extrapolated


@METHODS.register("fedexp")
class FedExP(FedAvg):
    """Extrapolated averaging (Jhunjhunwala et al. 2023).

    With moves ``d_k = w_k - w`` and means over the cohort, the server's step is ``eta_g mean(d_k)``, where
    ``eta_g = max(1, mean(||d_k||^2) / (2 (||mean(d_k)||^2 + eps)))``. A client sends its model and ``||d_k||^2``. The
    model that is evaluated is the mean of the last two rounds' models. Batch-norm statistics are averaged.

    Attributes
    ----------
    eps : bounds the step if moves cancel; it decays in the authors' code, which also weighs clients by their samples.
    """

    eps: Annotated[float, FROM_ZERO] = 1e-3
    weighting: Weighting = "uniform"

    def start(self, task: Task) -> ServerState:
        state = super().start(task)
        return {**state, "previous": state["theta"]}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        theta = server["theta"]
        reply = cohort.run(self.train, theta=theta)

        squared_mean = float(model.parameters(reply["theta"] - theta).square().sum())
        # Without any move there is no step to extrapolate.
        bound = max(2 * (squared_mean + self.eps), 1e-30)
        rate = max(1.0, float(reply["squared"]) / bound)

        server["previous"] = theta
        self.step(server, extrapolated(theta, reply["theta"], rate, model), model)
        cohort.log(server_rate=rate)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta)
        squared = clients.model.parameters(trained - theta).square().sum(1)
        weight = clients.weights(self.weighting)
        return {"theta": Mean(trained, weight), "squared": Mean(squared, weight)}

    def global_model(self, server: ServerState) -> Tensor:
        return (server["theta"] + server["previous"]) / 2
