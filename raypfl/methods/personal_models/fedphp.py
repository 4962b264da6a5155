"""Personal models that inherit from what each client trained before, and teach the next training."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import CHANCE
from raypfl.common.messages import Mean
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState, ServerView
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import discrepancy
from raypfl.models.extras import Other


@METHODS.register("fedphp")
class FedPHP(FedAvg):
    """Inherited private models (Li, Zhan, Shen, Li, Xu et al. 2021).

    From the received w, client k minimises ``(1 - lam) F_k + lam * MMD^2(z_w, z_v)``, where z are the features (the
    inputs of the output layer) of its model and of its private model ``v_k``. Then ``v_k <- (1 - mu_r) w_k + mu_r v_k``
    with ``mu_r = mu * round / rounds``. ``v_k`` stays on the client, is its personal model, and starts at the initial
    model, with which a client that was never trained is evaluated. With ``lam: 0`` the global model is FedAvg's.

    The paper also has distillation and other distances, and its inherited share grows with the number of times that a
    client took part. PFLlib has ``{lam: 1, mu: 0}``, without the cross-entropy.

    Attributes
    ----------
    lam : weight of the discrepancy between features.
    mu : share of ``v_k`` that is inherited in the last round.
    """

    lam: Annotated[float, CHANCE] = 0.01
    mu: Annotated[float, CHANCE] = 0.9

    def depends_on_rounds(self) -> bool:
        return True

    def round(self, server: ServerState, cohort: Cohort) -> None:
        inherited = self.mu * cohort.round / cohort.task.rounds
        reply = cohort.run(self.train, theta=server["theta"], inherited=inherited)
        self.step(server, reply["theta"], cohort.task.model)

    def train(self, clients: Clients, theta: Tensor, inherited: float) -> dict[str, Mean]:  # type: ignore[override]
        def taught(p: Tensor, batch: Batch, private: Other) -> tuple[Tensor, Tensor]:
            z, outputs = clients.model.features(p, batch.x)
            loss = clients.objective.loss(outputs, batch)
            apart = discrepancy(clients.objective, batch, z, private.features(batch.x))
            return loss, self.lam * (apart - loss)

        private = clients.state.get("personal", default=clients.initial)
        trained = clients.sgd(taught, theta, private=clients.other(private))
        clients.state["personal"] = (1 - inherited) * trained + inherited * private
        return {"theta": Mean(trained, clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("personal", default=clients.initial)
