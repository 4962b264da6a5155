"""Features that a gate divides between a personal and a global output layer."""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.method import METHODS
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.local_training import discrepancy
from raypfl.methods.partial_models.shared_part import SharedPart
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.heads import GatedLinear, output_layer, output_segments, with_output_layer


@METHODS.register("fedcp")
class FedCP(SharedPart):
    """Conditional policy (Zhang et al. 2023, KDD).

    For each sample, a gate divides the features z, the inputs of the output layer, into ``r z`` for the client's own
    output layer and ``(1 - r) z`` for the global one, and logits are summed. The gate sees z and the client's context:
    the sum of the rows of its own output layer, before training. The client minimises ``F_k + lam * MMD^2(z, z_w)``,
    where ``z_w`` are the features of the received body, over the body, the gate and its own output layer; the global
    one is fixed, and is replaced by the mean of the clients' own and itself. Down and up: body, gate, global output
    layer. With Gumbel noise in training, ``r`` is random; in evaluation it is not, unlike in the authors' code.

    A client that was never trained has the initial output layer as its own. The context in the first round is that of
    this layer; in the authors' code it is a uniform draw.

    Attributes
    ----------
    lam : weight of the discrepancy between features; 1 in PFLlib.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    needs_output_layer: ClassVar[bool] = True

    lam: Annotated[float, FROM_ZERO] = 5.0
    weighting: Weighting = "samples"

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, GatedLinear(layer))

    def personal_part(self, model: FlatModel) -> Tensor:
        return model.mask(output_segments(model, "weight", "bias", "context"))

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        def close_to_global(p: Tensor, batch: Batch, sent: Other) -> tuple[Tensor, Tensor]:
            z, outputs = clients.model.features(p, batch.x)
            apart = discrepancy(clients.objective, batch, z, sent.features(batch.x))
            return clients.objective.loss(outputs, batch), self.lam * apart

        model = clients.model
        start = self.received(clients, shared)
        fixed = model.mask(output_segments(model, "global_weight", "global_bias", "context"))
        rows = unmarked(clients.sgd(close_to_global, start, train=~fixed, sent=clients.other(start))).clone()

        for name in ("weight", "bias"):
            # The mean with a frozen bias is the global one as it is: both are the initial one.
            if name not in model.output_tensors:
                continue
            personal = model.mask(output_segments(model, name))
            average = model.mask(output_segments(model, f"global_{name}"))
            rows[:, average] = (rows[:, personal] + rows[:, average]) / 2
        weight = model.segment(rows, output_segments(model, "weight"))
        rows[:, model.mask(output_segments(model, "context"))] = weight.sum(1)
        return self.sent(clients, per_client(rows), clients.weights(self.weighting))
