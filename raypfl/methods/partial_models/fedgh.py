"""A global output layer that the server trains on the clients' mean features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT, FROM_ZERO
from raypfl.common.messages import Each
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.partial_models.shared_part import SharedPart
from raypfl.models.flat import FlatModel
from raypfl.models.heads import output_layer, output_segments


@METHODS.register("fedgh")
class FedGH(SharedPart):
    """A generalized global header (Yi et al. 2023).

    A client puts the received output layer on its own body, trains both, and sends the mean feature of each of its
    classes. The server trains the output layer on these pairs of a feature and a class, by the loss of the experiment.
    Down: the output layer. Up: a mean feature of each class that the client has, ``C_k d`` numbers. The body stays on
    the client, and with the newest output layer is its personal model; a client that was never trained has the initial
    body. The authors' released code does not train the output layer.

    Attributes
    ----------
    head_lr : learning rate of the output layer on the server; None: the round's; PFLlib has 1, HtFLlib 0.01.
    head_epochs, head_batch : passes over the pairs, in an order that is drawn anew, and pairs in a step. One pass is
        PFLlib's; HtFLlib has 100.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    head_lr: Annotated[float | None, FROM_ZERO] = None
    head_epochs: Annotated[int, COUNT] = 1
    head_batch: Annotated[int, COUNT] = 10

    def check(self, model: FlatModel) -> None:
        output_layer(model.module)  # refuses a network without a dense one

    def personal_part(self, model: FlatModel) -> Tensor:
        return model.mask("feature extractor")

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        reply = cohort.run(self.train, shared=server["theta"][self.shared_part(model)])

        def loss(p: Tensor, batch: Batch) -> Tensor:
            layer = model.unflatten(p)
            weight = layer[output_segments(model, "weight")]
            outputs = F.linear(batch.x, weight, layer.get(output_segments(model, "bias")))
            return cohort.task.objective.loss(outputs, batch)

        lr = cohort.lr if self.head_lr is None else self.head_lr
        batches = list(self._batches(cohort, reply["means"], reply["owned"] > 0))
        server["theta"] = cohort.sgd(
            loss, server["theta"], batches, lr=lr, train="output layer", mode="eval", text="training the output layer"
        )

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Each]:  # type: ignore[override]
        trained = clients.sgd(clients.loss, self.received(clients, shared))
        clients.state["personal"] = trained[:, self.personal_part(clients.model)]

        means, counts = clients.class_means(lambda p, x: clients.model.features(p, x)[0], trained)
        owned = (counts > 0).to(means.dtype)
        return {
            "means": Each(means, charged=owned.sum(1).long() * means.shape[2]),
            "owned": Each(owned, charged=False),  # the means show which classes a client has
        }

    def _batches(self, cohort: Cohort, means: Tensor, owned: Tensor) -> Iterator[Batch]:
        """Yield mini-batches of the pairs of a mean feature and its class, of ``means[C, classes, d]``."""
        features = means[owned]
        classes = torch.arange(owned.shape[1], device=owned.device).expand(owned.shape)[owned]
        generator = cohort.generator("pairs")
        for _ in range(self.head_epochs):
            order = torch.randperm(len(features), generator=generator).to(features.device)
            for index in order.split(self.head_batch):
                yield Batch(features[index], classes[index], torch.ones_like(features[index, 0]))
