"""Dynamic regularization along sharpness-aware gradients."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.methods.global_model.feddyn import FedDyn
from raypfl.methods.local_training import ascent, proximal


@METHODS.register("fedspeed")
class FedSpeed(FedDyn):
    """FedDyn's local problem with perturbed gradients (Sun et al. 2023).

    A local step of client k follows ``grad F_k(w + rho g) + alpha (w - w_t + h_k)``, with g the gradient at w of the
    same mini-batch; then ``h_k <- h_k + w_k - w_t``. The next model is the mean over the cohort of ``w_k + h_k``. In
    terms of FedDyn, ``g_k = -alpha h_k``. The paper's lambda is ``1/alpha``, and its weight of the second gradient 1.
    With ``training.clip_norm``, a step is clipped with its penalty.

    Attributes
    ----------
    alpha : strength of the regularization, above 0.
    rho : length of the perturbation.
    normalised : whether to perturb by ``rho g / ||g||``, as the authors' code does.
    duals : the mean of the h_k in the next model: over the ``cohort`` (the paper), or over ``all`` clients (the
        authors' code), which with ``rho = 0`` is FedDyn.
    """

    rho: Annotated[float, FROM_ZERO] = 0.1
    normalised: bool = False
    duals: Literal["cohort", "all"] = "cohort"

    def needs_whole_replies(self) -> bool:
        return self.duals == "all"

    def round(self, server: ServerState, cohort: Cohort) -> None:
        if self.duals == "all":
            super().round(server, cohort)
        else:
            server["theta"] = cohort.run(self.with_duals, theta=server["theta"])["theta"]

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        return {"theta": Mean(self._trained(clients, theta))}

    def with_duals(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = self._trained(clients, theta)
        moved = clients.model.parameters(trained) + clients.state["dual"]
        return {"theta": Mean(torch.cat([moved, clients.model.buffers(trained)], dim=1))}

    def _trained(self, clients: Clients, theta: Tensor) -> Tensor:
        model = clients.model
        h_k = clients.state.get("dual", default=torch.zeros_like(model.parameters(theta)))
        trained = clients.sgd(
            clients.loss,
            theta,
            penalty=proximal(self.alpha),
            perturb=ascent(self.rho, self.normalised),
            anchor=model.parameters(theta) - h_k,
        )
        clients.state["dual"] = h_k + model.parameters(trained - theta)
        return trained
