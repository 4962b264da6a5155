"""Fair averaging: clients with a higher loss weigh more."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import extrapolated

SMALLEST_LOSS = 1e-10
"""Added to losses, so that a loss of zero is no divisor."""


@METHODS.register("q-ffl")
class QFFL(FedAvg):
    """q-FedAvg (Li et al. 2020, "Fair resource allocation"): ``min_w sum_k F_k(w)^(q+1) / (q+1)``.

    With ``F_k`` the loss of the received model on client k's training samples, ``L = 1/lr`` and ``D_k = L (w - w_k)``,
    the server takes the step ``w <- w - sum_k F_k^q D_k / sum_k h_k``, where
    ``h_k = q F_k^(q-1) ||D_k||^2 + L F_k^q``. A client sends ``F_k^q D_k`` and ``h_k``. Batch-norm statistics are
    averaged with the weights ``F_k^q``. With ``q = 0`` it is FedAvg with equal weights, bit for bit.

    Losses are in evaluation mode, and 1e-10 is added to them, as in the authors' code; in the paper they may be
    estimated.

    Attributes
    ----------
    q : how much more clients with a higher loss count.
    weighting : clients are equal (``uniform``), since the paper draws them by their samples; ``samples`` is a factor of
        both sums.
    """

    q: Annotated[float, FROM_ZERO] = 1.0
    weighting: Weighting = "uniform"

    def needs_weights(self) -> bool:
        return True

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        theta = server["theta"]
        reply = cohort.run(self.train, theta=theta)
        target = extrapolated(theta, reply["theta"], 1 / float(reply["curvature"]), model)
        self.step(server, target, model)

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        loss = clients.map(clients.loss, theta) + SMALLEST_LOSS
        trained = clients.sgd(clients.loss, theta)

        # h_k / (L F_k^q): the server divides its step along the weighted mean by the weighted mean of these.
        squared_move = clients.model.parameters(trained - theta).square().sum(1)
        curvature = 1 + self.q * squared_move / (loss * clients.lr)

        weight = loss**self.q
        if self.weighting == "samples":
            weight = weight * clients.num_samples
        return {"theta": Mean(trained, weight), "curvature": Mean(curvature, weight)}
