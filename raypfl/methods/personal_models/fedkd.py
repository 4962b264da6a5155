"""Personal teachers, and a shared student that learns from them and they from it."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.clients.clients import Clients
from raypfl.common.limits import FROM_ZERO, SHARE
from raypfl.common.messages import Broadcast, Mean, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.models.extras import Other
from raypfl.models.flat import FlatModel
from raypfl.models.heads import MatchedLinear, output_layer, output_segments, with_output_layer


@METHODS.register("fedkd")
class FedKD(Method):
    """Communication-efficient federated learning via knowledge distillation (Wu et al. 2022).

    A client has a teacher t, which stays there and is its personal model, and trains the received student s beside it.
    With the cross-entropies ``Q = CE_t + CE_s`` of a mini-batch, the teacher follows the gradient of ``CE_t + lam
    (KL(p_s || p_t) + D) / Q`` and the student that of ``CE_s + lam (KL(p_t || p_s) + D) / Q``, with ``D = mean((z_t - W
    z_s)^2)``: p are probabilities, z the features before the output layer, and the other network is fixed. ``W[d, d]``
    is trained with the teacher, and stays with it. Both networks have the experiment's architecture.

    The client sends the student's move. Of each tensor, seen as a matrix with a row for each output, it sends the
    fewest singular values, with their vectors, that hold more than a share T of their sum of squares; T goes in equal
    steps from `energy_start`, before the first round, to `energy_end`, in the last. The server does the same with the
    mean of the moves, in which clients count equally. A vector, or a matrix that is no larger than its factors, is sent
    itself. A client that missed rounds gets their moves, or the student if it is smaller, as at first.

    The global model is the student. A client that was never trained has the initial model. With ``lam: 0`` the teacher
    is trained alone, and with ``energy_start: 1, energy_end: 1`` the student's moves are whole.

    Both networks see each other in evaluation mode, and W starts as the identity. In the paper, teachers may be larger,
    and ``lam`` is 1. The authors' code and PFLlib let the gradients of both losses flow into both networks, and drop a
    layer for which no rank reaches the energy; PFLlib compresses parameters in place of moves.

    Attributes
    ----------
    lam : weight of what is learnt from the other network.
    energy_start, energy_end : share T of the squares before the first round and in the last.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)
    needs_output_layer: ClassVar[bool] = True

    lam: Annotated[float, FROM_ZERO] = 1.0
    energy_start: Annotated[float, SHARE] = 0.95
    energy_end: Annotated[float, SHARE] = 0.98

    def depends_on_rounds(self) -> bool:
        return True

    def network(self, network: nn.Module) -> nn.Module:
        _, layer = output_layer(network)
        return with_output_layer(network, MatchedLinear(layer))

    def shared_part(self, model: FlatModel) -> Tensor:
        """Return the entries of the student, ``bool[P+B]``: all but ``W``."""
        return ~model.mask(output_segments(model, "match"))

    def start(self, task: Task) -> ServerState:
        theta = task.model.init(task.seed)
        # How many numbers were sent in all rounds, and until each client's last one.
        size = int(self.shared_part(task.model).sum())
        return {"theta": theta, "sent": 0, "received": torch.full((task.num_clients,), -size)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        model = cohort.task.model
        shared = self.shared_part(model)
        part = cohort.round / cohort.task.rounds
        energy = self.energy_start + part * (self.energy_end - self.energy_start)

        student = server["theta"][shared]
        missed = (server["sent"] - server["received"]).clamp_max(len(student))
        reply = cohort.run(self.train, student=Broadcast(student, charged=missed), energy=energy)
        server["received"] = cohort.with_rows(server["received"], torch.full([len(cohort)], server["sent"]))

        mean = torch.zeros_like(server["theta"]).masked_scatter(shared, reply["move"])
        move, numbers = compressed(model, mean[None], energy)
        server["theta"] = server["theta"] + move[0]
        server["sent"] += int(numbers)

    def train(self, clients: Clients, student: Tensor, energy: float) -> dict[str, Mean]:
        def teaching(p: Tensor, batch: Batch, student: Other) -> tuple[Tensor, Tensor]:
            return self._loss_and_distance(clients, p, batch, student, trains_teacher=True)

        def learning(p: Tensor, batch: Batch, teacher: Other) -> tuple[Tensor, Tensor]:
            return self._loss_and_distance(clients, p, batch, teacher, trains_teacher=False)

        shared = self.shared_part(clients.model)
        start = clients.initial.masked_scatter(shared, student).repeat(len(clients), 1)
        theta: Tensor = per_client(start)
        teacher = clients.state.get("teacher", default=clients.initial)
        for batch in clients.minibatches():
            # Both steps are at the same pair of models.
            other = clients.other(teacher)
            teacher = batch.step(teaching, teacher, of="teacher", student=clients.other(theta))
            theta = batch.step(learning, theta, of="student", teacher=other)

        clients.state["teacher"] = teacher
        move, numbers = compressed(clients.model, (unmarked(theta) - start) * shared, energy)
        return {"move": Mean(per_client(move[:, shared]), charged=numbers)}

    def _loss_and_distance(
        self, clients: Clients, p: Tensor, batch: Batch, other: Other, trains_teacher: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of the network at p, and what it learns from the other one, which is fixed."""
        model = clients.model
        weight, bias, match = (output_segments(model, name) for name in ("weight", "bias", "match"))
        z, outputs = model.features(p, batch.x)
        tensors = model.unflatten(other.theta)
        other_z = other.features(batch.x)
        other_outputs = F.linear(other_z, tensors[weight], tensors.get(bias))

        # W belongs to the teacher's vector.
        if trains_teacher:
            apart = z - F.linear(other_z, model.unflatten(p)[match])
        else:
            apart = other_z - F.linear(z, tensors[match])
        log_p = outputs.log_softmax(1)
        log_other = other_outputs.log_softmax(1)
        divergence = batch.mean((log_other.exp() * (log_other - log_p)).sum(1))
        distance = divergence + batch.mean(apart.square().mean(1))

        loss = clients.objective.loss(outputs, batch)
        total = loss + clients.objective.loss(other_outputs, batch)
        # Both losses are 0 if the networks fit a mini-batch perfectly.
        return loss, self.lam * distance / total.clamp_min(torch.finfo(total.dtype).eps)

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state.get("teacher", default=clients.initial)


def compressed(model: FlatModel, moves: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Return moves ``[K, P+B]`` without the small singular values of their tensors, and how many numbers they take.

    `energy` : share of the sum of squares that the remaining singular values exceed.

    Returns
    -------
    ``[K, P+B]``, and ``int64[K]``: for a matrix ``[m, n]`` of rank r, ``r (m + n + 1)``, or ``m n`` if that is less.
    """
    numbers = torch.zeros(len(moves), dtype=torch.int64, device=moves.device)
    parts = []
    for name in model.segments:
        tensors = model.segment(moves, name)
        if name == output_segments(model, "match"):
            parts.append(tensors.flatten(1))  # never sent
            continue

        size = tensors[0].numel()
        if tensors.dim() < 3:
            parts.append(tensors.flatten(1))
            numbers += size
            continue

        matrices = tensors.flatten(2)
        u, s, v = torch.linalg.svd(matrices, full_matrices=False)
        sums = s.square().cumsum(1)
        rank = ((sums <= energy * sums[:, -1:]).sum(1) + 1).clamp_max(s.shape[1])
        factors = rank * (sum(matrices.shape[1:]) + 1)
        numbers += factors.clamp_max(size)

        remaining = s * (torch.arange(s.shape[1], device=s.device) < rank[:, None])
        truncated = (u * remaining[:, None]) @ v
        is_smaller = (factors < size)[:, None, None]
        parts.append(torch.where(is_smaller, truncated, matrices).flatten(1))
    return torch.cat(parts, dim=1), numbers
