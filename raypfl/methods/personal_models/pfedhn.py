"""Models made by a hypernetwork from an embedding of each client, which the server learns."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.conditions import needs_some
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.methods.personal_models.hypernetwork import HypernetworkMethod


@METHODS.register("pfedhn")
class PFedHN(HypernetworkMethod):
    """Personalized federated hypernetworks (Shamsian et al. 2021): client i's model is ``h(e_i)``.

    The server learns an embedding ``e_i`` of each client with the hypernetwork: both move along the client's step
    ``Delta theta_i``, pulled back. Sent: ``theta_i`` down, ``Delta theta_i`` up. A client that was never trained gets a
    random embedding, which alone is trained in `adapt_rounds` exchanges like a round's; the hypernetwork stays as it
    is. Embeddings are one matrix to the server's optimizer, so momentum and `lam_v` move those of all clients.

    Attributes
    ----------
    adapt_rounds : exchanges in which the embedding of an unseen client is trained.
    adapt_lr : learning rate of that, in plain steps along the pulled-back step.
    """

    adapt_rounds: Annotated[int, FROM_ZERO] = 20
    adapt_lr: Annotated[float, POSITIVE, needs_some("adapt_rounds")] = 0.01

    def start(self, task: Task) -> ServerState:
        return super().start(task) | {"embeddings": self._random(task)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        own = list(cohort.ids)
        pulled, steps = self.send_and_train(server, cohort, server["embeddings"][own])
        moved = torch.zeros_like(server["embeddings"])
        moved[own] = steps / int(cohort.present.sum())
        self.move(server, {"hyper": pulled, "embeddings": moved}, cohort.lr)

    def personalize(self, server: ServerState, cohort: Cohort) -> None:
        own = list(cohort.ids)
        v: Tensor = server["embeddings"][own]
        if cohort.unseen:
            v = self._random(cohort.task)[own]
            for number in range(self.adapt_rounds):
                v = v + self.adapt_lr * self.send_and_train(server, cohort, v, stream=f"adapting {number}")[1]
        self.send(server, cohort, v)

    def _random(self, task: Task) -> Tensor:
        """A random embedding of each client, ``[num_clients, l]``."""
        drawn = torch.Generator().manual_seed(rng.key(task.seed, "embeddings"))
        rows = torch.randn(task.num_clients, self.vector_length(task), generator=drawn, dtype=task.model.dtype)
        return rows.to(task.model.device)
