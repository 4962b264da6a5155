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
from raypfl.methods.local_training import with_entries
from raypfl.models.heads import GeneratedHead, TwoHeads, output_layer, with_output_layer, zero_head


@METHODS.register("fedrod")
class FedROD(Method):
    """Robust decoupling (Chen and Chao 2022).

    Body and generic head are trained with balanced softmax, which adds ``log n_kc`` to the logit of class c, and
    averaged. Then the personal head is trained on the sum of both heads' logits, with the body fixed. Body and generic
    head, which are the global model, are sent both ways, as is the hypernetwork, if there is one. A client keeps its
    last body and heads, which are its personal model.

    Attributes
    ----------
    head : personal head: a ``linear`` layer that stays on the client; or one generated from the client's class shares
        by a ``hypernetwork``, which is averaged.
    hidden : number of units in the hypernetwork's hidden layer.
    personal_epochs : number of epochs of the personal head; None: training.epochs.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

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
        shared = ~cohort.task.model.mask(self._local)
        reply = cohort.run(self.train, shared=server["theta"][shared])
        server["theta"] = server["theta"].masked_scatter(shared, reply["shared"])

    def train(self, clients: Clients, shared: Tensor) -> dict[str, Mean]:
        def balanced(p: Tensor, batch: Batch, prior: Tensor) -> Tensor:
            return clients.objective.loss(clients.model(p, batch.x) + prior, batch)

        local = clients.model.mask(self._local)
        personal = clients.model.mask("*.personal.*")

        # Body and generic head, with balanced softmax. The logarithm is finite, also for a class without samples.
        counts = clients.label_counts()
        prior = counts.clamp_min(1e-30).log()
        start = with_entries(clients, ~local, shared)
        theta = unmarked(clients.sgd(balanced, start, train=~personal, report=None, prior=prior)).clone()

        # The personal head. A hypernetwork is trained, but not the class shares that it gets.
        theta[:, local] = self._local_entries(clients, local, unmarked(counts))
        trainable = personal if self.head == "linear" else personal & ~local
        trained = clients.sgd(clients.loss, per_client(theta), train=trainable, epochs=self.personal_epochs)

        clients.state["model"] = trained
        return {"shared": Mean(trained[:, ~local], clients.weights(self.weighting))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("model", default=server["theta"])

    @property
    def _local(self) -> str:
        """Pattern of the segments that stay on the client: its head, or its class shares."""
        return "*.personal.*" if self.head == "linear" else "*.personal.prior"

    def _local_entries(self, clients: Clients, local: Tensor, counts: Tensor) -> Tensor:
        """Return the values ``[K, ...]`` of these segments: class shares, or the client's last head."""
        if self.head == "hypernetwork":
            return counts / counts.sum(1, keepdim=True)
        return unmarked(clients.state.get("model", default=clients.initial))[:, local]
