"""A shared body that is aligned with the client's own before training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs_some
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, per_client, unmarked
from raypfl.federation.method import METHODS, ServerView
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.local_training import sample_passes
from raypfl.methods.partial_models.shared_part import SharedPart


@METHODS.register("fedas")
class FedAS(SharedPart):
    """Federated parameter-alignment and client-synchronization (Yang, Huang and Ye 2024).

    The output layer is personal. Client k measures the mean feature ``m_c`` of each of its classes at its last model,
    and trains the received body for some epochs on ``sum_c mean(||z - m_c||^2 / d)`` over the samples of each class c
    in a mini-batch. Then it puts its own output layer on it and trains everything. The server weights clients by the
    trace of their Fisher information: the sum of ``||gradient||^2`` over the mini-batches of a pass, in evaluation
    mode. Down: the body. Up: the body and the trace.

    The personal model is the one that the client trained last; before that, the initial one. Without alignment and
    traces it is FedPer whose clients keep their last body, bit for bit. A client that takes part for the first time
    aligns with the initial model. In the authors' code, all clients change one model in turn as they align, and all of
    them measure traces; the alignment has a rate of 0.01 and mini-batches of 16, here those of the round.

    Attributes
    ----------
    align_epochs, align_lr : epochs and learning rate of the alignment; None: the round's rate.
    weighting : weights of clients in the average: traces of Fisher information (``fisher``), training samples
        (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    align_epochs: Annotated[int, FROM_ZERO] = 1
    align_lr: Annotated[float | None, POSITIVE, needs_some("align_epochs")] = None
    weighting: Literal["fisher", "samples", "uniform"] = "fisher"

    def needs_weights(self) -> bool:
        return self.weighting == "fisher"

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        start = self.received(clients, shared)
        trained = clients.sgd(clients.loss, self._aligned(clients, start))
        clients.state["model"] = trained
        if self.weighting != "fisher":
            return self.sent(clients, trained, clients.weights(self.weighting))
        trace = self._trace(clients, trained)
        return self.sent(clients, trained, trace) | {"trace": Mean(trace)}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=clients.initial)

    def _aligned(self, clients: Clients, start: Tensor) -> Tensor:
        """Return models ``[K, P+B]`` whose bodies are close to the features of the clients' last models."""
        if self.align_epochs == 0:
            return start

        def features(theta: Tensor, x: Tensor) -> Tensor:
            z, _ = clients.model.features(theta, x)
            return z

        def distance(p: Tensor, batch: Batch, means: Tensor) -> Tensor:
            z = features(p, batch.x)
            member = F.one_hot(batch.y, clients.num_classes).to(z.dtype) * batch.weight[:, None]
            in_class = member / member.sum(0).clamp_min(1)
            return ((z - means[batch.y]).square().mean(1) * in_class.sum(1)).sum()

        last = clients.state.get("model", default=clients.initial)
        means, _ = clients.class_means(features, last)
        body = self.shared_part(clients.model)
        return clients.sgd(
            distance,
            start,
            epochs=self.align_epochs,
            lr=self.align_lr,
            train=body,
            stream="alignment",
            report=None,
            means=means,
        )

    def _trace(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return the sum of the squared norms of gradients over the mini-batches of a pass, ``[K]``."""
        trace = torch.zeros_like(unmarked(clients.num_samples))
        once = torch.ones_like(trace)
        for takes_step, batches in sample_passes(clients, "trace"):
            gradient = clients.model.parameters(unmarked(clients.vjp(clients.loss, theta, once, batches)))
            trace = trace + takes_step * gradient.square().sum(1)
        # Gradients may vanish on all clients; weights must still be positive.
        return per_client(trace.clamp_min(torch.finfo(trace.dtype).tiny))
