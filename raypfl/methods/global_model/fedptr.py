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
from raypfl.methods.global_model.auxiliary import AuxiliaryImages, ClientImages, matching_numbers
from raypfl.methods.global_model.trajectory import StudentTrajectory
from raypfl.models.flat import FlatModel

Regularizer = Literal["adaptive", "differentiated", "fixed"]


def pull_toward_anchor(model: FlatModel, regularizer: Regularizer) -> Callable[[Tensor, Batch, Tensor, Any], Tensor]:
    """Return ``penalty(p, batch, anchor, strength)``, which pulls toward `anchor`; see :class:`ProjectedTrajectory`."""

    def penalty(p: Tensor, batch: Batch, anchor: Tensor, strength: Tensor | float) -> Tensor:
        if regularizer == "fixed":
            return strength / 2 * (p - anchor).square().sum()

        layers = [layer.reshape(-1) for layer in model.unflatten(p - anchor).values()]
        if regularizer == "differentiated":
            return strength / 2 * torch.stack([torch.linalg.vector_norm(layer) for layer in layers]).sum()

        # lam/2 ||d_j||^2 / ||d_j|| with the divisor constant: the gradient is lam d_j / ||d_j||, of length lam. It is 0
        # at d_j = 0, where the divisor must not be 0.
        squares = torch.stack([layer.square().sum() for layer in layers])
        smallest = 1e-12 if p.dtype == torch.float64 else 1e-8
        return strength / 2 * (squares / squares.detach().sqrt().clamp_min(smallest)).sum()

    return penalty


class ProjectedTrajectory(AuxiliaryImages):
    """Base class of both variants: the projected model, and the pull toward it.

    Attributes
    ----------
    lam : strength of the pull.
    regularizer : form of the pull: ``adaptive`` pulls every layer (a tensor of the network) with the force ``lam``,
        whatever its distance; ``differentiated`` also differentiates the distances by which this penalty is divided,
        which halves the force; ``fixed`` is ``lam/2`` times the squared distance.
    project_steps : number of gradient steps on the images from the global model (K).
    project_lr : size of these steps; None: the learned one.
    guess : source of the projected model: ``matching``; or ``line``, a control that continues the window's straight
        line by K/R of its length.
    """

    lam: Annotated[float, FROM_ZERO] = 0.05
    regularizer: Regularizer = "adaptive"
    project_steps: Annotated[int, FROM_ZERO] = 5
    project_lr: Annotated[float | None, POSITIVE, needs("guess", "matching")] = 0.01
    guess: Literal["matching", "line"] = "matching"

    def is_due(self, earlier: Any) -> Any:
        return super().is_due(earlier) & (self.guess == "matching")

    def logs_images(self, cohort: Cohort) -> bool:
        return super().logs_images(cohort) and self.guess == "matching"

    def project(
        self, model: FlatModel, labels: Tensor, images: Tensor, step_size: Tensor, window_start: Tensor, theta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the projected models ``[K, P]`` of K sets, and whether they are finite, ``bool[K]``; else `theta`."""
        if self.guess == "line":
            projected = theta + self.project_steps / self.inner_steps * (theta - window_start)
        else:
            rate = step_size if self.project_lr is None else torch.full_like(step_size, self.project_lr)
            projected = StudentTrajectory(model, labels, self.project_steps)(theta, images, rate)

        finite = torch.isfinite(projected.sum(1))
        return torch.where(finite[:, None], projected, theta), finite


@METHODS.register("fedptr")
class FedPTR(ProjectedTrajectory, ClientImages):
    """Projected trajectory regularization (Chen et al. 2023), Algorithm 2.

    A client changes its images until gradient steps on them lead from the model that it received m rounds ago to the
    one that it has now. From there it takes K further steps on the images, and pulls its local training toward the
    model where they end. Down and up: the model. More in ``docs/fedptr.md``.
    """

    def learn(self, clients: Clients, theta: Tensor, shown: int, begun: Tensor | None = None) -> dict[str, Mean | Sum]:
        sets = self.update_images(clients, theta, begun, shown)

        # lam is 0 while a client's window is not full, or if its projected model is not finite.
        anchors = theta.repeat(len(clients), 1)
        strength = theta.new_zeros(len(clients))
        ready = sets.ready
        if bool(ready.any()):
            labels = self.labels(clients.num_classes, theta.device)
            arguments = (tensor[ready] for tensor in (sets.images, sets.step_size, sets.window_start, anchors))
            projected, finite = clients.compute(partial(self.project, clients.model, labels), *arguments)
            anchors[ready] = unmarked(projected)
            strength[ready] = self.lam * unmarked(finite).to(theta.dtype)

        trained = clients.sgd(
            clients.loss,
            theta,
            penalty=pull_toward_anchor(clients.model, self.regularizer),
            anchor=per_client(anchors),
            strength=per_client(strength),
        )
        return {"theta": Mean(trained, weight=clients.weights(self.weighting)), **sets.reply}


@METHODS.register("fedptr-s")
class FedPTRServer(ProjectedTrajectory):
    """FedPTR on the server (Chen et al. 2023, Algorithm 3): one set of images, which starts as noise.

    Down: the model and, once the window is full, the projected model. Up: the model. Clients compute and keep nothing
    more than in FedAvg.
    """

    pictures: int = 20

    def start(self, task: Task) -> ServerState:
        shape = (task.num_classes * self.per_class, *task.input_shape)
        generator = torch.Generator().manual_seed(rng.key(task.seed, "auxiliary images"))
        images = torch.randn(shape, generator=generator, dtype=task.model.dtype).to(task.model.device)
        return {
            **super().start(task),
            "images": images,
            "step_size": images.new_tensor(self.step_size),
            "turn": 0,
        }

    def round(self, server: ServerState, cohort: Cohort) -> None:
        message = {"theta": server["theta"]}
        projected = self.projected_model(server, cohort)
        if projected is not None:
            message["anchor"] = projected

        reply = cohort.run(self.train, **message)
        self.step(server, reply["theta"], cohort.task.model)
        self.remember_model(server)
        if self.logs_images(cohort):
            self.log_images(cohort, server["images"])

    def projected_model(self, server: ServerState, cohort: Cohort) -> Tensor | None:
        """Match the images if it is time, and return the projected model ``[P]``.

        None: the window is not full, or the projected model is not finite.
        """
        window_start = self.window_start(server)
        if window_start is None:
            return None

        model = cohort.task.model
        labels = self.labels(cohort.task.num_classes, model.device)
        start = window_start[None]
        end = server["theta"][None]
        if self.is_due(server["turn"]):
            progress = partial(cohort.progress, "matching the trajectory")
            images = server["images"][None]
            step_size = server["step_size"][None]
            matched = self.match_images(model, labels, progress, images, step_size, start, end)
            server["images"] = matched.images[0]
            server["step_size"] = matched.step_size[0]

            numbers = matching_numbers(matched)
            cohort.log(**{name: value for name, value in numbers.items() if bool(value.isfinite())})
        server["turn"] += 1

        images = server["images"][None]
        step_size = server["step_size"][None]
        projected, finite = self.project(model, labels, images, step_size, start, end)
        return projected[0] if bool(finite) else None

    def train(self, clients: Clients, theta: Tensor, anchor: Tensor | None = None) -> dict[str, Mean]:
        if anchor is None:
            return super().train(clients, theta)
        pull = pull_toward_anchor(clients.model, self.regularizer)
        trained = clients.sgd(clients.loss, theta, penalty=pull, anchor=anchor, strength=self.lam)
        return {"theta": Mean(trained, weight=clients.weights(self.weighting))}
