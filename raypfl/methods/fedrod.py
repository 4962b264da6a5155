"""A generic head for all classes, and a personal one beside it for the client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from raypfl.messages import Mean, per_client, plain
from raypfl.methods.base import METHODS, Method, Server, Task
from raypfl.methods.finetuning import refuse_negative
from raypfl.models.heads import TwoHeads, output_layer, with_output_layer

if TYPE_CHECKING:
    from raypfl.federation.batches import Batch
    from raypfl.federation.clients import Clients
    from raypfl.federation.cohort import Cohort


@METHODS.register("fedrod")
class FedROD(Method):
    """Robust decoupling (Chen and Chao 2022), with linear personal heads.

    Body and generic head are trained with balanced softmax, for which ``log n_kc`` is added to the logit of class c,
    and averaged. Then the personal head, on features that stay as they are, is trained on the sum of both heads'
    logits. Sent, both ways: body and generic head, which are the global model; kept: the client's last body and heads,
    which are its personal model.

    Attributes
    ----------
    personal_epochs : of the personal head; None: as the experiment's training says.
    weighting : clients count by their training samples (``samples``), or all the same (``uniform``).
    """

    personal_epochs: int | None = None
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        refuse_negative(personal_epochs=self.personal_epochs)

    def network(self, network: nn.Module) -> nn.Module:
        return with_output_layer(network, TwoHeads(output_layer(network)[1]))

    def start(self, task: Task) -> Server:
        return {"theta": task.model.init(task.seed)}

    def round(self, server: Server, cohort: Cohort) -> None:
        personal = cohort.task.model.mask("*.personal.*")
        reply = cohort.run(self.train, generic=server["theta"][~personal])
        server["theta"] = server["theta"].masked_scatter(~personal, reply["generic"])

    def train(self, clients: Clients, generic: Tensor) -> dict[str, Mean]:
        def balanced(p: Tensor, batch: Batch, prior: Tensor) -> Tensor:
            return clients.cross_entropy(clients.model(p, batch.x) + prior, batch)

        personal = clients.model.mask("*.personal.*")
        start = clients.initial.masked_scatter(~personal, generic)
        prior = clients.label_counts().clamp_min(1e-30).log()  # finite, also of a class that a client lacks
        trained = clients.sgd(balanced, start, train=~personal, prior=prior)
        both = plain(trained).clone()
        both[:, personal] = plain(clients.state.get("model", default=clients.initial))[:, personal]
        clients.state["model"] = clients.sgd(
            clients.loss, per_client(both), train=personal, epochs=self.personal_epochs
        )
        weight = clients.num_samples if self.weighting == "samples" else None
        return {"generic": Mean(trained[:, ~personal], weight)}

    def global_model(self, server: Server) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: Server) -> Tensor:
        return clients.state.get("model", default=server["theta"])
