"""Local models that share only the mean outputs of classes."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Sum, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.models.flat import FlatModel


@METHODS.register("feddistill")
class FedDistill(Method):
    """Federated distillation, FD (Jeong et al. 2018).

    A client minimises ``F_k(w_k) + gamma * mean_i mean_c (f(x_i)_c - T_{y_i,c})^2`` over each mini-batch. ``T_y`` is
    the mean, over the other clients that have class y, of their mean logits on their samples of that class; without
    one, a sample has no such term. The client sends its mean logits after training, in evaluation mode. Down: their
    sums over the last cohort that had the class, how many clients these were, and the round. Up: mean logits of each
    class that the client has. A client keeps its model, which starts at the initial model, and what it sent last,
    which it subtracts; with ``gamma = 0`` it is local training. There is no global model.

    The paper takes the means over the steps of training. Its distance is a cross-entropy. HtFLlib keeps a client's own
    logits in the mean.

    Attributes
    ----------
    gamma : weight of the distance to the other clients' mean logits.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    gamma: Annotated[float, FROM_ZERO] = 1.0

    def exchanged(self, model: FlatModel) -> Tensor:
        return torch.zeros(model.size, dtype=torch.bool, device=model.device)

    def start(self, task: Task) -> ServerState:
        owners = torch.zeros(task.num_classes, dtype=task.model.dtype, device=task.model.device)
        return {"sums": owners.repeat(task.num_classes, 1), "owners": owners, "rounds": owners - 1}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(
            self.train, sums=server["sums"], owners=server["owners"], rounds=server["rounds"], round=cohort.round
        )
        has_owners = reply["classes"] > 0
        server["sums"] = torch.where(has_owners[:, None], reply["logits"], server["sums"])
        server["owners"] = torch.where(has_owners, reply["classes"], server["owners"])
        server["rounds"] = torch.where(has_owners, float(cohort.round), server["rounds"])

    def train(self, clients: Clients, sums: Tensor, owners: Tensor, rounds: Tensor, round: int) -> dict[str, Sum]:
        def loss_and_distance(p: Tensor, batch: Batch, targets: Tensor, has_target: Tensor) -> tuple[Tensor, Tensor]:
            outputs = clients.model(p, batch.x)
            distance = (outputs - targets[batch.y]).square().mean(1)
            return clients.objective.loss(outputs, batch), self.gamma * batch.mean(distance * has_target[batch.y])

        # A class's sum contains the client's last logits if no later cohort had the class.
        last_sent = unmarked(clients.state.get("sent", default=torch.zeros_like(sums)))
        last_round = unmarked(clients.state.get("round", default=rounds.new_full((1,), -1)))
        is_in_sum = ((last_round == rounds) & (unmarked(clients.label_counts()) > 0)).to(sums.dtype)
        other_owners = owners - is_in_sum
        targets = (sums - is_in_sum[:, :, None] * last_sent) / other_owners.clamp_min(1)[:, :, None]

        model = clients.state.get("model", default=clients.initial)
        has_target = per_client((other_owners > 0).to(sums.dtype))
        trained = clients.sgd(loss_and_distance, model, targets=per_client(targets), has_target=has_target)

        means, counts = clients.class_means(clients.model, trained)
        owned = (counts > 0).to(means.dtype)
        clients.state["model"] = trained
        clients.state["sent"] = means
        clients.state["round"] = per_client(rounds.new_full((len(clients), 1), round))
        return {
            "logits": Sum(means, charged=owned.sum(1).long() * means.shape[2]),
            "classes": Sum(owned, charged=False),  # the logits show which classes a client has
        }

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=clients.initial)
