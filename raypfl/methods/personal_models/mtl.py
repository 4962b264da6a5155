"""Personal models close to their mean."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.local_training import proximal


@METHODS.register("mtl")
class MTL(Method):
    """Multi-task learning, regularised towards the mean of the clients' models (after Smith et al. 2017).

    ``min_{v_1..v_K} sum_k F_k(v_k) + lam/2 ||v_k - mean(v)||^2``, a common baseline (Xie et al. 2024). Down: the mean
    of the models that the previous cohort sent. Up: ``v_k``, which also stays on the client and starts at the initial
    model. With ``lam = 0`` it is local training, bit for bit. There is no global model.

    Attributes
    ----------
    lam : weight of the proximal term, lambda.
    weighting : weights of clients in the mean: equal (``uniform``) or training samples (``samples``).
    """

    lam: Annotated[float, FROM_ZERO] = 0.1
    weighting: Weighting = "uniform"

    def start(self, task: Task) -> ServerState:
        return {"mean": task.model.init(task.seed)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        server["mean"] = cohort.run(self.train, mean=server["mean"])["personal"]

    def train(self, clients: Clients, mean: Tensor) -> dict[str, Mean]:
        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = clients.sgd(clients.loss, personal, penalty=proximal(self.lam), anchor=mean)
        return {"personal": Mean(clients.state["personal"], clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
