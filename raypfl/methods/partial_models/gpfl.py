"""Features for all clients and for the client alone, by a valve with two conditions."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.method import METHODS
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.partial_models.shared_part import SharedPart
from raypfl.models.flat import FlatModel
from raypfl.models.heads import (
    VALVE,
    ConditionedLinear,
    conditional_valve,
    output_layer,
    output_segments,
    with_output_layer,
)


@METHODS.register("gpfl")
class GPFL(SharedPart):
    """Simultaneously learned global and personalized features (Zhang et al. 2023, ICCV).

    The server has an embedding ``e_c`` of each class. A valve ``CoV(z, u)`` turns features z, the inputs of the output
    layer, into those for a condition u. Client k minimises the loss of its output layer on ``CoV(z, p_k)``, plus two
    terms that guide ``CoV(z, g)``: the cross-entropy of its cosines with the embeddings, and ``lam`` times the norm of
    its distance, over a mini-batch, to the received embeddings of the samples' classes. The conditions come from the
    received embeddings: g is their mean, and ``p_k`` their mean by the client's class shares. Body, valve and
    embeddings are sent both ways; the output layer is personal.

    A client that was never trained has the initial output layer; the global model also has the condition 0.

    In the authors' code, the conditions come from the embeddings that the client trained last, and are 0 in the first
    round. PFLlib has ``{lam: 1, mu: 0}``.

    Attributes
    ----------
    lam : weight of the distance to the embeddings.
    mu : weight decay of embeddings and valve. With `lam`: 0.01 and 0.1 for a CNN, 0.0001 and 0 for a ResNet-18.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    lam: Annotated[float, FROM_ZERO] = 0.01
    mu: Annotated[float, FROM_ZERO] = 0.1
    weighting: Weighting = "samples"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, ConditionedLinear(layer))

    def personal_part(self, model: FlatModel) -> Tensor:
        return model.mask(output_segments(model, "weight", "bias", "condition"))

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        model = clients.model
        names = {name: output_segments(model, name) for name in ("embeddings", *VALVE)}

        def guided(p: Tensor, batch: Batch, embeddings: Tensor) -> tuple[Tensor, Tensor]:
            z, outputs = model.features(p, batch.x)
            tensors = model.unflatten(p)
            learned = {name: tensors[segment] for name, segment in names.items()}

            guide = conditional_valve(z, embeddings.mean(0), learned)
            cosines = F.normalize(guide, dim=1) @ F.normalize(learned["embeddings"], dim=1).T
            direction = batch.mean(F.cross_entropy(cosines, batch.y, reduction="none"))
            apart = (guide - embeddings[batch.y]) * batch.weight[:, None]
            decay = torch.stack([tensor.square().sum() for tensor in learned.values()]).sum()
            added = direction + self.lam * torch.linalg.vector_norm(apart) + self.mu / 2 * decay
            return clients.objective.loss(outputs, batch), added

        start = self.received(clients, shared)
        embeddings = per_client(model.segment(unmarked(start), names["embeddings"]))
        fixed = model.mask(output_segments(model, "condition"))
        trained = clients.sgd(guided, start, train=~fixed, embeddings=embeddings)
        return self.sent(clients, trained, clients.weights(self.weighting))

    def personalized(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return models ``[K, P+B]`` with their clients' conditions, from the embeddings in `theta`."""
        rows = unmarked(super().personalized(clients, theta))
        counts = unmarked(clients.label_counts())
        embeddings = clients.model.segment(theta, output_segments(clients.model, "embeddings"))
        condition = clients.model.mask(output_segments(clients.model, "condition"))
        rows[:, condition] = counts / counts.sum(1, keepdim=True) @ embeddings
        return per_client(rows)
