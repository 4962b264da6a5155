"""A shared body with aligned features, and personal output layers combined from those of other clients."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT, FROM_ZERO, POSITIVE
from raypfl.common.messages import Each, Mean, Scatter, Sum, Weighting, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.simplex import least_quadratic

LEAST_WEIGHT = 1e-3
"""Weights up to this are dropped from a combination."""


@METHODS.register("fedpac")
class FedPAC(Method):
    """Feature alignment and classifier collaboration (Xu, Tong and Huang 2023).

    Client i first trains its output layer on the received body, then the body on ``F_i + lam mean (z - c_y)^2``: the
    mean is over mini-batch and features, and ``c_y`` the server's mean feature of class y or, if it has none, the
    client's own; the first round has no such term. The body is averaged, and client i's next output layer is ``sum_j
    a_ij phi_j`` over the cohort, where ``a_i`` minimises ``sum_j a_j^2 V_j + ||h_i - sum_j a_j h_j||^2`` over the
    simplex. On the received body, ``h_i`` are its mean features by class times the classes' shares, and ``V_i`` is the
    variance of this estimate. Down: body, output layer, C d class means; up: the same, ``h_i``, and ``V_i``; nothing is
    sent for classes that a client lacks. Clients keep nothing: the server has their output layers. A client that was
    never drawn has the initial one; clients that are never trained also train it before they are evaluated. There is no
    global model. With ``lam = 0`` and every client's own output layer it is FedRep.

    The combinations ``a_i`` are exact; the authors' code drops small eigenvalues. PFLlib combines output layers and
    statistics of different clients.

    Attributes
    ----------
    lam : weight of the alignment, lambda.
    head_epochs : number of epochs of the output layer, with the body fixed; the body is trained for training.epochs.
    head_lr : learning rate of the output layer; None: that of the body.
    weighting : weights of clients in the mean of bodies: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    lam: Annotated[float, FROM_ZERO] = 1.0
    head_epochs: Annotated[int, COUNT] = 1
    head_lr: Annotated[float | None, POSITIVE] = 0.1
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        initial = task.model.init(task.seed)
        head = task.model.mask("output layer")
        means = initial.new_zeros(task.num_classes, task.model.num_features)
        return {"body": initial[~head], "heads": initial[head].repeat(task.num_clients, 1), "means": means}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        means = server["means"]
        strength = self.lam if bool(means.any()) else 0.0
        head = Scatter(cohort.rows(server["heads"]))
        reply = cohort.run(self.train, body=server["body"], head=head, means=means, strength=strength)

        count = reply["counts"][:, None]
        server["body"] = reply["body"]
        server["means"] = torch.where(count > 0, reply["means"] / count.clamp_min(1), means)

        present = torch.from_numpy(cohort.present).to(means.device)
        heads = reply["head"].clone()
        heads[present] = self.weights(reply["shares"][present], reply["variance"][present]) @ heads[present]
        server["heads"] = cohort.with_rows(server["heads"], heads)

    def weights(self, shares: Tensor, variance: Tensor) -> Tensor:
        """Return the weights ``a[C, C]`` of output layers, given ``h[C, classes * d]`` and ``V[C]``."""
        rows = []
        for client in shares:
            differences = client - shares
            weights = least_quadratic(torch.diag(variance) + differences @ differences.T)
            weights = weights * (weights > LEAST_WEIGHT)
            rows.append(weights / weights.sum())
        return torch.stack(rows)

    def train(
        self, clients: Clients, body: Tensor, head: Tensor, means: Tensor, strength: float
    ) -> dict[str, Mean | Sum | Each]:
        def aligned_loss(p: Tensor, batch: Batch, target: Tensor) -> tuple[Tensor, Tensor]:
            z, logits = clients.model.features(p, batch.x)
            distance = batch.mean((z - target[batch.y]).square().mean(1))
            return clients.objective.loss(logits, batch), strength * distance

        is_head = clients.model.mask("output layer")
        theta = self._joined(clients, body, head)
        means_before, counts, squared_norm = self._class_means(clients, theta)
        shares = counts / counts.sum(1, keepdim=True)
        shares_of_means = shares[:, :, None] * means_before
        variance = (shares * squared_norm).sum(1) - shares_of_means.square().sum((1, 2))

        known = (means != 0).any(1)
        target = torch.where(known[:, None], means, means_before)
        theta = clients.sgd(clients.loss, theta, train=is_head, epochs=self.head_epochs, lr=self.head_lr)
        theta = clients.sgd(aligned_loss, theta, train=~is_head, target=target)

        means_after, _, _ = self._class_means(clients, theta)
        num_owned = (counts > 0).sum(1)
        numbers = num_owned * means.shape[1]
        return {
            "body": Mean(theta[:, ~is_head], clients.weights(self.weighting)),
            "head": Each(theta[:, is_head]),
            "means": Sum(means_after * counts[:, :, None], charged=numbers),
            "counts": Sum(counts, charged=num_owned),
            "shares": Each(shares_of_means.flatten(1), charged=numbers),
            "variance": Each(variance.clamp_min(0) / counts.sum(1)),
        }

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self._joined(clients, server["body"], server["heads"][list(clients.ids)])

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        """Train the initial output layer, with the body fixed."""
        head = clients.model.mask("output layer")
        theta = self._joined(clients, server["body"], clients.initial[head])
        epochs = self.head_epochs
        return clients.sgd(clients.loss, theta, train=head, epochs=epochs, lr=self.head_lr, stream="unseen")

    def _joined(self, clients: Clients, body: Tensor, head: Tensor) -> Tensor:
        """Return models ``[K, P+B]`` of a body and output layers, one for all or ``[K, H]``."""
        is_head = clients.model.mask("output layer")
        theta = clients.initial.repeat(len(clients), 1)
        theta[:, ~is_head] = body
        theta[:, is_head] = unmarked(head)
        return per_client(theta)

    def _class_means(self, clients: Clients, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean features by class ``[K, C, d]``, counts ``[K, C]``, and mean squared norms ``[K, C]``."""

        def features(p: Tensor, x: Tensor) -> Tensor:
            z, _ = clients.model.features(p, x)
            return torch.cat([z, z.square().sum(1, keepdim=True)], dim=1)

        means, counts = clients.class_means(features, theta)
        return means[:, :, :-1], counts, means[:, :, -1]
