"""A shared body, and output layers that follow from the Gaussian distributions of features."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.models.flat import FlatModel
from raypfl.models.heads import output_layer

EPSILON = 1e-4
"""Share of the isotropic part in a covariance, and what is added to class shares before they are normalised."""

SEARCH_STEPS = 20
"""Steps of the search for beta: each makes the interval that contains it .618 times as long."""


class Gaussians(NamedTuple):
    """Normal distributions of the features of each class.

    Attributes
    ----------
    means : ``[C, d]``.
    covariance : ``[d, d]``, the same for all classes.
    """

    means: Tensor
    covariance: Tensor

    def mixed(self, shared: Gaussians, beta: float) -> Gaussians:
        """Return ``beta self + (1 - beta) shared``."""
        return Gaussians(*(beta * a + (1 - beta) * b for a, b in zip(self, shared, strict=True)))

    def layer(self, shares: Tensor) -> Tensor:
        """Return the output layer of the Bayes classifier for classes with ``shares[C]``: weights, then biases."""
        covariance = (1 - EPSILON) * self.covariance
        covariance.diagonal().add_(EPSILON * self.covariance.trace() / len(covariance))
        weight = torch.linalg.solve(covariance, self.means.T).T
        prior = shares + EPSILON
        bias = (prior / prior.sum()).log() - (self.means * weight).sum(1) / 2
        return torch.cat([weight.flatten(), bias])


@METHODS.register("pfedfda")
class PFedFDA(Method):
    """Personalized federated learning via feature distribution adaptation (McLaughlin and Su 2024).

    The output layer is that of linear discriminant analysis, for class means M and one covariance S of the features
    (its inputs), and for the client's own class shares. A client trains the received body below the layer of the
    server's M and S, which stays fixed. Then it estimates both from its samples, ``M_k`` and ``S_k``, and chooses
    ``beta`` between 0 and 1 by cross-validation: the cross-entropy of each half of its samples under ``beta`` times the
    estimate from the other half plus ``1 - beta`` times the server's. ``beta M_k + (1 - beta) M`` and the same of S are
    sent, and averaged. Down and up: body, M, S. Clients keep beta.

    A personal model is the newest body with the layer of ``beta M_k + (1 - beta) M``, estimated anew. A client that was
    never trained has ``beta = 0``. The global model has the server's M and S, and equal class shares.

    Features are those of the trained body, in evaluation mode and without augmentation; a golden-section search finds
    ``beta``; a class that a client lacks has the server's mean. The authors' code collects features during training,
    draws halves by class, starts L-BFGS at 1/2, can have one ``beta`` for means and another for covariances, adds 1e-4
    to every entry of a covariance, and takes the server's mean for a class of two samples or fewer, too. Evaluations
    search ``beta`` anew there, for all clients; here it is that of a client's last training.

    Attributes
    ----------
    ridge : what is added to the diagonal of a client's covariance; 1 in the authors' code.
    weighting : weights of clients in the averages: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    ridge: Annotated[float, FROM_ZERO] = 1.0
    weighting: Weighting = "samples"

    def check(self, model: FlatModel) -> None:
        name, layer = output_layer(model.module)
        if layer.bias is None:
            raise ConfigError(f"pFedFDA computes the bias of the output layer, but {name} has none; give it one.")
        if "bias" not in model.output_tensors:
            raise ConfigError(
                f"pFedFDA computes the bias of the output layer, but {name}.bias is frozen; leave it out of "
                "model.frozen."
            )

    def start(self, task: Task) -> ServerState:
        initial = task.model.init(task.seed)
        generator = torch.Generator().manual_seed(task.seed)
        draws = torch.rand(task.num_classes, task.model.num_features, generator=generator, dtype=torch.float64)
        means = draws.to(initial)
        covariance = torch.eye(means.shape[1], dtype=means.dtype, device=means.device)
        return {"theta": initial, "means": means, "covariance": covariance}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        head = cohort.task.model.mask("output layer")
        means = server["means"]
        covariance = server["covariance"]
        reply = cohort.run(self.train, body=server["theta"][~head], means=means, covariance=covariance)

        server["means"] = reply["means"]
        server["covariance"] = reply["covariance"]
        layer = Gaussians(reply["means"], reply["covariance"]).layer(torch.ones_like(means[:, 0]) / len(means))
        server["theta"] = server["theta"].masked_scatter(~head, reply["body"]).masked_scatter(head, layer)

    def train(self, clients: Clients, body: Tensor, means: Tensor, covariance: Tensor) -> dict[str, Mean]:
        head = clients.model.mask("output layer")
        received = Gaussians(means, covariance)
        shares = class_shares(clients)
        start = clients.initial.masked_scatter(~head, body).repeat(len(clients), 1)
        start[:, head] = torch.stack([received.layer(row) for row in shares])
        trained = clients.sgd(clients.loss, per_client(start), train=~head)

        betas = []
        mixtures = []
        permuted = clients.generators("halves")
        for (z, y), generator, row in zip(features(clients, trained), permuted, shares, strict=True):
            order = torch.randperm(len(z), generator=generator).to(z.device)
            beta = self.best_beta(z[order], y[order], received, row)
            betas.append(beta)
            mixtures.append(self.estimated(z, y, received).mixed(received, beta))

        clients.state["beta"] = torch.tensor(betas, dtype=body.dtype, device=body.device)
        weight = clients.weights(self.weighting)
        return {
            "body": Mean(trained[:, ~head], weight),
            "means": Mean(torch.stack([mixture.means for mixture in mixtures]), weight),
            "covariance": Mean(torch.stack([mixture.covariance for mixture in mixtures]), weight),
        }

    def estimated(self, z: Tensor, y: Tensor, received: Gaussians) -> Gaussians:
        """Estimate from features ``z[n, d]`` of classes ``y[n]``; a class without samples has its received mean."""
        member = F.one_hot(y, len(received.means)).to(z.dtype)
        count = member.sum(0)[:, None]
        means = torch.where(count > 0, member.T @ z / count.clamp_min(1), received.means)
        apart = z - means[y]
        identity = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return Gaussians(means, apart.T @ apart / max(len(z) - 1, 1) + self.ridge * identity)

    def best_beta(self, z: Tensor, y: Tensor, received: Gaussians, shares: Tensor) -> float:
        """Return beta with the least cross-entropy of both halves of the samples, by golden-section search."""
        half = len(z) // 2
        folds = [(slice(half), slice(half, None)), (slice(half, None), slice(half))]
        estimates = [(self.estimated(z[fit], y[fit], received), test) for fit, test in folds]

        def error(beta: float) -> float:
            total = 0.0
            for estimate, test in estimates:
                layer = estimate.mixed(received, beta).layer(shares)
                weight, bias = layer.split([estimate.means.numel(), len(shares)])
                outputs = F.linear(z[test], weight.reshape(estimate.means.shape), bias)
                total += float(F.cross_entropy(outputs, y[test], reduction="sum"))
            return total

        return least(error)

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        head = clients.model.mask("output layer")
        received = Gaussians(server["means"], server["covariance"])
        rows = server["theta"].repeat(len(clients), 1)
        betas = clients.state.get("beta", default=torch.zeros((), dtype=rows.dtype)).tolist()
        samples = features(clients, per_client(rows))
        for k, (beta, (z, y), shares) in enumerate(zip(betas, samples, class_shares(clients), strict=True)):
            rows[k, head] = self.estimated(z, y, received).mixed(received, beta).layer(shares)
        return per_client(rows)


