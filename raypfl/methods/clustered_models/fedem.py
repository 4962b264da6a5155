"""Mixtures of models, whose weights each client finds by expectation maximisation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.limits import COUNT
from raypfl.common.messages import Mean, Weighting
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.clustered_models.models_of_clusters import different_initial_models
from raypfl.models.extras import Other
from raypfl.models.predictor import Predictor


@METHODS.register("fedem")
class FedEM(Method):
    """Federated expectation maximisation (Marfoq et al. 2021).

    A client's data are a mixture of M components, and it predicts with ``sum_m pi_km softmax(h_m(x))``. In a round it
    finds ``q_s(m)``, in proportion to ``pi_km exp(-loss_s(theta_m))`` at the received models, for its samples s; then
    ``pi_km`` becomes the mean of ``q_s(m)``, and ``theta_m`` is trained on the mean of ``q_s(m) loss_s``. All M models
    are sent both ways; ``pi_k`` stays on the client and starts at 1/M. A client that was never trained finds ``pi_k``
    from 1/M, without training. With ``components = 1`` it is FedAvg, bit for bit. There is no global model.

    ``q`` is computed anew for each mini-batch, of the images as they are trained on; without augmentation this is the
    same. The reported loss is that of the last component. The authors' code counts an absent client as the model
    before; here the mean is over those that take part.

    Attributes
    ----------
    components : number of models M, which start at different initial ones.
    weighting : weights of clients in the means: training samples (``samples``) or equal (``uniform``).
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    components: Annotated[int, COUNT] = 3
    weighting: Weighting = "samples"

    def start(self, task: Task) -> ServerState:
        return {"models": different_initial_models(task, self.components)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        server["models"] = cohort.run(self.train, models=server["models"])["models"]

    def train(self, clients: Clients, models: Tensor) -> dict[str, Mean]:
        received = self._received(clients, models)
        before = self._shares(clients)

        def weighted_loss(p: Tensor, batch: Batch, number: int, pi: Tensor, **received: Other) -> Tensor:
            responsibility = self._responsibilities(clients, batch, pi, received)[number]
            return batch.mean(responsibility * clients.objective.losses(clients.model(p, batch.x), batch.y))

        trained: list[Tensor] = []
        for number, model in enumerate(models):
            trained.append(clients.sgd(weighted_loss, model, number=number, pi=before, **received))

        clients.state["pi"] = self._updated_shares(clients, models)
        return {"models": Mean(torch.stack(trained, dim=1), clients.weights(self.weighting))}

    def personal_model(self, clients: Clients, server: ServerView) -> Predictor:
        return Predictor(self.predict, pi=self._shares(clients), **self._received(clients, server["models"]))

    def unseen_model(self, clients: Clients, server: ServerView) -> Predictor:
        models = server["models"]
        return Predictor(self.predict, pi=self._updated_shares(clients, models), **self._received(clients, models))

    def predict(self, x: Tensor, pi: Tensor, **received: Other) -> Tensor:
        """Return the logarithms of one client's mixed probabilities ``[b, classes]``."""
        log_probabilities = torch.stack([other(x).log_softmax(1) for other in received.values()])
        return (log_probabilities + pi.log()[:, None, None]).logsumexp(0)

    def _received(self, clients: Clients, models: Tensor) -> dict[str, Any]:
        return {f"received_{number}": clients.other(model) for number, model in enumerate(models)}

    def _shares(self, clients: Clients) -> Tensor:
        equal = torch.full((self.components,), 1 / self.components, dtype=clients.model.dtype)
        return clients.state.get("pi", default=equal)

    def _updated_shares(self, clients: Clients, models: Tensor) -> Tensor:
        def mean_responsibilities(pi: Tensor, batch: Batch, **received: Other) -> Tensor:
            return batch.mean(self._responsibilities(clients, batch, pi, received).T)

        return clients.map(mean_responsibilities, self._shares(clients), **self._received(clients, models))

    def _responsibilities(self, clients: Clients, batch: Batch, pi: Tensor, received: dict[str, Other]) -> Tensor:
        """Return ``q[M, b]`` of one client's batch."""
        losses = torch.stack([clients.objective.losses(other(batch.x), batch.y) for other in received.values()])
        return (pi.log()[:, None] - losses).softmax(0).detach()
