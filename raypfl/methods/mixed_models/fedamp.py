"""Personal models close to a mixture of the models that are like them."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import CHANCE, FROM_ZERO, POSITIVE
from raypfl.common.messages import Each, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.local_training import proximal


@METHODS.register("fedamp")
class FedAMP(Method):
    """Attentive message passing (Huang et al. 2021).

    ``min sum_i F_i(w_i) + lam sum_{i<j} A(||w_i - w_j||^2)`` with ``A(t) = 1 - exp(-t/sigma)``. The server mixes
    ``u_i = sum_j xi_ij w_j``, with ``xi_ij = alpha A'(||w_i - w_j||^2)`` for other clients and the rest to 1 for i
    itself. Client i minimises ``F_i(w) + lam/(2 alpha) ||w - u_i||^2`` from its own last model, which starts at the
    initial one and stays on the client. Down: ``u_i``. Up: ``w_i``; the server keeps all of these. With ``lam = 0`` it
    is local training, bit for bit. There is no global model, and the mixture leaves batch-norm statistics out.

    Attributes
    ----------
    sigma : width of the kernel, in squared distances between models. If it is far below these, every client is alone.
    alpha : length of the server's step; None: sigma divided by the number of clients, which mixes equal models
        equally. Above ``sigma / (clients - 1)`` models get negative weights, so that is refused.
    lam : weight of the pull, lambda.
    mixed : whose models are mixed into a client's: of all clients that have sent one (``all``), or of those that were
        drawn in the round before (``last cohort``). The paper draws all clients in every round; PFLlib mixes those of
        the last cohort, and its penalty is a norm, not its square.
    """

    sigma: Annotated[float, POSITIVE] = 25.0
    alpha: Annotated[float | None, POSITIVE] = None
    lam: Annotated[float, FROM_ZERO] = 1.0
    mixed: Literal["all", "last cohort"] = "all"

    def start(self, task: Task) -> ServerState:
        self.refuse_negative_weights(task)
        initial = task.model.parameters(task.model.init(task.seed))
        sent = torch.zeros(task.num_clients, dtype=torch.bool, device=initial.device)
        return {"models": initial.repeat(task.num_clients, 1), "sent": sent}

    def refuse_negative_weights(self, task: Task) -> None:
        """Raise a ConfigError if equal models would be mixed with a negative weight of a client's own."""
        others = task.num_trained - 1
        if self.alpha is not None and self.alpha * others > self.sigma:
            raise ConfigError(
                f"method.alpha is {self.alpha} and method.sigma {self.sigma}: with {others} other clients, alike "
                "models would get a negative weight for the client's own. Lower method.alpha to sigma / "
                f"{others} = {self.sigma / others:.3g} or less, or leave it out."
            )

    def round(self, server: ServerState, cohort: Cohort) -> None:
        models = server["models"]
        own = cohort.rows(models)
        is_own = cohort.rows(torch.eye(len(models), dtype=models.dtype, device=models.device))

        num_clients = cohort.task.num_trained
        weights = self.weights_of_others(own, models, server["sent"] & (is_own == 0), num_clients)
        weights = weights + is_own * (1 - weights.sum(1, keepdim=True))

        alpha = self.sigma / num_clients if self.alpha is None else self.alpha
        reply = cohort.run(self.train, target=Scatter(weights @ models), strength=self.lam / alpha)

        sent = server["sent"] if self.mixed == "all" else torch.zeros_like(server["sent"])
        server["sent"] = cohort.with_rows(sent, torch.ones(len(cohort), dtype=torch.bool, device=sent.device))
        server["models"] = cohort.with_rows(models, reply["model"])

    def weights_of_others(self, own: Tensor, models: Tensor, others: Tensor, num_clients: int) -> Tensor:
        """Return the weights ``[C, N]`` of other clients' models in the mixtures.

        Parameters
        ----------
        own, models : the models ``[C, P]`` of the cohort's clients, and of all, ``[N, P]``.
        others : whether a model is mixed into that of a client, ``bool[C, N]``.
        num_clients : number of clients that are trained.
        """
        # Matrix products would lose small distances between large vectors in rounding.
        distances = torch.cdist(own, models, compute_mode="donot_use_mm_for_euclid_dist")
        step = 1 / num_clients if self.alpha is None else self.alpha / self.sigma
        attention = step * torch.exp(-distances.square() / self.sigma)
        return attention.masked_fill(~others, 0.0)

    def train(self, clients: Clients, target: Tensor, strength: float) -> dict[str, Each]:
        personal = clients.state.get("personal", default=clients.initial)
        personal = clients.sgd(clients.loss, personal, penalty=proximal(strength), anchor=target)
        clients.state["personal"] = personal
        return {"model": Each(clients.model.parameters(personal))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)


@METHODS.register("heurfedamp")
class HeurFedAMP(FedAMP):
    """FedAMP with weights by cosines, for large networks (Huang et al. 2021).

    ``xi_ii`` is given, and the rest is divided among other clients in proportion to ``exp(sigma cos(w_i, w_j))``. Only
    ``lam / alpha`` counts. With ``sigma = 0`` and all clients in every round it is ``mtl``.

    Attributes
    ----------
    sigma : sharpness of the weights.
    own_weight : weight of a client's own model, ``xi_ii``; None: 1 divided by the number of clients.
    """

    sigma: Annotated[float, FROM_ZERO] = 25.0
    alpha: Annotated[float, POSITIVE] = 1.0
    own_weight: Annotated[float | None, CHANCE] = None

    def refuse_negative_weights(self, task: Task) -> None:
        """Accept any options: the weights are never negative."""

    def weights_of_others(self, own: Tensor, models: Tensor, others: Tensor, num_clients: int) -> Tensor:
        cosines = F.normalize(own) @ F.normalize(models).T
        shares = torch.softmax((self.sigma * cosines).masked_fill(~others, -torch.inf), dim=1)
        own_weight = 1 / num_clients if self.own_weight is None else self.own_weight
        return (1 - own_weight) * shares.nan_to_num(0.0)  # NaN: nobody else has sent a model
