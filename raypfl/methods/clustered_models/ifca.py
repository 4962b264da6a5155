"""Clusters that clients choose by their loss."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT
from raypfl.common.messages import Mean, Sum, Weighting, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.clustered_models.models_of_clusters import best_models, different_initial_models


@METHODS.register("ifca")
class IFCA(Method):
    """Iterative federated clustering (Ghosh et al. 2020), by model averaging.

    ``min sum_k min_j F_k(theta_j)``. In every round a client gets all models, trains the one with the lowest loss on
    its training samples, and sends the result with its number. A model becomes the mean of those that were trained from
    it; one that nobody chose stays as it is. Clients keep nothing: also for evaluation, and if it was never trained, a
    client has the model of lowest training loss. With ``clusters = 1`` it is FedAvg, bit for bit. There is no global
    model. The paper's other variant averages gradients. In the paper, models may also share layers; the authors draw
    initial models until each has enough clients.

    Attributes
    ----------
    clusters : number of models, which start at different initial ones.
    weighting : weights of clients in their cluster's mean: training samples (``samples``) or equal (``uniform``).
    """

    clusters: Annotated[int, COUNT] = 4
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        return {"models": different_initial_models(task, self.clusters)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, models=server["models"])
        models = [reply.get(f"model_{number}", model) for number, model in enumerate(server["models"])]
        server["models"] = torch.stack(models)
        cohort.log(**{f"cluster_{number}": float(size) for number, size in enumerate(reply["choice"])})

    def train(self, clients: Clients, models: Tensor) -> dict[str, Mean | Sum]:
        start, choice = best_models(clients, models)
        trained = clients.sgd(clients.loss, start)

        members = F.one_hot(unmarked(choice), self.clusters).to(trained.dtype)
        weight = clients.weights(self.weighting)
        reply: dict[str, Mean | Sum] = {"choice": Sum(members, charged=1)}
        for number, member in enumerate(members.unbind(1)):
            weight_here = member if weight is None else member * weight
            sent_size = member.long() * clients.model.size
            may_be_unchosen = self.clusters > 1
            reply[f"model_{number}"] = Mean(trained, weight_here, charged=sent_size, can_be_empty=may_be_unchosen)
        return reply

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return best_models(clients, server["models"])[0]

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return best_models(clients, server["models"])[0]
