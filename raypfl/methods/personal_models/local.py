"""Training without federation."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.models.flat import FlatModel


@METHODS.register("local")
class Local(Method):
    """Each client trains its own model and sends nothing: the baseline that personalization must beat.

    Attributes
    ----------
    unseen_epochs : number of epochs for which a client that is never trained in rounds trains before it is evaluated;
        None: as many as in one round.
    """

    unseen_epochs: Annotated[int | None, COUNT] = None

    def exchanged(self, model: FlatModel) -> Tensor:
        return torch.zeros(model.size, dtype=torch.bool, device=model.device)

    def start(self, task: Task) -> ServerState:
        return {}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        cohort.run(self.train)

    def train(self, clients: Clients) -> dict[str, Mean]:
        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = clients.sgd(clients.loss, personal)
        return {}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.sgd(clients.loss, clients.initial, epochs=self.unseen_epochs, stream="unseen")
