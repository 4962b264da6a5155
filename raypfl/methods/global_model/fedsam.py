"""Federated averaging toward flat minima."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO
from raypfl.common.messages import Mean
from raypfl.federation.method import METHODS
from raypfl.learning.optimizers import Perturb
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import ascent


@METHODS.register("fedsam")
class FedSAM(FedAvg):
    """Sharpness-aware local steps (Qu et al. 2022; Caldarola et al. 2022): along the gradient at ``w + rho g / ||g||``.

    Both gradients of a step are of the same mini-batch, and the norm is over all parameters. Weight decay and momentum
    act on the second one. With ``rho = 0`` it is FedAvg, bit for bit. Batch-norm statistics move in the first pass of a
    step; in the authors' code in both.

    Attributes
    ----------
    rho : length of the perturbation.
    """

    rho: Annotated[float, FROM_ZERO] = 0.1

    def train(self, clients: Clients, theta: Tensor) -> dict[str, Mean]:
        trained = clients.sgd(clients.loss, theta, perturb=self.perturbation(clients))
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}

    def perturbation(self, clients: Clients) -> Perturb | None:
        """Return where a step's gradient is taken."""
        return ascent(self.rho)


@METHODS.register("fedasam")
class FedASAM(FedSAM):
    """FedSAM whose perturbation adapts to the size of the weights (Caldarola et al. 2022): ``rho T^2 g / ||T g||``.

    T is ``|w| + nu`` for entries of tensors named ``weight``, and 1 for others.

    Attributes
    ----------
    rho : length of the perturbation.
    nu : added to the size of the weights.
    """

    rho: Annotated[float, FROM_ZERO] = 0.7
    nu: Annotated[float, FROM_ZERO] = 0.2

    def perturbation(self, clients: Clients) -> Perturb | None:
        weights = clients.model.parameters(clients.model.mask("*weight"))

        def scale(p: Tensor) -> Tensor:
            return (p.abs() + self.nu).where(weights, 1.0)

        return ascent(self.rho, scale=scale)
