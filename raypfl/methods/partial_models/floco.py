"""A simplex of output layers, and a point of it for each client."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.limits import COUNT, FROM_ZERO
from raypfl.common.messages import Each, Mean, Scatter, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import proximal
from raypfl.methods.simplex import on_simplex
from raypfl.models.heads import SimplexLinear, output_layer, output_segments, with_output_layer

SIZES = 1000
"""Number of sizes of the simplex that :func:`spread_points` tries."""


@METHODS.register("floco")
class Floco(FedAvg):
    """Federated learning over connected modes (Grinwald et al. 2024).

    The output layer's weights are a mixture ``sum_m a_m W_m`` of M endpoints; the bias is one. Until the round
    `subspace_round`, each mini-batch draws the mixture uniformly on the simplex. After it, all clients train once more
    from the new model, and the updates of their endpoints, projected to their M principal components and from there to
    the simplex, are the clients' mixtures ``b_k``. From then on mixtures are ``b_k + radius * u * a / ||a||_1``, with u
    uniform in [0, 1] and a in [-1, 1]^M. Body, endpoints and bias are sent both ways and averaged, and ``b_k`` down.

    A client's personal model is the newest model at ``b_k``, or at the centre before there is one; the global model and
    those of clients that are never trained are at the centre. With one endpoint and ``radius: 0`` it is FedAvg, from
    another draw of the output layer's weights. Signs of principal components are fixed, unlike in the authors' code.
    The defaults are those for CIFAR-10; FL-bench has ``{endpoints: 10, radius: 0.1}``.

    Attributes
    ----------
    endpoints : number M of endpoints, drawn independently.
    subspace_round : round after which clients have mixtures of their own, at most the last; None: half of the rounds.
    radius : largest L1 distance of a drawn mixture from the client's own, rho.
    """

    needs_output_layer: ClassVar[bool] = True

    endpoints: Annotated[int, COUNT] = 20
    subspace_round: Annotated[int | None, COUNT] = None
    radius: Annotated[float, FROM_ZERO] = 0.01

    def depends_on_rounds(self) -> bool:
        return self.subspace_round is None

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, SimplexLinear(layer, self.endpoints))

    def start(self, task: Task) -> ServerState:
        if self.subspace_round is not None and self.subspace_round > task.rounds:
            raise ConfigError(
                f"method.subspace_round is {self.subspace_round}, but the run has {task.rounds} rounds, so no client "
                f"would get a mixture of its own. Set it to {task.rounds} or less, or leave it out."
            )
        return super().start(task)

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        shared = ~model.mask(output_segments(model, "mixture"))
        mixtures = server.get("mixtures")
        arguments = {} if mixtures is None else {"mixture": Scatter(cohort.rows(mixtures))}
        reply = cohort.run(self.train, sent=server["theta"][shared], **arguments)
        self.step(server, server["theta"].masked_scatter(shared, reply["theta"]), model)

        last = self.subspace_round or max(cohort.task.rounds // 2, 1)
        if mixtures is None and cohort.round >= last:
            updates = cohort.run_everyone(self.train_endpoints, sent=server["theta"][shared])["update"]
            # A client that was skipped, whose row is zeros, stays at the centre.
            replied = ~np.isin(cohort.task.trained, list(cohort.failed))
            points = spread_points(principal_components(updates[torch.from_numpy(replied)], self.endpoints))
            everyone = points.new_full((cohort.task.num_clients, self.endpoints), 1 / self.endpoints)
            everyone[cohort.task.trained[replied]] = points
            server["mixtures"] = everyone

    def train(self, clients: Clients, sent: Tensor, mixture: Tensor | None = None) -> dict[str, Mean]:
        trained = self.trained(clients, self.received(clients, sent), mixture)
        shared = ~clients.model.mask(output_segments(clients.model, "mixture"))
        return {"theta": Mean(trained[:, shared], clients.weights(self.weighting))}

    def train_endpoints(self, clients: Clients, sent: Tensor) -> dict[str, Each]:
        endpoints = clients.model.mask(output_segments(clients.model, "weight"))
        start = self.received(clients, sent)
        return {"update": Each(self.trained(clients, start, None)[:, endpoints] - start[endpoints])}

    def received(self, clients: Clients, sent: Tensor) -> Tensor:
        """Return the received model ``[P+B]``."""
        mixture = clients.model.mask(output_segments(clients.model, "mixture"))
        return clients.initial.masked_scatter(~mixture, sent)

    def trained(self, clients: Clients, start: Tensor, centre: Tensor | None, **options: Any) -> Tensor:
        """Return models ``[K, P+B]`` after training on mixtures that are drawn for each mini-batch.

        Parameters
        ----------
        start : ``[P+B]`` or ``[K, P+B]``.
        centre : the clients' own mixtures ``[K, M]``; None: draw anywhere on the simplex.
        options : passed to each step, such as a penalty.
        """
        model = clients.model
        weight = output_segments(model, "weight")
        bias = output_segments(model, "bias")

        def mixed(p: Tensor, batch: Batch, mixture: Tensor) -> Tensor:
            z, _ = model.features(p, batch.x)
            tensors = model.unflatten(p)
            outputs = F.linear(z, torch.tensordot(mixture, tensors[weight], 1), tensors.get(bias))
            return clients.objective.loss(outputs, batch)

        generators = clients.generators("mixtures")
        theta: Tensor = per_client(unmarked(start).expand(len(clients), -1))
        for batch in clients.minibatches():
            draws = [torch.rand(self.endpoints + 1, generator=g, dtype=model.dtype) for g in generators]
            mixture = self._mixtures(torch.stack(draws).to(clients.device), centre)
            theta = batch.step(mixed, theta, mixture=per_client(mixture), **options)
        return theta

    def _mixtures(self, uniform: Tensor, centre: Tensor | None) -> Tensor:
        """Return mixtures ``[K, M]`` from draws ``[K, M+1]``: anywhere on the simplex, or around each client's own."""
        if centre is None:
            exponential = -uniform[:, 1:].clamp_min(1e-12).log()
            return exponential / exponential.sum(1, keepdim=True)
        direction = 2 * uniform[:, 1:] - 1
        length = self.radius * uniform[:, :1] / direction.abs().sum(1, keepdim=True)
        return unmarked(centre) + length * direction

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.at_mixtures(clients, server["theta"], server)

    def at_mixtures(self, clients: Clients, theta: Tensor, server: ServerView) -> Tensor:
        """Return models ``[K, P+B]``, one or a row a client, with the clients' mixtures, or at the centre."""
        mixture = clients.model.mask(output_segments(clients.model, "mixture"))
        rows = unmarked(theta).expand(len(clients), -1).clone()
        rows[:, mixture] = server["mixtures"][list(clients.ids)] if "mixtures" in server else clients.initial[mixture]
        return per_client(rows)


