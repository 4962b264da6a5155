"""A personal bias of the features, and a pull of their mean to a consensus."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, SHARE
from raypfl.common.messages import Broadcast, Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.partial_models.shared_part import SharedPart
from raypfl.models.flat import FlatModel
from raypfl.models.heads import ShiftedLinear, output_layer, output_segments, with_output_layer


@METHODS.register("feddbe")
class FedDBE(SharedPart):
    """Domain bias eliminator (Zhang et al. 2023, NeurIPS).

    Client k adds a bias ``b_k`` to the features z, the inputs of the output layer. It minimises ``F_k + kappa/2 *
    mean((m - consensus)^2)``, the mean over features, where ``m <- (1 - momentum) m + momentum * mean(z)`` runs over
    the mini-batches of a round, from 0; the gradient goes through the last term. The bias is trained with the rest, and
    stays on the client, from 0. The consensus is the mean of m over all trained clients after a local training without
    the bias before the first round, whose models are discarded; every client takes part in it, also those that the
    first cohort lacks.

    Without the bias and with ``kappa: 0`` it is FedAvg. A client that was never trained has the global model, whose
    bias is 0.

    Attributes
    ----------
    kappa : weight of the pull. The authors' code defines the loss with 1/2; 50 and 1 below for a CNN, 1 and 0.1 for a
        ResNet-18. In PFLlib the pull is off unless it is set.
    momentum : weight of a mini-batch in m.
    train_bias : whether the bias is trained.
    weighting : weights of clients in both means: training samples (``samples``) or equal (``uniform``).
    """

    needs_output_layer: ClassVar[bool] = True

    kappa: Annotated[float, FROM_ZERO] = 50.0
    momentum: Annotated[float, SHARE] = 1.0
    train_bias: bool = True
    weighting: Weighting = "samples"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, ShiftedLinear(layer))

    def personal_part(self, model: FlatModel) -> Tensor:
        return model.mask(output_segments(model, "shift"))

    def shared_part(self, model: FlatModel) -> Tensor:
        return ~model.mask(output_segments(model, "shift", "mean"))

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shared = self.shared_part(cohort.task.model)
        if "consensus" not in server:
            reply = cohort.run_everyone(self.measure, shared=server["theta"][shared])
            server["consensus"] = reply["mean"]
            server["new"] = torch.ones(cohort.task.num_clients, dtype=torch.bool)

        # The consensus never changes, so a client gets it once.
        consensus = Broadcast(server["consensus"], charged=server["new"] * server["consensus"].numel())
        reply = cohort.run(self.train, shared=server["theta"][shared], consensus=consensus)
        server["theta"] = server["theta"].masked_scatter(shared, reply["shared"])
        server["new"] = server["new"].clone()
        server["new"][list(cohort.ids)] = False

    def measure(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        def followed(p: Tensor, batch: Batch) -> Tensor:
            loss, _ = self._loss_and_mean(clients, p, batch)
            return loss

        without_bias = ~self.personal_part(clients.model)
        trained = clients.sgd(followed, self.received(clients, shared), train=without_bias)
        mean = trained[:, clients.model.mask(output_segments(clients.model, "mean"))]
        return {"mean": Mean(mean, clients.weights(self.weighting))}

    def train(  # type: ignore[override]
        self, clients: Clients, shared: Tensor, consensus: Tensor
    ) -> dict[str, Mean]:
        def pulled(p: Tensor, batch: Batch, consensus: Tensor) -> tuple[Tensor, Tensor]:
            loss, mean = self._loss_and_mean(clients, p, batch)
            return loss, self.kappa / 2 * (mean - consensus).square().mean()

        trainable = None if self.train_bias else ~self.personal_part(clients.model)
        trained = clients.sgd(pulled, self.received(clients, shared), train=trainable, consensus=consensus)
        return self.sent(clients, trained, clients.weights(self.weighting))

    def _loss_and_mean(self, clients: Clients, p: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's loss, and the running mean of the features ``[d]``, which moves."""
        z, outputs = clients.model.features(p, batch.x)
        name = output_segments(clients.model, "mean")
        features = clients.objective.features_of_samples(z, batch.y)
        mean = clients.model.running_mean(name, batch.mean(features), self.momentum)
        return clients.objective.loss(outputs, batch), mean
