"""What methods have in common whose clients share a part of the network, and keep the rest."""

from __future__ import annotations

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Mean, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.models.flat import FlatModel


class SharedPart(Method):
    """Base class of methods that average a part of the network and keep another on the client.

    Subclasses define ``train(clients, shared)``: it trains from ``self.received(clients, shared)`` and returns
    ``self.sent(clients, trained, weight)``. The global model is the shared part with everything else at its initial
    values.
    """

    def leaves_untrained(self) -> bool:
        return True

    def personal_part(self, model: FlatModel) -> Tensor:
        """Return the entries that a client keeps between rounds, ``bool[P+B]``."""
        return model.mask("output layer")

    def shared_part(self, model: FlatModel) -> Tensor:
        """Return the entries that are sent both ways, ``bool[P+B]``."""
        return ~self.personal_part(model)

    def exchanged(self, model: FlatModel) -> Tensor:
        return self.shared_part(model)

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shared = self.shared_part(cohort.task.model)
        reply = cohort.run(self.train, shared=server["theta"][shared])
        server["theta"] = server["theta"].masked_scatter(shared, reply["shared"])

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        """Train the clients from the received ``shared[S]``."""
        raise NotImplementedError

    def received(self, clients: Clients, shared: Tensor) -> Tensor:
        """Return each client's model ``[K, P+B]`` at the start of a round."""
        theta = clients.initial.masked_scatter(self.shared_part(clients.model), shared)
        return self.personalized(clients, theta)

    def sent(self, clients: Clients, trained: Tensor, weight: Tensor | None) -> dict[str, Mean]:
        """Keep the personal part of models ``[K, P+B]``; reply with their shared part, for a mean by ``weight[K]``."""
        clients.state["personal"] = trained[:, self.personal_part(clients.model)]
        return {"shared": Mean(trained[:, self.shared_part(clients.model)], weight)}

    def personalized(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return `theta` ``[P+B]`` with each client's personal part, ``[K, P+B]``; the initial one before training."""
        personal = self.personal_part(clients.model)
        rows = theta.repeat(len(clients), 1)
        rows[:, personal] = unmarked(clients.state.get("personal", default=clients.initial[personal]))
        return per_client(rows)

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.personalized(clients, clients.complete(server["theta"]))
