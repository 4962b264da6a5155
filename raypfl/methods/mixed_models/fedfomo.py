"""Personal models that move toward those of other clients that do better on a client's validation samples."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE, FROM_ZERO
from raypfl.common.messages import Broadcast, Each, Scatter, per_client
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task


@METHODS.register("fedfomo")
class FedFomo(Method):
    """First-order model optimisation (Zhang et al. 2021).

    Client i gets the last models ``w_j`` of several clients, perhaps its own among them. ``r_i`` is the model at which
    its last training started, and ``a_j = (L_i(r_i) - L_i(w_j)) / ||w_j - r_i||`` with its validation loss ``L_i``. It
    trains from ``r_i + sum_j b_j (w_j - r_i)`` with ``b = max(a, 0) / sum max(a, 0)``, keeps the result and sends it.
    Down: `models` models. Up: the model, and ``a``, which the server adds to the client's row of an affinity matrix
    (the identity at first); it sends the models of largest affinity, of those that were sent so far. Clients need
    validation samples (``data.val_fraction``), and those that were never drawn have the initial model.

    The authors' code chooses among the models of the last cohort, adds the client's own, and divides ``a`` by its sum
    before it is added to the affinities.

    Attributes
    ----------
    models : number of models that a client gets.
    epsilon : chance that one of these is drawn at random instead.
    epsilon_decay : how much less `epsilon` is in each further round.
    norm : norm of the distances; ``l1`` in the authors' code.
    fallback : where training starts if no model is better than ``r_i``: at ``r_i`` (``start``, as in the paper), or at
        the client's last trained model (``own``, as in later implementations).
    """

    needs_validation: ClassVar[bool] = True

    models: Annotated[int, FROM_ZERO] = 5
    epsilon: Annotated[float, CHANCE] = 0.3
    epsilon_decay: Annotated[float, FROM_ZERO] = 0.05
    norm: Literal["l2", "l1"] = "l2"
    fallback: Literal["start", "own"] = "start"

    def start(self, task: Task) -> ServerState:
        initial = task.model.init(task.seed)
        return {
            "models": initial.repeat(task.num_clients, 1),
            "sent": torch.zeros(task.num_clients, dtype=torch.bool, device=initial.device),
            "affinity": torch.eye(task.num_clients, dtype=initial.dtype, device=initial.device),
        }

    def round(self, server: ServerState, cohort: Cohort) -> None:
        chosen = self._choose(server, cohort)
        size = cohort.task.model.size
        models = Broadcast(server["models"], charged=chosen.shape[1] * size)
        reply = cohort.run(self.train, models=models, chosen=Scatter(chosen, charged=False))

        rows = cohort.rows(server["affinity"]).scatter_add(1, chosen, reply["advantage"])
        server["affinity"] = cohort.with_rows(server["affinity"], rows)
        server["models"] = cohort.with_rows(server["models"], reply["model"])
        server["sent"] = cohort.with_rows(server["sent"], torch.ones(len(cohort), dtype=torch.bool))

    def _choose(self, server: ServerState, cohort: Cohort) -> Tensor:
        """Return the numbers of the clients whose models each client of the cohort gets, ``int64[C, models]``."""
        draws = cohort.generator("models")
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * (cohort.round - 1))
        candidates = server["sent"].nonzero().flatten()
        count = min(self.models, len(candidates))

        chosen = torch.empty(len(cohort), count, dtype=torch.int64, device=candidates.device)
        for i, affinity in enumerate(cohort.rows(server["affinity"])):
            # One random order breaks ties between equal affinities, and selects the random models.
            shuffled = candidates[torch.randperm(len(candidates), generator=draws).to(candidates.device)]
            num_random = int((torch.rand(count, generator=draws) < epsilon).sum())
            ranked = shuffled[affinity[shuffled].argsort(descending=True, stable=True)]
            best = ranked[: count - num_random]
            rest = shuffled[~torch.isin(shuffled, best)]
            chosen[i] = torch.cat([best, rest[:num_random]])
        return chosen

    def train(self, clients: Clients, models: Tensor, chosen: Tensor) -> dict[str, Each]:
        before = clients.state.get("start", default=clients.initial)
        personal = clients.state.get("personal", default=clients.initial)
        loss_before = clients.evaluate(before, "val")["loss"]

        order = {"l1": 1, "l2": 2}[self.norm]
        moves = []
        advantages = []
        for index in chosen.unbind(1):
            other = per_client(models[index])
            move = other - before
            distance = torch.linalg.vector_norm(clients.model.parameters(move), ord=order, dim=1)
            gain = loss_before - clients.evaluate(other, "val")["loss"]
            # Many models are equal in the first rounds; their distance is 0, and so is the advantage.
            advantages.append(torch.where(distance > 0, gain / distance, 0.0))
            moves.append(move)

        start = before if self.fallback == "start" else personal
        advantage: Tensor = per_client(personal.new_zeros(len(clients), 0))
        if moves:
            advantage = torch.stack(advantages, dim=1).to(before.dtype)
            weights = advantage.clamp_min(0)
            total = weights.sum(1, keepdim=True)
            shares = weights / total.clamp_min(torch.finfo(total.dtype).tiny)
            moved = before + (shares[:, :, None] * torch.stack(moves, dim=1)).sum(1)
            start = torch.where(total > 0, moved, start)

        clients.state["start"] = start
        clients.state["personal"] = clients.sgd(clients.loss, start)
        return {"model": Each(clients.state["personal"]), "advantage": Each(advantage)}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
