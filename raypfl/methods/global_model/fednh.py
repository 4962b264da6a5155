"""A head of class prototypes that the clients' features move slowly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE, POSITIVE
from raypfl.common.messages import Mean, Sum, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.models.flat import FlatModel
from raypfl.models.heads import PrototypeHead, output_layer, with_output_layer
from raypfl.models.prototypes import uniform_prototypes

Latent = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@METHODS.register("fednh")
class FedNH(Method):
    """A non-parametric head of class prototypes (Dai et al. 2023).

    The output layer is a matrix W of unit rows, initially as far apart as possible. Clients train the body, on features
    of length one, with the received W fixed. Then they send the mean feature of each of their classes, and
    ``W_c <- rho W_c + (1 - rho) mean_k mu_kc`` (Eq. 4), scaled to length one again. Down: body, scale and W. Up: body
    and scale, and a mean feature for each class that the client has: ``|body| + 1 + |C_k| d`` numbers. Kept: the
    trained model, which is the personal one. The global model is the averaged body with the new W. Logged: the mean
    distance that prototypes move, and about ten times a run the cosines of all pairs.

    Gradients grow with the scale and with the inverse length of features, so the first steps can be far too large: see
    ``docs/fednh.md`` for results on images, and ``training.clip_norm``.

    Attributes
    ----------
    rho : smoothing of the prototypes; with 1 they never change.
    scale : initial factor of the cosines, s.
    train_scale : whether the scale is trained, without weight decay.
    share_scale : whether the scale is averaged with the body; otherwise each client keeps its own.
    head : initial rows: ``uniform`` prototypes, ``random`` unit rows, or torch's initial weights (``default``).
    normalise : whether features are scaled to length one.
    unit_means : whether the mean features and their mean over clients are scaled to length one too, so that scattered
        and rare classes move their prototypes as much as others do.
    missing : how a client without samples of a class counts: as a mean feature of zero, which shortens the step
        (``zero``); or not at all, with the mean over ``owners`` of the class, or weighted by ``samples``.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    rho: Annotated[float, CHANCE] = 0.9
    scale: Annotated[float, POSITIVE] = 30.0
    train_scale: bool = True
    share_scale: bool = True
    head: Literal["uniform", "random", "default"] = "uniform"
    normalise: bool = True
    unit_means: bool = False
    missing: Literal["zero", "owners", "samples"] = "zero"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, PrototypeHead(layer.weight, self.scale, self.train_scale, self.normalise))

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        prototypes = task.model.segment(theta, _weight(task.model))
        prototypes.copy_(self._first(prototypes, task.seed))
        return {"theta": theta}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        head, body = model.mask(_weight(model)), self._averaged(model)
        old = model.segment(server["theta"], _weight(model))
        reply = cohort.run(self.train, body=server["theta"][body], prototypes=old)
        divisor = float(cohort.present.sum()) if self.missing == "zero" else reply["weights"][:, None]
        theta = server["theta"].masked_scatter(body, reply["body"])
        new = self.moved(old, reply["means"], divisor)
        server["theta"] = theta.masked_scatter(head, new)
        cohort.log(prototype_distance=(new - old).norm(dim=1).mean())
        if cohort.round in (1, cohort.task.rounds) or cohort.round % max(cohort.task.rounds // 10, 1) == 0:
            cohort.log_table("prototype_cosines", _cosines(new))

    def moved(self, old: Tensor, sums: Tensor, divisor: float | Tensor) -> Tensor:
        """The next prototypes ``[C, d]``, from the sums over clients of weighted class means and of the weights."""
        mean = sums / torch.as_tensor(divisor).clamp_min(1e-12)
        pulled = self.rho * old + (1 - self.rho) * (F.normalize(mean, dim=1, eps=1e-12) if self.unit_means else mean)
        length = pulled.norm(dim=1, keepdim=True)
        kept = (sums == 0).all(1, keepdim=True) | (length < 1e-12) | (self.rho == 1)
        return torch.where(kept, old, pulled / length.clamp_min(1e-12))

    def train(self, clients: Clients, body: Tensor, prototypes: Tensor) -> dict[str, Mean | Sum]:
        model = clients.model
        head, averaged = model.mask(_weight(model)), self._averaged(model)
        theta = unmarked(clients.state.get("model", default=clients.initial)).clone()
        theta[:, head], theta[:, averaged] = prototypes.flatten(), body
        trained = clients.sgd(clients.loss, per_client(theta), train=~head, decay=~model.mask("output layer"))
        clients.state["model"] = trained
        means, counts = clients.class_means(partial(self._directions, model.features), trained)
        if self.unit_means:
            means = per_client(F.normalize(means, dim=-1, eps=1e-12))
        weights = counts if self.missing == "samples" else (counts > 0).to(means.dtype)
        owned = (counts > 0).sum(1)
        reply: dict[str, Mean | Sum] = {
            "body": Mean(trained[:, averaged]),
            "means": Sum(means * weights[:, :, None], charged=owned * means.shape[2]),
        }
        if self.missing != "zero":
            # The means show which classes a client owns, but not how many samples of each it has.
            reply["weights"] = Sum(weights, charged=owned if self.missing == "samples" else False)
        return reply

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=server["theta"])

    def _averaged(self, model: FlatModel) -> Tensor:
        """``bool[P+B]``: the entries that clients train and the server averages."""
        kept = model.mask(_weight(model))
        return ~(kept if self.share_scale or not self.train_scale else kept | model.mask(_scale(model)))

    def _directions(self, latent: Latent, theta: Tensor, x: Tensor) -> Tensor:
        z, _ = latent(theta, x)
        return F.normalize(z, dim=-1, eps=1e-12) if self.normalise else z

    def _first(self, rows: Tensor, seed: int) -> Tensor:
        if self.head == "uniform":
            count, dimension = rows.shape
            return uniform_prototypes(count, dimension, seed).to(rows)
        return rows / rows.norm(dim=1, keepdim=True) if self.head == "random" else rows


def _cosines(prototypes: Tensor) -> dict[str, Tensor]:
    """The cosine of each pair of prototypes ``[C, d]``, the closest pair first."""
    first, second = torch.triu_indices(len(prototypes), len(prototypes), 1, device=prototypes.device)
    rows = F.normalize(prototypes, dim=1)
    cosines, order = (rows @ rows.T)[first, second].sort(descending=True, stable=True)
    return {"class": first[order], "other": second[order], "cosine": cosines}


def _weight(model: FlatModel) -> str:
    return model.names("output layer")[0]


def _scale(model: FlatModel) -> str:
    return model.names("output layer")[1]
