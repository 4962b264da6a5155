"""Local models that share only the mean features of classes."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Sum
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Other, Predictor


@METHODS.register("fedproto")
class FedProto(Method):
    """Federated prototype learning (Tan et al. 2022).

    A client minimises ``F_k(w_k) + lam * mean_c ||mean_c(w_k) - P_c||^2`` over the classes of each mini-batch, where
    ``mean_c`` is the mean input of the output layer for class c, and ``P_c`` the server's mean of it, once there is
    one. Down: a mean feature of every class. Up: one of each class that the client has. The server averages over the
    owners of a class. A client keeps its model, which starts at the initial model; with ``lam = 0`` it is local
    training. There is no global model.

    The defaults are those of FedNH's comparison; the paper has ``distance: sum, weighting: samples, prediction:
    prototypes``. The paper's distance is over all of the client's classes; here it is over those of a mini-batch.

    Attributes
    ----------
    lam : weight of the distance to the server's mean features, lambda.
    distance : reduction of the distances over the classes of a mini-batch: ``mean`` or ``sum``.
    weighting : weights of a class's owners in its mean feature: equal (``uniform``) or their ``samples`` of it.
    prediction : source of predictions: the output layer (``head``) or the nearest of the server's ``prototypes``.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    lam: Annotated[float, FROM_ZERO] = 0.1
    distance: Literal["mean", "sum"] = "mean"
    weighting: Literal["uniform", "samples"] = "uniform"
    prediction: Literal["head", "prototypes"] = "head"

    def exchanged(self, model: FlatModel) -> Tensor:
        return torch.zeros(model.size, dtype=torch.bool, device=model.device)

    def start(self, task: Task) -> ServerState:
        shape = (task.num_classes, task.model.num_features)
        return {"means": torch.zeros(shape, dtype=task.model.dtype, device=task.model.device)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, means=server["means"])
        weight = reply["weight"][:, None]
        server["means"] = torch.where(weight > 0, reply["means"] / weight.clamp_min(1), server["means"])

    def train(self, clients: Clients, means: Tensor) -> dict[str, Sum]:
        num_classes = clients.num_classes

        def loss_and_penalty(p: Tensor, batch: Batch, means: Tensor) -> tuple[Tensor, Tensor]:
            z, logits = clients.model.features(p, batch.x)
            member = F.one_hot(batch.y, num_classes).to(z.dtype) * batch.weight[:, None]
            count = member.sum(0)
            batch_means = member.T @ z / count.clamp_min(1)[:, None]
            distance = (batch_means - means).square().sum(1)

            # Classes of the mini-batch for which the server has a mean feature: it starts at zeros.
            counted = ((count > 0) & (means != 0).any(1)).to(z.dtype)
            penalty = self.lam * (distance * counted).sum()
            if self.distance == "mean":
                penalty = penalty / counted.sum().clamp_min(1)
            return clients.objective.loss(logits, batch), penalty

        model = clients.state.get("model", default=clients.initial)
        trained = clients.sgd(loss_and_penalty, model, means=means)
        clients.state["model"] = trained

        local_means, counts = clients.class_means(lambda p, x: clients.model.features(p, x)[0], trained)
        owned = counts > 0
        num_owned = owned.sum(1)
        by_samples = self.weighting == "samples"
        weight = (counts if by_samples else owned).to(local_means.dtype)
        return {
            "means": Sum(local_means * weight[:, :, None], charged=num_owned * local_means.shape[2], counts_late=True),
            # The means show which classes a client owns, but not how many samples of each it has.
            "weight": Sum(weight, charged=num_owned if by_samples else False, counts_late=True),
        }

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor:
        model = clients.state.get("model", default=clients.initial)
        has_prototype = (server["means"] != 0).any(1)
        if self.prediction == "head" or not has_prototype.any():
            return model

        def nearest(x: Tensor, local: Other, means: Tensor) -> Tensor:
            distance = (local.features(x)[:, None] - means).square().sum(2)
            return torch.where(has_prototype, -distance, torch.finfo(distance.dtype).min)

        return Predictor(nearest, local=clients.other(model), means=server["means"])
