"""The base class of methods with a hypernetwork: a network on the server that makes every client's model."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs
from raypfl.common.errors import ConfigError
from raypfl.common.limits import BELOW_ONE, COUNT, FROM_ZERO, POSITIVE
from raypfl.common.messages import Each, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD, AdamW, LocalOptimizer, Update
from raypfl.models.architectures.hypernetworks import Size, hypernetwork
from raypfl.models.flat import FlatModel
from raypfl.models.weights import RANDOM, origin

DEFAULT_RATES = {"average": 1.0, "sgd": 1e-2, "adam": 1e-3}
"""Default learning rate of each server optimizer."""


class HypernetworkMethod(Method):
    """A hypernetwork on the server turns a vector for each client into that client's model ``theta_i = h(v_i)``.

    Clients train the model that they get and send back its step ``Delta theta_i``. The server moves the hypernetwork by
    the mean over the cohort of ``(d theta_i / d eta_h)^T Delta theta_i``: the steps, pulled back. Clients keep nothing,
    and the hypernetwork is never sent.

    Attributes
    ----------
    length : length of a client's vector, l; None: a quarter of the number of clients.
    size : depth of the hypernetwork: 1, 3 or 5 square hidden layers of 100 units (``S``, ``M``, ``L``), after the first
        one. With torch's initial weights, deep ones make nearly the same model for all clients at first, and for long.
    server_optimizer : optimizer of the server: ``average`` adds the mean of the pulled-back steps (PeFLL, Algorithm 2);
        ``sgd`` and ``adam`` take this mean for a negative gradient. ``sgd`` adds the decay 2 lambda eta to it, as torch
        does; ``adam`` shrinks eta by 2 lambda `server_lr` apart from its step, as AdamW.
    server_lr : learning rate of the server; None: 1 with ``average``, 0.01 with ``sgd``, 0.001 with ``adam``.
    server_momentum : momentum of ``sgd``.
    server_clip_norm : norm to which the mean of all that the server trains together is clipped; None: no clipping.
    lam_h : lambda_h, weight in the objective of ``||eta_h||^2``, the hypernetwork's parameters.
    lam_v : lambda_v, weight in the objective of ``||eta_v||^2``, the parameters that make clients' vectors.
    lam_theta : lambda_theta, weight of ``||theta_i||^2`` in a client's loss; not in the loss that is reported.
    """

    length: Annotated[int | None, COUNT] = None
    size: Size = "S"
    server_optimizer: Literal["average", "sgd", "adam"] = "adam"
    server_lr: Annotated[float | None, POSITIVE] = None
    server_momentum: Annotated[float, BELOW_ONE, needs("server_optimizer", "sgd")] = 0.9
    server_clip_norm: Annotated[float | None, POSITIVE] = None
    lam_h: Annotated[float, FROM_ZERO] = 0.0
    lam_v: Annotated[float, FROM_ZERO] = 0.0
    lam_theta: Annotated[float, FROM_ZERO] = 0.0

    def check(self, model: FlatModel) -> None:
        if model.num_buffers:
            raise ConfigError(
                "A hypernetwork makes parameters, but this network also has batch-norm statistics, which no gradient "
                "moves; choose a network without batch norm, such as lenet, or model.norm=group."
            )
        num_weights = sum(parameter.numel() for parameter in model.module.parameters())
        if origin(model.module) != RANDOM and num_weights == model.num_parameters:
            raise ConfigError(
                "A hypernetwork makes all parameters of this network, so model.weights and model.pretrain have no "
                "effect; leave them out, or freeze a part of the network with model.frozen."
            )

    def networks(self, task: Task) -> dict[str, FlatModel]:
        length = self.vector_length(task)
        outputs = task.model.num_parameters
        return {"hyper": task.new_network("hyper", lambda: hypernetwork(length, outputs, self.size))}

    def vector_length(self, task: Task) -> int:
        """Return l, the length of a client's vector in this experiment."""
        return self.length or max(task.num_clients // 4, 1)

    def start(self, task: Task) -> ServerState:
        return {"hyper": task.initial("hyper"), "moments": {}}

    def send_and_train(self, server: ServerState, cohort: Cohort, v: Tensor, stream: str = "") -> tuple[Tensor, Tensor]:
        """Run one exchange: send models made from the clients' vectors ``v[C, l]``, receive the steps of training.

        Returns
        -------
        The mean over the cohort of the steps pulled back to the hypernetwork ``[Q]``, and each client's step pulled
        back to its vector ``[C, l]``; zeros for a client that was skipped.
        """
        eta = server["hyper"].detach().requires_grad_()
        v = v.detach().requires_grad_()
        with torch.enable_grad():
            theta = cohort.task.networks["hyper"](eta, v)

        step = cohort.run(self.train, theta=Scatter(theta.detach()), stream=stream)["step"]

        # One backward pass for both: (d theta / d eta)^T step is summed over clients, (d theta_i / d v_i)^T step_i not.
        num_present = int(cohort.present.sum())
        eta_step, v_steps = torch.autograd.grad(theta, [eta, v], step / num_present)
        return eta_step, v_steps * num_present

    def train(self, clients: Clients, theta: Tensor, stream: str = "") -> dict[str, Each]:
        def regularizer(p: Tensor, batch: Batch) -> Tensor:
            return self.lam_theta * p.square().sum()

        trained = clients.sgd(clients.loss, theta, penalty=regularizer if self.lam_theta else None, stream=stream)
        return {"step": Each(trained - theta)}

    def move(self, server: ServerState, steps: dict[str, Tensor], lr: float) -> None:
        """Move what the server trains, by name, along the means over the cohort; `lr` is the clients' rate, beta."""
        rate = DEFAULT_RATES[self.server_optimizer] if self.server_lr is None else self.server_lr
        scale: Tensor | float = 1.0
        if self.server_clip_norm is not None:
            norm = torch.stack([step.norm() for step in steps.values()]).norm()
            scale = (self.server_clip_norm / (norm + 1e-6)).clamp_max(1.0)

        for name, step in steps.items():
            eta = server[name]
            lam = self.lam_h if name == "hyper" else self.lam_v
            if self.server_optimizer == "average":
                # PeFLL, Algorithm 2: the gradient of lam ||eta||^2 is 2 lam eta, with the clients' rate.
                server[name] = (1 - 2 * lr * lam) * eta + rate * scale * step
                continue

            update = Update(self._optimizer, rate, weight_decay=2 * lam)
            flat = eta.clone().reshape(-1)
            if name not in server["moments"]:
                server["moments"][name] = update.init(flat)
            update.step_(flat, -scale * step.reshape(-1), server["moments"][name])
            server[name] = flat.reshape(eta.shape)

    @property
    def _optimizer(self) -> LocalOptimizer:
        if self.server_optimizer == "sgd":
            return SGD(momentum=self.server_momentum)
        # Adam would divide the decay by the size of the clients' steps, which are far smaller, and so follow it alone.
        return AdamW()

    def send(self, server: ServerState, cohort: Cohort, v: Tensor) -> None:
        """Send the cohort the models made from its vectors ``v[C, l]``, for evaluation."""
        with torch.no_grad():
            theta = cohort.task.networks["hyper"](server["hyper"], v)
        cohort.run(self.keep, theta=Scatter(theta))

    def keep(self, clients: Clients, theta: Tensor) -> None:
        clients.state["theta"] = theta

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state["theta"]
