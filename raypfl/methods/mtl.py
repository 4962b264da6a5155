"""Personal models, pulled toward their mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raypfl.common.messages import Mean, Weighting
from raypfl.federation.method import METHODS, Method, Server, ServerView
from raypfl.federation.task import Task

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients
    from raypfl.federation.cohort import Cohort
    from raypfl.objectives.batch import Batch


@METHODS.register("mtl")
class MTL(Method):
    """Multi-task learning, regularised toward the mean of the tasks' models (after Smith et al. 2017).

    ``min_{v_1..v_K} sum_k F_k(v_k) + lam/2 ||v_k - mean(v)||^2``, the form in which it serves as a baseline (Xie et al.
    2024). Sent, both ways: one model; down comes the mean of those that the cohort before sent up. ``v_k`` stays on the
    client from round to round, starting at the initial model; ``lam = 0`` is training alone, bit for bit. There is no
    global model.

    Attributes
    ----------
    lam : strength of the pull, lambda.
    weighting : clients count all the same in the mean (``uniform``), or by their training samples (``samples``).
    """

    lam: float = 0.1
    weighting: Weighting = "uniform"

    def start(self, task: Task) -> Server:
        return {"mean": task.model.init(task.seed)}

    def round(self, server: Server, cohort: Cohort) -> None:
        server["mean"] = cohort.run(self.train, mean=server["mean"])["personal"]

    def train(self, clients: Clients, mean: Tensor) -> dict[str, Mean]:
        def pull(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
            return self.lam / 2 * (p - anchor).square().sum()

        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = clients.sgd(clients.loss, personal, penalty=pull, anchor=mean)
        return {"personal": Mean(clients.state["personal"], clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
