"""Model-contrastive federated learning."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.extras import Other


@METHODS.register("moon")
class Moon(FedAvg):
    """Model-contrastive federated learning (Li, He and Song 2021).

    Features (the inputs of the output layer) are pulled toward those of the received model and away from those of the
    client's last local model. The model is sent both ways. ``mu: 0`` is FedAvg. In the paper, features are those of a
    projection head below the output layer, and ``mu`` is 5 on CIFAR-10.

    Attributes
    ----------
    mu : weight of the contrastive loss.
    temperature : temperature of its softmax.
    """

    mu: Annotated[float, FROM_ZERO] = 1.0
    temperature: Annotated[float, POSITIVE] = 0.5

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        def contrasted(p: Tensor, batch: Batch, sent: Other, previous: Other) -> tuple[Tensor, Tensor]:
            features, outputs = clients.model.features(p, batch.x)
            of_samples = partial(clients.objective.features_of_samples, targets=batch.y)
            z = of_samples(features)
            near = F.cosine_similarity(z, of_samples(sent.features(batch.x))) / self.temperature
            far = F.cosine_similarity(z, of_samples(previous.features(batch.x))) / self.temperature

            # -log(e^near / (e^near + e^far)). As softplus(far - near), which is the same, it would be rounded otherwise
            # for the last clients of a group, and runs could not advance together.
            contrast = -F.log_softmax(torch.stack([near, far], -1), -1)[..., 0]
            return clients.objective.loss(outputs, batch), self.mu * batch.mean(contrast)

        previous = clients.state.get("previous", default=theta)
        trained = clients.sgd(contrasted, theta, sent=clients.other(theta), previous=clients.other(previous))
        clients.state["previous"] = trained
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}
