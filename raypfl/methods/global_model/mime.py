"""Local steps of a centralised optimizer, whose momentum is fixed during a round."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import BELOW_ONE
from raypfl.common.messages import Broadcast, Mean, Weighting, per_client
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.methods.global_model.fedavg import FedAvg


@METHODS.register("mimelite")
class MimeLite(FedAvg):
    """MimeLite with momentum (Karimireddy et al. 2021).

    A local step of client k goes along ``(1 - beta) g + beta m``, with m the server's momentum, which stays fixed. The
    model becomes the mean of clients' models, and then ``m <- (1 - beta) c + beta m``, with c the mean gradient of the
    cohort's training losses at the model that the round started from. A client sends its model and its gradient. With
    ``beta = 0`` it is FedAvg with equal weights. Weight decay is part of all these gradients. c is of all training
    samples, in training mode; ``training.clip_norm`` bounds a step's direction divided by ``1 - beta``. The paper also
    has Adam and others in place of momentum.

    Attributes
    ----------
    beta : the momentum's decay.
    """

    needs_sgd: ClassVar[bool] = True

    beta: Annotated[float, BELOW_ONE] = 0.9
    weighting: Weighting = "uniform"

    def start(self, task: Task) -> ServerState:
        state = super().start(task)
        return {**state, "m": torch.zeros_like(task.model.parameters(state["theta"]))}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.lite, theta=server["theta"], m=server["m"])
        self.finish(server, cohort, reply["theta"], reply["c"])

    def lite(self, clients: Clients, theta: Tensor, m: Tensor) -> dict[str, Mean]:
        lr = clients.lr * (1 - self.beta)
        trained = clients.sgd(clients.loss, theta, lr=lr, correction=self.momentum(m))
        return {
            "theta": Mean(trained, weight=clients.weights(self.weighting)),
            "c": Mean(self.gradient(clients, theta), weight=clients.weights(self.weighting)),
        }

    def gradient(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return the gradients ``[K, P]`` of the losses on all training samples at `theta`, with weight decay."""
        return self.with_decay(clients, clients.grad(clients.loss, theta), theta)

    def with_decay(self, clients: Clients, gradient: Tensor, theta: Tensor) -> Tensor:
        """Return a gradient at `theta` with that of weight decay, which local steps add by themselves."""
        decay = clients.training.weight_decay
        return gradient + decay * clients.model.parameters(theta) if decay else gradient

    def momentum(self, m: Tensor) -> Tensor:
        """Return what is added to gradients, so that SGD at the rate ``(1 - beta) lr`` has momentum."""
        return self.beta / (1 - self.beta) * m

    def finish(self, server: ServerState, cohort: Cohort, mean: Tensor, c: Tensor) -> None:
        """Set the next model, and then the momentum."""
        self.step(server, mean, cohort.task.model)
        server["m"] = (1 - self.beta) * c + self.beta * server["m"]


@METHODS.register("mime")
class Mime(MimeLite):
    """Mime with momentum (Karimireddy et al. 2021): MimeLite whose gradients are corrected for their variance.

    In place of g, a step follows ``g - g_0 + c``, where ``g_0`` is the gradient of the same mini-batch at the model
    that the round started from. So a round has two exchanges: clients first send their gradients, whose mean is c.
    """

    def round(self, server: ServerState, cohort: Cohort) -> None:
        theta = server["theta"]
        c = cohort.run(self.gradients, theta=theta)["c"]
        reply = cohort.run(self.corrected, theta=Broadcast(theta, charged=False), m=server["m"], c=c)
        self.finish(server, cohort, reply["theta"], c)

    def gradients(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        return {"c": Mean(self.gradient(clients, theta), weight=clients.weights(self.weighting))}

    def corrected(self, clients: Clients, theta: Tensor, m: Tensor, c: Tensor) -> dict[str, Mean]:
        lr = clients.lr * (1 - self.beta)
        common = c + self.momentum(m)
        model: Tensor = per_client(theta.repeat(len(clients), 1))
        for batch in clients.minibatches():
            at_start = self.with_decay(clients, batch.grad(clients.loss, theta), theta)
            model = batch.step(clients.loss, model, lr=lr, correction=common - at_start)
        return {"theta": Mean(model, weight=clients.weights(self.weighting))}
