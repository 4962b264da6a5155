"""A generic head for all classes, and a personal head for the client's own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs
from raypfl.common.limits import COUNT, FROM_ZERO
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.models.heads import GeneratedHead, TwoHeads, output_layer, with_output_layer, zero_head


@METHODS.register("fedrod")
class FedROD(Method):
    """Robust decoupling (Chen and Chao 2022).

    Body and generic head are trained with balanced softmax, which adds ``log n_kc`` to the logit of class c, and
    averaged. Then the personal head is trained on the sum of both heads' logits, with the body fixed. Sent, both ways:
    body and generic head, which are the global model, and the hypernetwork, if there is one. Kept: the client's last
    body and heads, which are its personal model.

    Attributes
    ----------
    head : the personal head: a ``linear`` layer of the client's own; or generated from its class shares by a
        ``hypernetwork``, which is averaged.
    hidden : units of the hypernetwork's hidden layer.
    personal_epochs : epochs of the personal head; None: training.epochs.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    head: Literal["linear", "hypernetwork"] = "linear"
    hidden: Annotated[int, COUNT, needs("head", "hypernetwork")] = 64
    personal_epochs: Annotated[int | None, FROM_ZERO] = None
    weighting: Weighting = "samples"

    def network(self, network: nn.Module) -> nn.Module:
        _, generic = output_layer(network)
        size = (generic.in_features, generic.out_features)
        personal = zero_head(generic) if self.head == "linear" else GeneratedHead(*size, self.hidden)
        return with_output_layer(network, TwoHeads(generic, personal))

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shared = ~cohort.task.model.mask(self._kept)
        reply = cohort.run(self.train, shared=server["theta"][shared])
        server["theta"] = server["theta"].masked_scatter(shared, reply["shared"])

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        def balanced(p: Tensor, batch: Batch, prior: Tensor) -> Tensor:
            return clients.objective.loss(clients.model(p, batch.x) + prior, batch)

        kept, personal = clients.model.mask(self._kept), clients.model.mask("*.personal.*")
        counts = clients.label_counts()
        prior = counts.clamp_min(1e-30).log()  # finite, also for a class that the client does not have
        start = clients.initial.masked_scatter(~kept, shared)
        theta = unmarked(clients.sgd(balanced, start, train=~personal, report=None, prior=prior)).clone()
        theta[:, kept] = self._own(clients, kept, unmarked(counts))
        moving = personal if self.head == "linear" else personal & ~kept
        trained = clients.sgd(clients.loss, per_client(theta), train=moving, epochs=self.personal_epochs)
        clients.state["model"] = trained
        return {"shared": Mean(trained[:, ~kept], clients.weights(self.weighting))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=server["theta"])

    @property
    def _kept(self) -> str:
        """What stays on the client: its head, or its class shares."""
        return "*.personal.*" if self.head == "linear" else "*.personal.prior"

    def _own(self, clients: Clients, kept: Tensor, counts: Tensor) -> Tensor:
        if self.head == "hypernetwork":
            return counts / counts.sum(1, keepdim=True)
        return unmarked(clients.state.get("model", default=clients.initial))[:, kept]
