"""A head of class prototypes that the clients' features move slowly."""

from __future__ import annotations

from collections.abc import Callable
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
from raypfl.methods.uniform_prototypes import uniform_prototypes
from raypfl.models.flat import FlatModel
from raypfl.models.heads import PrototypeHead, output_layer, with_output_layer


@METHODS.register("fednh")
class FedNH(Method):
    """A non-parametric head of class prototypes (Dai et al. 2023).

    The output layer is a matrix W of unit rows, initially as far apart as possible. Clients train the body, on features
    of length one, with the received W fixed. Then they send the mean feature of each of their classes, and
    ``W_c <- rho W_c + (1 - rho) mean_k mu_kc`` (Eq. 4), scaled to length one again. Down: body, scale and W. Up: body
    and scale, and a mean feature for each class that the client has: ``|body| + 1 + |C_k| d`` numbers. Each client
    keeps the model that it trained; this is its personal model. The global model is the averaged body with the new W.
    The method logs the mean distance that prototypes move and, about ten times a run, the cosines of all pairs.

    Gradients grow with the scale and with the inverse length of features, so the first steps can be far too large: see
    ``docs/fednh.md`` for results on images, and ``training.clip_norm``.

    Attributes
    ----------
    rho : smoothing of the prototypes; with 1 they never change.
    scale : initial factor of the cosines, s.
    train_scale : train the scale, without weight decay.
    share_scale : average the scale with the body; otherwise each client keeps its own.
    head : initial rows of W: ``uniform`` prototypes, ``random`` unit rows, or torch's initial weights (``default``).
    normalise : scale features to length one.
    unit_means : scale the mean features and their mean over clients to length one too, so that scattered and rare
        classes move their prototypes as much as others do.
    missing : weight of a client without samples of a class: it counts as a mean feature of zero, which shortens the
        step (``zero``); or it does not count, and the mean is over ``owners`` of the class or weighted by ``samples``.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

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
        prototypes.copy_(self._initial_prototypes(prototypes, task.seed))
        return {"theta": theta}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        body = self._body(model)
        prototypes = model.segment(server["theta"], _weight(model))
        reply = cohort.run(self.train, body=server["theta"][body], prototypes=prototypes)

        divisor = float(cohort.present.sum()) if self.missing == "zero" else reply["weights"][:, None]
        moved = self.move_prototypes(prototypes, reply["means"], divisor)
        theta = server["theta"].masked_scatter(body, reply["body"])
        server["theta"] = theta.masked_scatter(model.mask(_weight(model)), moved)

        cohort.log(prototype_distance=(moved - prototypes).norm(dim=1).mean())
        if cohort.round in (1, cohort.task.rounds) or cohort.round % max(cohort.task.rounds // 10, 1) == 0:
            cohort.log_table("prototype_cosines", _cosines(moved))

    def move_prototypes(self, prototypes: Tensor, sums: Tensor, divisor: float | Tensor) -> Tensor:
        """Return the next prototypes ``[C, d]``: Eq. 4, scaled to length one.

        Parameters
        ----------
        prototypes : W, ``[C, d]``.
        sums : ``[C, d]``, the sum over clients of their weighted mean features.
        divisor : what makes a mean of the sums: one number, or one for each class, ``[C, 1]``.
        """
        mean = sums / torch.as_tensor(divisor).to(sums).clamp_min(1e-12)
        if self.unit_means:
            mean = F.normalize(mean, dim=1, eps=1e-12)
        pulled = self.rho * prototypes + (1 - self.rho) * mean
        length = pulled.norm(dim=1, keepdim=True)

        # A class stays where it was if no client of the cohort has it, or if its new row would have no direction. With
        # rho = 1 all do: scaling W again would only round.
        stays = (sums == 0).all(1, keepdim=True) | (length < 1e-12) | (self.rho == 1)
        return torch.where(stays, prototypes, pulled / length.clamp_min(1e-12))

    def train(self, clients: Clients, body: Tensor, prototypes: Tensor) -> dict[str, Mean | Sum]:
        model = clients.model
        averaged = self._body(model)
        head = model.mask(_weight(model))

        # The client's last model has its own scale, unless that is shared; all else is what it received.
        theta = unmarked(clients.state.get("model", default=clients.initial)).clone()
        theta[:, head] = prototypes.flatten(-2)
        theta[:, averaged] = body
        trained = clients.sgd(clients.loss, per_client(theta), train=~head, decay=~model.mask("output layer"))
        clients.state["model"] = trained

        means, counts = clients.class_means(self._features(model), trained)
        if self.unit_means:
            means = per_client(F.normalize(means, dim=-1, eps=1e-12))
        weights = counts if self.missing == "samples" else (counts > 0).to(means.dtype)
        num_owned = (counts > 0).sum(1)
        reply: dict[str, Mean | Sum] = {
            "body": Mean(trained[:, averaged]),
            "means": Sum(means * weights[:, :, None], charged=num_owned * means.shape[2], counts_late=True),
        }
        if self.missing != "zero":
            # The means show which classes a client owns, but not how many samples of each it has.
            charged = num_owned if self.missing == "samples" else False
            reply["weights"] = Sum(weights, charged=charged, counts_late=True)
        return reply

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=server["theta"])

    def _body(self, model: FlatModel) -> Tensor:
        """Return a mask ``bool[P+B]`` of the entries that clients train and the server averages."""
        local = model.mask(_weight(model))
        if self.train_scale and not self.share_scale:
            local = local | model.mask(_scale(model))
        return ~local

    def _features(self, model: FlatModel) -> Callable[[Tensor, Tensor], Tensor]:
        """Return f(theta, x) ``[b, d]``, the output layer's inputs, of length one if they are in the network."""

        def features(theta: Tensor, x: Tensor) -> Tensor:
            z, _ = model.features(theta, x)
            return F.normalize(z, dim=-1, eps=1e-12) if self.normalise else z

        return features

    def _initial_prototypes(self, rows: Tensor, seed: int) -> Tensor:
        """Return W ``[C, d]``, from torch's initial weights `rows`."""
        if self.head == "uniform":
            num_classes, dimension = rows.shape
            return uniform_prototypes(num_classes, dimension, seed).to(rows)
        if self.head == "random":
            return rows / rows.norm(dim=1, keepdim=True)
        return rows


def _cosines(prototypes: Tensor) -> dict[str, Tensor]:
    """Return the cosine of each pair of prototypes ``[C, d]``, the closest pair first."""
    first, second = torch.triu_indices(len(prototypes), len(prototypes), 1, device=prototypes.device)
    rows = F.normalize(prototypes, dim=1)
    cosines, order = (rows @ rows.T)[first, second].sort(descending=True, stable=True)
    return {"class": first[order], "other": second[order], "cosine": cosines}


def _weight(model: FlatModel) -> str:
    return model.names("output layer")[0]


def _scale(model: FlatModel) -> str:
    return model.names("output layer")[1]