def class_shares(clients: Clients) -> Tensor:
    """Return the shares ``[K, C]`` of classes in each client's training samples."""
    counts = unmarked(clients.label_counts())
    return counts / counts.sum(1, keepdim=True)


def features(clients: Clients, theta: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the features ``[n, d]`` and classes ``[n]`` of each client's training samples at models ``[K, P+B]``."""

    def features_and_class(p: Tensor, batch: Batch) -> Tensor:
        z, _ = clients.model.features(p, batch.x)
        return torch.cat([z, F.one_hot(batch.y, clients.num_classes) * batch.weight[:, None]], dim=1)

    pairs = []
    for rows in unmarked(clients.map(features_and_class, theta)):
        z, member = rows.split([rows.shape[1] - clients.num_classes, clients.num_classes], dim=1)
        is_sample = member.any(1)  # other rows are padding
        pairs.append((z[is_sample], member[is_sample].argmax(1)))
    return pairs


def least(function: Callable[[float], float]) -> float:
    """Return where between 0 and 1 a function is least, by golden-section search: it has one minimum there."""
    ratio = (math.sqrt(5) - 1) / 2
    low = 0.0
    high = 1.0
    for _ in range(SEARCH_STEPS):
        lower = high - ratio * (high - low)
        upper = low + ratio * (high - low)
        if function(lower) <= function(upper):
            high = upper
        else:
            low = lower
    return min(0.0, 1.0, (low + high) / 2, key=function)
