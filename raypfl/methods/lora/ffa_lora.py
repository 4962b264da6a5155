"""LoRA whose first factors stay as they were drawn, so that the mean of the others is exact."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import with_entries
from raypfl.models.flat import FlatModel


@METHODS.register("ffa-lora")
class FFALoRA(FedAvg):
    """Federated freeze-A LoRA (Sun et al. 2024): B and the output layer are trained and averaged, A is not.

    Every client has the same A, the initial one, so ``mean_k(B_k) A = mean_k(B_k A)``: the mean model's adapters are
    the mean of the clients'. With two trained factors, as in `fedavg`, they are not. A is never sent. (FedEx-LoRA's
    comparison, for GPT-2, freezes A before there are adapters, so it trains both factors.)
    """

    needs_lora: ClassVar[bool] = True

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        trained = trained_entries(model)
        reply = cohort.run(self.train, theta=server["theta"][trained])
        self.step(server, server["theta"].masked_scatter(trained, reply["theta"]), model)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        """Train the clients from ``theta[S]``, all of the model but A."""
        trained = trained_entries(clients.model)
        rows = clients.sgd(clients.loss, with_entries(clients, trained, theta), train=trained)
        return {"theta": Mean(rows[:, trained], weight=clients.weights(self.weighting))}


def trained_entries(model: FlatModel) -> Tensor:
    """Return the entries that clients train and send, ``bool[P+B]``: all but A."""
    return ~model.mask("lora A")
