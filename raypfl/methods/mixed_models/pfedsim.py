"""Bodies mixed by the similarity of clients' output layers, after a warm-up of FedAvg."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE
from raypfl.common.messages import Each, Scatter, per_client
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.flat import FlatModel
from raypfl.models.heads import output_layer

LARGEST_SIMILARITY = 0.9999
"""Similarity of a client to itself, and the largest to others: ``-log(1 - similarity)`` stays finite."""


@METHODS.register("pfedsim")
class PFedSim(FedAvg):
    """Personalized federated learning with model similarity (Tan et al. 2023).

    The first rounds are FedAvg's, and all clients' models start at the result. From then on, client i starts at its own
    output layer on the body ``sum_j s_ij body_j``, with ``s_ij`` in proportion to ``-log(1 - phi_ij)`` over all
    clients, and trains all of it. ``phi_ij`` is the mean over classes of the cosine of both clients' rows of weights in
    the output layer, or 0 if this is negative; it is measured whenever both are drawn, and is 0 before. Down and up: a
    model. The server keeps all clients' models and ``phi``; clients keep nothing.

    A client's personal model is the one that it trained last. Until it is drawn after the warm-up, it is FedAvg's, as
    is the global model for ever. With ``warmup: 1`` it is FedAvg, bit for bit. ``phi`` is at most 0.9999, also between
    different clients, so that the logarithm is finite; in the paper, that is a client's similarity to itself.

    Attributes
    ----------
    warmup : share of the rounds that are FedAvg's.
    """

    needs_output_layer: ClassVar[bool] = True

    warmup: Annotated[float, CHANCE] = 0.5

    def check(self, model: FlatModel) -> None:
        output_layer(model.module)  # refuses a network without a dense one

    def depends_on_rounds(self) -> bool:
        return True

    def start(self, task: Task) -> ServerState:
        similarity = torch.eye(task.num_clients, dtype=task.model.dtype, device=task.model.device)
        return super().start(task) | {"similarity": similarity}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        if cohort.round <= round(self.warmup * cohort.task.rounds):
            super().round(server, cohort)
            return

        models = server.get("models")
        if models is None:
            models = server["theta"].repeat(cohort.task.num_clients, 1)

        body = ~cohort.task.model.mask("output layer")
        starts = cohort.rows(models)
        starts[:, body] = self.shares(cohort.rows(server["similarity"])) @ models[:, body]
        trained = cohort.run(self.train_own, model=Scatter(starts))["model"]

        server["models"] = cohort.with_rows(models, trained)
        similarity = cohort.rows(server["similarity"])
        present = torch.from_numpy(cohort.present).to(similarity.device)
        columns = torch.tensor(cohort.ids, device=similarity.device)[present]
        similarity[:, columns] = self.similarities(cohort.task.model, trained)[:, present]
        server["similarity"] = cohort.with_rows(server["similarity"], similarity)

    def shares(self, similarity: Tensor) -> Tensor:
        """Return the shares ``s[C, N]`` of all clients' bodies, given ``phi[C, N]``."""
        weights = -torch.log1p(-similarity.clamp_max(LARGEST_SIMILARITY))
        return weights / weights.sum(1, keepdim=True)

    def similarities(self, model: FlatModel, models: Tensor) -> Tensor:
        """Return ``phi[C, C]`` of ``models[C, P+B]``."""
        weight = model.segment(models, model.names("output layer")[0])
        rows = F.normalize(weight, dim=2)
        return torch.einsum("icd,jcd->ij", rows, rows).clamp_min(0) / rows.shape[1]

    def train_own(self, clients: Clients, model: Tensor) -> dict[str, Each]:
        return {"model": Each(clients.sgd(clients.loss, model))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        if "models" not in server:
            return per_client(server["theta"].repeat(len(clients), 1))
        return per_client(server["models"][list(clients.ids)])
