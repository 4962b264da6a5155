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
from raypfl.models.predictor import Other, Predictor


@METHODS.register("fedproto")
class FedProto(Method):
    """Federated prototype learning (Tan et al. 2022).

    A client minimises ``F_k(w_k) + lam * mean_c ||mean_c(w_k) - P_c||^2`` over the classes of each mini-batch, where
    ``mean_c`` is the mean input of the output layer for class c, and ``P_c`` the server's mean of it, once there is
    one. Down: a mean feature of every class. Up: one of each class that the client has. The server averages over the
    owners of a class. Kept: the model, which starts at the initial model; with ``lam = 0`` it is local training. There
    is no global model.

    The defaults are those of FedNH's comparison; the paper has ``distance: sum, weighting: samples, prediction:
    prototypes``. Its distance is over all of the client's classes, this one's over those of a mini-batch.

    Attributes
    ----------
    lam : weight of the distance to the server's mean features, lambda.
    distance : over the classes of a mini-batch, their ``mean`` or ``sum``.
    weighting : owners of a class count equally (``uniform``) or by their ``samples`` of it.
    prediction : by the output layer (``head``) or by the nearest of the server's ``prototypes``.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    lam: Annotated[float, FROM_ZERO] = 0.1
    distance: Literal["mean", "sum"] = "mean"
    weighting: Literal["uniform", "samples"] = "uniform"
    prediction: Literal["head", "prototypes"] = "head"

    def start(self, task: Task) -> ServerState:
        weight = task.model.segments[task.model.names("output layer")[0]]
        return {"means": torch.zeros(weight.shape, dtype=task.model.dtype, device=task.model.device)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, means=server["means"])
        weight = reply["weight"][:, None]
        server["means"] = torch.where(weight > 0, reply["means"] / weight.clamp_min(1), server["means"])

    def train(self, clients: Clients, means: Tensor) -> dict[str, Sum]:
        run, classes = clients.model.features, clients.num_classes

        def pulled(p: Tensor, batch: Batch, means: Tensor) -> tuple[Tensor, Tensor]:
            z, logits = run(p, batch.x)
            member = F.one_hot(batch.y, classes).to(z.dtype) * batch.weight[:, None]
            count = member.sum(0)
            distance = (member.T @ z / count.clamp_min(1)[:, None] - means).square().sum(1)
            here = ((count > 0) & (means != 0).any(1)).to(z.dtype)
            penalty = self.lam * (distance * here).sum()
            if self.distance == "mean":
                penalty = penalty / here.sum().clamp_min(1)
            return clients.objective.loss(logits, batch), penalty

        model = clients.state.get("model", default=clients.initial)
        clients.state["model"] = clients.sgd(pulled, model, means=means)
        own, counts = clients.class_means(lambda theta, x: run(theta, x)[0], clients.state["model"])
        owned = counts > 0
        weight = (counts if self.weighting == "samples" else owned).to(own.dtype)
        sent = owned.sum(1) * own.shape[2]
        return {
            "means": Sum(own * weight[:, :, None], charged=sent),
            "weight": Sum(weight, charged=owned.sum(1) if self.weighting == "samples" else False),
        }

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor:
        model = clients.state.get("model", default=clients.initial)
        if self.prediction == "head" or not (known := (server["means"] != 0).any(1)).any():
            return model

        def nearest(x: Tensor, own: Other, means: Tensor) -> Tensor:
            distance = (own.features(x)[:, None] - means).square().sum(2)
            return torch.where(known, -distance, torch.finfo(distance.dtype).min)

        return Predictor(nearest, own=clients.other(model), means=server["means"])
