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
    ``Delta theta_i``, pulled back. Down: ``theta_i``. Up: ``Delta theta_i``. A client that was never trained gets a
    random embedding, which alone is trained, in `adapt_rounds` exchanges like a round's; the hypernetwork stays as it
    is. To the server's optimizer, embeddings are one matrix, so momentum and `lam_v` move those of all clients. The
    paper has SGD on the server, and does not say how an unseen client's embedding is trained.

    Attributes
    ----------
    adapt_rounds : number of exchanges in which the embedding of an unseen client is trained.
    adapt_lr : learning rate of an unseen client's embedding, in plain steps along the pulled-back step.
    """

    adapt_rounds: Annotated[int, FROM_ZERO] = 20
    adapt_lr: Annotated[float, POSITIVE, needs_some("adapt_rounds")] = 0.01

    def start(self, task: Task) -> ServerState:
        return super().start(task) | {"embeddings": self._random_embeddings(task)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        ids = list(cohort.ids)
        hyper_step, v_steps = self.send_and_train(server, cohort, server["embeddings"][ids])
        embedding_step = torch.zeros_like(server["embeddings"])
        embedding_step[ids] = v_steps / int(cohort.present.sum())
        self.move(server, {"hyper": hyper_step, "embeddings": embedding_step}, cohort.lr)

    def personalize(self, server: ServerState, cohort: Cohort) -> None:
        ids = list(cohort.ids)
        if not cohort.unseen:
            self.send(server, cohort, server["embeddings"][ids])
            return

        v = self._random_embeddings(cohort.task)[ids]
        for number in range(self.adapt_rounds):
            _, v_steps = self.send_and_train(server, cohort, v, stream=f"adapting {number}")
            v = v + self.adapt_lr * v_steps
        self.send(server, cohort, v)

    def _random_embeddings(self, task: Task) -> Tensor:
        """Return a random embedding of each client, ``[num_clients, l]``."""
        generator = torch.Generator().manual_seed(rng.key(task.seed, "embeddings"))
        rows = torch.randn(task.num_clients, self.vector_length(task), generator=generator, dtype=task.model.dtype)
        return rows.to(task.model.device)
