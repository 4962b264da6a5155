"""A head that the server re-trains on synthetic features."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs_some
from raypfl.common.limits import COUNT, FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, Sum, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch


@METHODS.register("creff")
class CReFF(Method):
    """Classifier re-training with federated features (Shang et al. 2022).

    Clients run FedAvg. Each client also computes, for each of its classes, the mean gradient of the loss with respect
    to the re-trained head ``h``, on features of the received body. The server optimizes synthetic features of each
    class until their gradients have the direction of the owners' mean gradient, row by row, and trains ``h`` on them.
    Down: model and ``h``. Up: model, and ``|h|`` gradient entries for each class that the client has. The global model
    is the averaged body with ``h``; the personal model is the one that the client trained last.

    Where this departs from the authors' code: ``h`` is trained on from the previous round, by `head_steps` steps on all
    features at once; the code trains a new head in every round, for 300 epochs of mini-batches.

    Attributes
    ----------
    features : synthetic features of each class.
    feature_steps, feature_lr : of gradient descent on them, every round. The rate is the paper's; Dai et al. 2023 take
        0.01 for 200 rounds, which is too small for short runs.
    head_steps, head_lr : of gradient descent on ``h``, every round.
    weighting : whether clients are averaged by their training samples (``samples``) or equally (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    features: Annotated[int, COUNT] = 100
    feature_steps: Annotated[int, FROM_ZERO] = 100
    feature_lr: Annotated[float, POSITIVE, needs_some("feature_steps")] = 0.1
    head_steps: Annotated[int, FROM_ZERO] = 300
    head_lr: Annotated[float, POSITIVE, needs_some("head_steps")] = 0.01
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        model, theta = task.model, task.model.init(task.seed)
        parts = [model.segment(theta, name) for name in model.names("output layer")]
        shape = (task.num_classes, self.features, parts[0].shape[1])
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(task.seed), dtype=torch.float64)
        return {
            "theta": theta,
            "global": theta,
            "head": torch.cat([part.reshape(task.num_classes, -1) for part in parts], dim=1),
            "features": drawn.to(theta),
            "known": torch.zeros(task.num_classes, dtype=torch.bool, device=theta.device),
        }

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, theta=server["theta"], head=server["head"])
        owners, size = reply["owners"], server["features"].shape[2]
        gradients = reply["gradients"] / owners.clamp_min(1)[:, None, None]
        server["theta"], server["known"] = reply["theta"], server["known"] | (owners > 0)
        server["features"] = self.matched(cohort, server["head"], server["features"], gradients, owners > 0)
        head = server["head"] = self.retrained(cohort, server["head"], server["features"], server["known"])
        flat = torch.cat([head[:, :size].reshape(-1), head[:, size:].reshape(-1)])
        server["global"] = server["theta"].masked_scatter(cohort.task.model.mask("output layer"), flat)

    def train(self, clients: Clients, theta: Tensor, head: Tensor) -> dict[str, Mean | Sum]:
        run, classes = clients.model.features, clients.num_classes

        def gradients(p: Tensor, batch: Batch, head: Tensor) -> Tensor:
            z, _ = run(p, batch.x)
            member = F.one_hot(batch.y, classes).to(z.dtype) * batch.weight[:, None]
            inputs = _inputs(z, head)
            error = (inputs @ head.T).softmax(1) - F.one_hot(batch.y, classes)
            of_class = member.T[:, :, None] * error / member.sum(0).clamp_min(1)[:, None, None]
            return of_class.mT @ inputs

        own = clients.map(gradients, theta, head=head)
        clients.state["model"] = trained = clients.sgd(clients.loss, theta)
        owned = clients.label_counts() > 0
        sent = owned.sum(1) * own[0, 0].numel()
        owners = Sum(owned.to(own.dtype), charged=False)
        return {
            "theta": Mean(trained, clients.weights(self.weighting)),
            "gradients": Sum(own, charged=sent),
            "owners": owners,
        }

    def matched(self, cohort: Cohort, head: Tensor, start: Tensor, gradients: Tensor, owned: Tensor) -> Tensor:
        """Features ``[C, n, d]``, moved from `start` until their gradients match ``gradients[C, C, d+1]``."""
        mismatch = partial(_mismatch, head, gradients, owned)
        return cohort.descend(mismatch, start, steps=self.feature_steps, lr=self.feature_lr, text="matching features")

    def retrained(self, cohort: Cohort, head: Tensor, of: Tensor, known: Tensor) -> Tensor:
        """The head ``[C, d+1]``, trained on the features ``of[C, n, d]`` of known classes."""
        labels = torch.arange(len(of), device=of.device)[known].repeat_interleave(of.shape[1])
        inputs = _inputs(of[known].flatten(0, 1), head)
        return cohort.descend(
            lambda h: F.cross_entropy(inputs @ h.T, labels),
            head,
            steps=self.head_steps,
            lr=self.head_lr,
            text="training the head",
        )

    def global_model(self, server: ServerState) -> Tensor:
        return server["global"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=server["theta"])


def _inputs(z: Tensor, head: Tensor) -> Tensor:
    """Features ``[..., d]``, followed by a one if the head ``[C, d+1]`` has a bias."""
    return F.pad(z, (0, head.shape[1] - z.shape[-1]), value=1.0)


def _mismatch(head: Tensor, gradients: Tensor, owned: Tensor, of: Tensor) -> Tensor:
    """``1 - cos`` between rows of both gradients, summed over rows and over the classes that a client has."""
    inputs = _inputs(of, head)
    error = (inputs @ head.T).softmax(-1) - torch.eye(len(of), dtype=of.dtype, device=of.device)[:, None]
    apart = 1 - F.cosine_similarity(error.mT @ inputs / of.shape[1], gradients, dim=-1)
    return (apart.sum(1) * owned).sum()
