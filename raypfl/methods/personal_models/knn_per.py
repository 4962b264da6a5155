"""A global model beside a memory of each client's own samples."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE, COUNT, POSITIVE
from raypfl.common.messages import per_client, unmarked
from raypfl.federation.method import METHODS, ServerView
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.extras import Other
from raypfl.models.predictor import Predictor

NEIGHBOURS = (5, 10)
"""Candidates for k."""

SHARES = tuple(tenths / 10 for tenths in range(11))
"""Candidates for lambda."""

FAR = 1e6
"""Added to the distance of anything that is not a neighbour, so that its weight exp(-distance) is 0."""


@METHODS.register("knn-per")
class KNNPer(FedAvg):
    """FedAvg whose clients mix in the classes of their nearest own samples (Marfoq et al. 2022).

    ``p = lambda p_kNN + (1 - lambda) softmax(logits)``, with ``p_kNN(y)`` in proportion to the sum, over the k training
    samples of class y that are nearest, of ``exp(-||z - z_j||^2 / (d scale))``. z are the d inputs of the output layer
    of the global model. Nothing is sent or kept beside FedAvg's model: the memory is made for an evaluation, and a
    client that was never trained makes one too. With ``share = 0`` it predicts as FedAvg.

    In the paper, `neighbours` and `share` are chosen by cross-validation, the memory may be smaller, and ``scale`` is
    1.

    Attributes
    ----------
    neighbours : number of neighbours, k; None: 5 or 10, whichever is better for the client by leave-one-out on its
        training samples.
    share : weight of the neighbours, lambda; None: one of 0, 0.1, ..., 1, chosen in the same way. The global model has
        been trained on these samples, so it looks better there than it is.
    scale : divisor of the squared distances; 100 in Scott et al. 2024.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    neighbours: Annotated[int | None, COUNT] = 10
    share: Annotated[float | None, CHANCE] = 0.5
    scale: Annotated[float, POSITIVE] = 100.0

    def personal_model(self, clients: Clients, server: ServerView) -> Predictor:
        theta = server["theta"]
        return Predictor(
            self.predict,
            shared=clients.other(theta),
            memory=clients.map(lambda p, batch: clients.model.features(p, batch.x)[0], theta),
            labels=clients.map(lambda p, batch: batch.y, theta),
            present=clients.map(lambda p, batch: batch.weight, theta),  # 0 where a shorter memory is padded
            choice=self._choices(clients, theta),
        )

    def predict(
        self, x: Tensor, shared: Other, memory: Tensor, labels: Tensor, present: Tensor, choice: Tensor
    ) -> Tensor:
        """Return the logarithms of one client's mixed probabilities ``[b, classes]``."""
        k, share = choice
        z, logits = shared.model.features(shared.theta, x)
        votes = self._votes(self._distances(z, memory, present), labels, logits.shape[1], k)
        return (share * votes + (1 - share) * logits.softmax(1)).clamp_min(1e-12).log()

    def unseen_model(self, clients: Clients, server: ServerView) -> Predictor:
        return self.personal_model(clients, server)

    @property
    def _candidates(self) -> Tensor:
        """Candidate pairs of k and lambda, ``[n, 2]``; of equally good ones, the first is taken."""
        neighbours = NEIGHBOURS if self.neighbours is None else (self.neighbours,)
        shares = SHARES if self.share is None else (self.share,)
        return torch.cartesian_prod(
            torch.tensor(neighbours, dtype=torch.float64),
            torch.tensor(shares, dtype=torch.float64),
        )

    def _choices(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return k and lambda of each client, ``[K, 2]``, by leave-one-out accuracy on its training samples."""
        pairs = self._candidates.to(clients.device, clients.model.dtype)
        if len(pairs) == 1:
            return per_client(pairs.expand(len(clients), -1))

        def accuracies(p: Tensor, batch: Batch) -> Tensor:
            z, logits = clients.model.features(p, batch.x)
            probabilities = logits.softmax(1)
            itself = torch.eye(len(z), dtype=z.dtype, device=z.device)
            distances = self._distances(z, z, batch.weight) + FAR * itself

            by_pair = []
            for k, share in pairs:
                mixed = share * self._votes(distances, batch.y, logits.shape[1], k) + (1 - share) * probabilities
                by_pair.append(batch.mean((mixed.argmax(1) == batch.y).to(z.dtype)))
            return torch.stack(by_pair)

        return per_client(pairs[unmarked(clients.map(accuracies, theta)).argmax(1)])

    def _distances(self, z: Tensor, memory: Tensor, present: Tensor) -> Tensor:
        """Return scaled squared distances ``[b, m]`` to a client's memory; padding is farther than any sample."""
        return torch.cdist(z, memory).square() / (z.shape[1] * self.scale) + FAR * (1 - present)

    def _votes(self, distances: Tensor, labels: Tensor, num_classes: int, k: Tensor) -> Tensor:
        """Return ``p_kNN``, ``[b, num_classes]``."""
        # k is a tensor, which differs between clients: all take the largest candidate, and drop what is beyond their k.
        largest = min(int(self._candidates[:, 0].max()), distances.shape[1])
        nearest, index = distances.topk(largest, largest=False)
        beyond = torch.arange(largest, device=nearest.device) >= k
        weights = torch.softmax(-nearest - FAR * beyond, dim=1)
        return (weights[..., None] * F.one_hot(labels[index], num_classes)).sum(1)
