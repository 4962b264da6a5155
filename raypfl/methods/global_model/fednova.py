"""Normalised averaging, for clients with different numbers of local steps."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import extrapolated, gradient_weights, proximal, required_sgd


@METHODS.register("fednova")
class FedNova(FedAvg):
    """Normalised averaging (Wang et al. 2020): a client's move is divided by the weights of its gradients.

    Client k's move is ``d_k = -lr sum_s a_ks g_ks`` over its ``tau_k`` local steps s, and the server's step is
    ``tau_eff sum_k p_k d_k / ||a_k||_1``. Plain SGD has ``||a_k||_1 = tau_k``; momentum and a proximal term change it.
    A client sends its model and ``tau_k``. The paper's server momentum is ``server_optimizer: momentum``. Batch-norm
    statistics are averaged with the weights ``p_k / ||a_k||_1``. With equal ``tau_k`` and plain SGD it is FedAvg.
    Weight decay has no part in ``a_k``.

    Attributes
    ----------
    mu : weight of a proximal term, as in FedProx.
    effective : tau_eff: the mean number of ``steps`` (the paper), or the mean of ||a_k||_1 (``gradients``; the authors'
        code, unless mu is above 0). With plain SGD both agree.
    """

    needs_sgd: ClassVar[bool] = True

    mu: Annotated[float, FROM_ZERO] = 0.0
    effective: Literal["steps", "gradients"] = "steps"

    def needs_weights(self) -> bool:
        # The weights divide the moves; without them, the server's step would be too long.
        return True

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        theta = server["theta"]
        reply = cohort.run(self.normalised, theta=theta)
        rate = float(reply["effective"] * reply["normaliser"])
        self.step(server, extrapolated(theta, reply["theta"], rate, model), model)

    def normalised(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        if self.mu:
            trained = clients.sgd(clients.loss, theta, penalty=proximal(self.mu), anchor=theta)
        else:
            trained = clients.sgd(clients.loss, theta)

        norms = self._norms(clients)
        effective = norms if self.effective == "gradients" else unmarked(clients.num_steps())
        p = clients.weights(self.weighting)
        return {
            "theta": Mean(trained, weight=1 / norms if p is None else p / norms),
            "normaliser": Mean(1 / norms, weight=p),
            # Not charged: it follows from the client's number of steps, as the normaliser does.
            "effective": Mean(effective, weight=p, charged=False),
        }

    def _norms(self, clients: Clients) -> Tensor:
        """Return ``||a_k||_1``, ``[K]``."""
        if not self.mu:
            return gradient_weights(clients)

        sgd = required_sgd(clients)
        steps = unmarked(clients.num_steps())
        # A gradient of 1 alone, followed by the proximal term's: how far the model is from its start, over -lr. That
        # is the weight of a gradient with so many steps left, which momentum may carry below 0.
        gradient = 1.0
        velocity = 0.0
        distance = 0.0
        norms = [0.0]
        for _ in range(int(steps.max())):
            velocity = sgd.momentum * velocity + gradient
            distance += gradient + sgd.momentum * velocity if sgd.nesterov else velocity
            norms.append(norms[-1] + abs(distance))
            gradient = -clients.lr * self.mu * distance
        return torch.tensor(norms, dtype=steps.dtype, device=steps.device)[steps.long()]