@METHODS.register("floco-plus")
class FlocoPlus(Floco):
    """Floco, and a personal simplex for each client that stays close to the global one (Grinwald et al. 2024, Floco+).

    Client k also trains ``v_k``, all parameters of such a model, on its loss plus ``lam/2 ||v_k - w||^2`` with the
    received w, on the same mini-batches and mixtures. ``v_k`` stays on the client and starts at the initial model; at
    ``b_k`` it is the personal model. The global model and all messages are Floco's. With ``lam: 0`` each client trains
    a simplex of its own. Each of the two models has its own optimizer state. In the authors' code, momentum and weight
    decay of one model also reach the other, and the pull is ``lam v - w``, which is ``lam (v - w)`` at ``lam: 1`` only.

    Attributes
    ----------
    lam : weight of the proximal term, lambda.
    """

    lam: Annotated[float, FROM_ZERO] = 1.0

    def train(self, clients: Clients, sent: Tensor, mixture: Tensor | None = None) -> dict[str, Mean]:
        personal = clients.state.get("personal", default=clients.initial)
        clients.state["personal"] = self.trained(
            clients, personal, mixture, penalty=proximal(self.lam), anchor=self.received(clients, sent), report=None
        )
        return super().train(clients, sent, mixture)

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.at_mixtures(clients, clients.state.get("personal", default=clients.initial), server)


def principal_components(rows: Tensor, count: int) -> Tensor:
    """Return the coordinates ``[N, count]`` of ``rows[N, P]`` along their principal axes; zeros beyond N axes.

    The sign of an axis is arbitrary; here its largest loading is positive.
    """
    u, s, axes = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    num_axes = min(count, len(s))
    largest = axes.abs().argmax(1, keepdim=True)
    signs = torch.where(axes.gather(1, largest)[:, 0] < 0, -1.0, 1.0).to(rows)
    coordinates = rows.new_zeros(len(rows), count)
    coordinates[:, :num_axes] = (u * s * signs)[:, :num_axes]
    return coordinates


def spread_points(rows: Tensor) -> Tensor:
    """Return points on the simplex for ``rows[N, M]``, as far apart as one of many sizes allows (Grinwald et al. 2024).

    For each of 1,000 sizes from 0.0001 to 1, rows are divided by it and projected to the simplex; those with the
    least Riesz energy, the sum of ``1 / ||p_i - p_j||^2`` over all pairs, are returned.
    """
    first, second = torch.triu_indices(len(rows), len(rows), 1, device=rows.device)
    best = on_simplex(rows)
    least = torch.inf
    for size in torch.linspace(1e-4, 1, SIZES, dtype=torch.float64).tolist():
        points = on_simplex(rows / size)
        energy = float((points[first] - points[second]).square().sum(1).reciprocal().sum())
        if energy < least:
            best = points
            least = energy
    return best
