"""Regularization toward a projected next global model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common import rng
from raypfl.common.conditions import needs
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, Sum, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, ServerState
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.global_model.auxiliary import Auxiliary, OwnImages, traced
from raypfl.methods.global_model.trajectory import Path
from raypfl.models.flat import FlatModel

Regularizer = Literal["adaptive", "differentiated", "fixed"]


def toward(model: FlatModel, regularizer: Regularizer) -> Callable[[Tensor, Batch, Tensor, Any], Tensor]:
    """``penalty(p, batch, anchor, strength)``, which pulls toward `anchor`; see :class:`Projecting`."""

    def penalty(p: Tensor, batch: Batch, anchor: Tensor, strength: Tensor | float) -> Tensor:
        if regularizer == "fixed":
            return strength / 2 * (p - anchor).square().sum()
        layers = [part.reshape(-1) for part in model.unflatten(p - anchor).values()]
        if regularizer == "differentiated":
            return strength / 2 * torch.stack([torch.linalg.vector_norm(layer) for layer in layers]).sum()
        squares = torch.stack([layer.square().sum() for layer in layers])
        least = 1e-12 if p.dtype == torch.float64 else 1e-8
        return strength / 2 * (squares / squares.detach().sqrt().clamp_min(least)).sum()

    return penalty


class Projecting(Auxiliary):
    """What both variants share: the projected model, and the pull toward it.

    Attributes
    ----------
    lam : strength of the pull.
    regularizer : ``adaptive`` pulls every layer (a tensor of the network) with the force ``lam``, whatever its
        distance; ``differentiated`` also differentiates the distances by which this penalty is divided, which halves
        the force; ``fixed`` is ``lam/2`` times the squared distance.
    project_steps : gradient steps on the images from the global model (K). project_lr : their size; None: as learned.
    guess : ``matching``; or ``line``, a control: the window's straight line is continued by K/R of its length.
    """

    lam: Annotated[float, FROM_ZERO] = 0.05
    regularizer: Regularizer = "adaptive"
    project_steps: Annotated[int, FROM_ZERO] = 5
    project_lr: Annotated[float | None, POSITIVE, needs("guess", "matching")] = 0.01
    guess: Literal["matching", "line"] = "matching"

    def is_due(self, turn: Any) -> Any:
        return super().is_due(turn) & (self.guess == "matching")

    def shows(self, cohort: Cohort) -> bool:
        return super().shows(cohort) and self.guess == "matching"

    def projected(
        self, model: FlatModel, labels: Tensor, images: Tensor, step_size: Tensor, begun: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next models ``[K, P]`` that K sets suggest, and whether they are finite, ``bool[K]``; else `theta`."""
        if self.guess == "line":
            suggested = theta + self.project_steps / self.inner_steps * (theta - begun)
        else:
            rate = step_size if self.project_lr is None else torch.full_like(step_size, self.project_lr)
            suggested = Path(model, labels, self.project_steps)(theta, images, rate)
        finite = torch.isfinite(suggested.sum(1))
        return torch.where(finite[:, None], suggested, theta), finite


@METHODS.register("fedptr")
class FedPTR(Projecting, OwnImages):
    """Projected trajectory regularization (Chen et al. 2023), Algorithm 2.

    A client changes its images until gradient steps on them lead from the model that it received m rounds ago to the
    one that it has now. From there it goes K further steps on the images, and pulls its local training toward where
    they end. Down and up: the model. More in ``docs/fedptr.md``.
    """

    def learn(self, clients: Clients, theta: Tensor, shown: int, begun: Tensor | None = None) -> dict[str, Mean | Sum]:
        sets, rows = self.sets(clients, theta, begun, shown), theta.repeat(len(clients), 1)
        strength = theta.new_zeros(len(clients))
        if bool(sets.ready.any()):
            work = partial(self.projected, clients.model, self.labels(clients.num_classes, theta.device))
            parts = (part[sets.ready] for part in (sets.images, sets.step_size, sets.begun, rows))
            anchors, finite = map(unmarked, clients.compute(work, *parts))
            rows[sets.ready], strength[sets.ready] = anchors, self.lam * finite.to(theta.dtype)
        anchor, pull = per_client(rows), toward(clients.model, self.regularizer)
        trained = clients.sgd(clients.loss, theta, penalty=pull, anchor=anchor, strength=per_client(strength))
        return {"theta": Mean(trained, weight=clients.weights(self.weighting)), **sets.reply}


@METHODS.register("fedptr-s")
class FedPTRServer(Projecting):
    """FedPTR on the server (Chen et al. 2023, Algorithm 3): one set of images, which starts as noise.

    Down: the model and, once the window is full, the projected model. Up: the model. Clients compute and keep nothing
    more than in FedAvg.
    """

    pictures: int = 20

    def start(self, task: Task) -> ServerState:
        state, draws = super().start(task), torch.Generator().manual_seed(rng.key(task.seed, "auxiliary images"))
        shape = (task.num_classes * self.per_class, *task.input_shape)
        images = torch.randn(shape, generator=draws, dtype=task.model.dtype).to(task.model.device)
        return {**state, "images": images, "step_size": images.new_tensor(self.step_size), "turn": 0}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        aim = self.aim(server, cohort)
        reply = cohort.run(self.train, theta=server["theta"], **({} if aim is None else {"anchor": aim}))
        self.step(server, reply["theta"], cohort.task.model)
        self.moved_on(server)
        if self.shows(cohort):
            self.log_images(cohort, server["images"])

    def aim(self, server: ServerState, cohort: Cohort) -> Tensor | None:
        """The projected model ``[P]``, if the window is full and it is finite."""
        if (begun := self.begun(server)) is None:
            return None
        model, labels = cohort.task.model, self.labels(cohort.task.num_classes, cohort.task.model.device)
        ends = begun[None], server["theta"][None]
        if self.is_due(server["turn"]):
            shown = partial(cohort.progress, "matching the trajectory")
            found = self.matched(model, labels, shown, server["images"][None], server["step_size"][None], *ends)
            server["images"], server["step_size"] = found.images[0], found.step_size[0]
            cohort.log(**{name: value for name, value in traced(found).items() if bool(value.isfinite())})
        server["turn"] += 1
        (aim,), finite = self.projected(model, labels, server["images"][None], server["step_size"][None], *ends)
        return aim if bool(finite) else None

    def train(self, clients: Clients, theta: Tensor, anchor: Tensor | None = None) -> dict[str, Mean]:
        if anchor is None:
            return super().train(clients, theta)
        pull = toward(clients.model, self.regularizer)
        trained = clients.sgd(clients.loss, theta, penalty=pull, anchor=anchor, strength=self.lam)
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}
