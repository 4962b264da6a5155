"""Personal models as learnt mixtures of all clients' core models."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, SHARE
from raypfl.common.messages import Broadcast, Each, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch

LAST_STRENGTH = 1e-3
"""The exponential schedule's strength at its end."""


@METHODS.register("apple")
class APPLE(Method):
    """Adaptive personalized cross-silo learning (Luo and Wu 2022).

    Client i predicts with ``theta_i = sum_j p_ij v_j`` of all clients' core models. On each mini-batch, with ``g`` the
    gradient of its loss at ``theta_i``, its own core takes a step along ``p_ii g``, and at once ``p_ij`` moves by
    ``-p_lr (<g, v_j> + s mu (p_ij - p0_j))``; others' cores are fixed. ``p0_j`` is the share of client j in all
    training samples, at which ``p_i`` starts. The strength s falls from 1 to 0 over the first rounds. Down: the cores
    of all other clients, and p0. Up: the client's own core; the server keeps all of them, and clients ``p_i``. A client
    that was never drawn has the weights p0; there is no global model. Clients download all cores in each round; the
    paper can also limit these. Batch-norm statistics are those of a client's own core. Cores start at the common
    initial model; the authors draw each core, and their pull of the weights is twice as strong. PFLlib never moves the
    weights, and sends mixtures in place of cores.

    Attributes
    ----------
    p_lr : learning rate of the weights; ``<g, v_j>`` grows with the network, so large ones need a smaller rate.
    mu : weight of the pull of the weights to p0.
    schedule : how s falls with the share x of `horizon` that is over: ``exponential``, ``0.001**x``, or ``cosine``,
        ``(1 + cos(pi x))/2``.
    horizon : share of all rounds after which s is 0.
    """

    p_lr: Annotated[float, FROM_ZERO] = 1e-3
    mu: Annotated[float, FROM_ZERO] = 0.1
    schedule: Literal["exponential", "cosine"] = "exponential"
    horizon: Annotated[float, SHARE] = 0.1

    def depends_on_rounds(self) -> bool:
        return True

    def start(self, task: Task) -> ServerState:
        cores = task.model.init(task.seed).repeat(task.num_clients, 1)
        samples = torch.from_numpy(task.num_samples).to(cores)
        samples[torch.from_numpy(task.unseen).to(cores.device)] = 0
        return {"cores": cores, "shares": samples / samples.sum()}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        others_size = (cohort.task.num_trained - 1) * cohort.task.model.size
        strength = self.strength(cohort.round, cohort.task.rounds)
        cores = Broadcast(server["cores"], charged=others_size)
        reply = cohort.run(self.train, cores=cores, shares=server["shares"], strength=strength)
        server["cores"] = cohort.with_rows(server["cores"], reply["core"])

    def strength(self, round: int, rounds: int) -> float:
        """Return s in a round, of which the first is 1."""
        part = (round - 1) / (self.horizon * rounds)
        if part >= 1:
            return 0.0
        return LAST_STRENGTH**part if self.schedule == "exponential" else (1 + math.cos(math.pi * part)) / 2

    def train(self, clients: Clients, cores: Tensor, shares: Tensor, strength: float) -> dict[str, Each]:
        def mixed(p: Tensor, batch: Batch, own_weight: Tensor, others: Tensor) -> Tensor:
            return clients.loss(own_weight * p + others, batch)

        ids = torch.tensor(clients.ids, device=cores.device)
        takes_part = shares > 0  # False for clients that are never trained
        k = torch.arange(len(ids), device=cores.device)
        core: Tensor = per_client(cores[ids])
        weights = clients.state.get("weights", default=shares)

        for batch in clients.minibatches():
            weights_of_others = unmarked(weights).clone()
            weights_of_others[k, ids] = 0
            others = per_client(weights_of_others @ clients.model.parameters(cores))
            own_weight = per_client(unmarked(weights)[k, ids])

            if self.p_lr:
                theta = unmarked(core).clone()
                parameters = clients.model.parameters(core)
                theta[:, : clients.model.num_parameters] = own_weight[:, None] * parameters + others
                g = unmarked(batch.grad(clients.loss, per_client(theta)))
                slopes = g @ clients.model.parameters(cores).T
                slopes[k, ids] = (g * parameters).sum(1)
                slopes = (slopes + strength * self.mu * (weights - shares)) * takes_part
                weights = per_client(torch.where(batch.active, weights - self.p_lr * slopes, weights))
            core = batch.step(mixed, core, own_weight=own_weight, others=others)

        clients.state["weights"] = weights
        return {"core": Each(core)}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        cores = server["cores"]
        weights = unmarked(clients.state.get("weights", default=server["shares"]))
        theta = cores[list(clients.ids)]
        mixed = weights @ clients.model.parameters(cores)
        return per_client(torch.cat([mixed, clients.model.buffers(theta)], dim=1))
