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

    Difference from the authors' code: each round trains ``h`` further, by `head_steps` steps on all features at once;
    the code trains a new head in every round, for 300 epochs of mini-batches.

    Attributes
    ----------
    features : number of synthetic features of each class.
    feature_steps, feature_lr : steps and learning rate of gradient descent on the features, in every round. The rate is
        the paper's; Dai et al. 2023 take 0.01 for 200 rounds, which is too small for short runs.
    head_steps, head_lr : steps and learning rate of gradient descent on ``h``, in every round.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    features: Annotated[int, COUNT] = 100
    feature_steps: Annotated[int, FROM_ZERO] = 100
    feature_lr: Annotated[float, POSITIVE, needs_some("feature_steps")] = 0.1
    head_steps: Annotated[int, FROM_ZERO] = 300
    head_lr: Annotated[float, POSITIVE, needs_some("head_steps")] = 0.01
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        model = task.model
        theta = model.init(task.seed)

        layers = [model.segment(theta, name) for name in model.names("output layer")]  # weight and, if any, bias
        columns = [layer.reshape(task.num_classes, -1) for layer in layers]

        shape = (task.num_classes, self.features, layers[0].shape[1])
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(task.seed), dtype=torch.float64)
        return {
            "theta": theta,
            "global": theta,
            "head": torch.cat(columns, dim=1),
            "features": noise.to(theta),
            "known": torch.zeros(task.num_classes, dtype=torch.bool, device=theta.device),
        }

    def round(self, server: ServerState, cohort: Cohort) -> None:
        reply = cohort.run(self.train, theta=server["theta"], head=server["head"])
        owners = reply["owners"]
        gradients = reply["gradients"] / owners.clamp_min(1)[:, None, None]
        server["theta"] = reply["theta"]
        server["known"] = server["known"] | (owners > 0)

        server["features"] = self.match_features(cohort, server["head"], server["features"], gradients, owners > 0)
        server["head"] = self.retrain_head(cohort, server["head"], server["features"], server["known"])

        # The output layer's entries in a model vector: all weights, then the biases.
        size = server["features"].shape[2]
        weight = server["head"][:, :size]
        bias = server["head"][:, size:]
        entries = torch.cat([weight.reshape(-1), bias.reshape(-1)])
        server["global"] = server["theta"].masked_scatter(cohort.task.model.mask("output layer"), entries)

    def train(self, clients: Clients, theta: Tensor, head: Tensor) -> dict[str, Mean | Sum]:
        num_classes = clients.num_classes

        def class_gradients(p: Tensor, batch: Batch, head: Tensor) -> Tensor:
            """Return the head's mean gradient ``(softmax - onehot) z^T`` on each class, ``[C, C, d+1]``."""
            z, _ = clients.model.features(p, batch.x)
            onehot = F.one_hot(batch.y, num_classes)
            member = onehot.to(z.dtype) * batch.weight[:, None]
            inputs = _with_one(z, head)
            error = (inputs @ head.T).softmax(1) - onehot
            class_errors = member.T[:, :, None] * error / member.sum(0).clamp_min(1)[:, None, None]
            return class_errors.mT @ inputs

        # With the received body: all clients' gradients are at the same model.
        gradients = clients.map(class_gradients, theta, head=head)
        trained = clients.sgd(clients.loss, theta)
        clients.state["model"] = trained

        owned = clients.label_counts() > 0
        numbers = owned.sum(1) * gradients[0, 0].numel()
        return {
            "theta": Mean(trained, clients.weights(self.weighting)),
            "gradients": Sum(gradients, charged=numbers),
            # The gradients show which classes a client owns.
            "owners": Sum(owned.to(gradients.dtype), charged=False),
        }

    def match_features(self, cohort: Cohort, head: Tensor, start: Tensor, gradients: Tensor, owned: Tensor) -> Tensor:
        """Move features ``[C, n, d]`` from `start` until their gradients match ``gradients[C, C, d+1]``."""
        mismatch = partial(_mismatch, head, gradients, owned)
        return cohort.descend(mismatch, start, steps=self.feature_steps, lr=self.feature_lr, text="matching features")

    def retrain_head(self, cohort: Cohort, head: Tensor, features: Tensor, known: Tensor) -> Tensor:
        """Train the head ``[C, d+1]`` on the ``features[C, n, d]`` of classes that some client has had so far."""
        num_classes, per_class, _ = features.shape
        labels = torch.arange(num_classes, device=features.device)[known].repeat_interleave(per_class)
        inputs = _with_one(features[known].flatten(0, 1), head)
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


def _with_one(z: Tensor, head: Tensor) -> Tensor:
    """Append a one to features ``[..., d]`` if the head ``[C, d+1]`` has a bias."""
    return F.pad(z, (0, head.shape[1] - z.shape[-1]), value=1.0)


def _mismatch(head: Tensor, gradients: Tensor, owned: Tensor, features: Tensor) -> Tensor:
    """Return ``1 - cos`` between rows of both gradients, summed over rows and over the classes that a client has."""
    num_classes, per_class, _ = features.shape
    inputs = _with_one(features, head)
    onehot = torch.eye(num_classes, dtype=features.dtype, device=features.device)[:, None]
    error = (inputs @ head.T).softmax(-1) - onehot
    synthetic = error.mT @ inputs / per_class
    distance = 1 - F.cosine_similarity(synthetic, gradients, dim=-1)
    return (distance.sum(1) * owned).sum()
