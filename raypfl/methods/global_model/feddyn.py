"""Federated learning by dynamic regularization."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import POSITIVE
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState
from raypfl.federation.task import Task
from raypfl.methods.local_training import proximal


@METHODS.register("feddyn")
class FedDyn(Method):
    """Dynamic regularization: a linear term per client makes local optima agree with the global one (Acar et al. 2021).

    Client k minimises ``F_k(w) - <g_k, w> + alpha/2 ||w - w_t||^2`` and keeps ``g_k <- g_k - alpha (w_k - w_t)``. With
    m of K clients in a round, the server keeps ``h <- h - alpha m/K (mean(w_k) - w_t)``, and the next model is
    ``mean(w_k) - h/alpha``. The model is sent both ways. Batch-norm statistics are averaged. FedDyn does not become
    FedAvg as alpha goes to 0: after a first round with all clients, ``w = 2 mean(w_k) - w_0`` for any alpha.

    ``h`` is the mean of ``g_k`` over all clients, so that where the models come to rest (``h = 0``), the mean loss
    does, too. In an asynchronous run, replies must count in full for this: a weight of staleness would be in ``h``, but
    not in ``g_k``.

    Attributes
    ----------
    alpha : strength of the regularization, above 0; the authors' code has 0.01 on CIFAR-10, and divides it by a
        client's samples relative to the mean.
    """

    alpha: Annotated[float, POSITIVE] = 0.1

    def needs_whole_replies(self) -> bool:
        return True

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        return {"theta": theta, "h": torch.zeros_like(task.model.parameters(theta))}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        mean = cohort.run(self.train, theta=server["theta"])["theta"]

        # m/K: clients that were skipped (after they diverged, for example) do not count.
        share = float(cohort.present.sum()) / cohort.task.num_trained
        server["h"] = server["h"] - self.alpha * share * model.parameters(mean - server["theta"])
        server["theta"] = torch.cat([model.parameters(mean) - server["h"] / self.alpha, model.buffers(mean)])

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        model = clients.model
        g_k = clients.state.get("linear", default=torch.zeros_like(model.parameters(theta)))

        # The gradient of -<g_k, w> is -g_k.
        trained = clients.sgd(clients.loss, theta, penalty=proximal(self.alpha), correction=-g_k, anchor=theta)

        clients.state["linear"] = g_k - self.alpha * model.parameters(trained - theta)
        return {"theta": Mean(trained)}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]
