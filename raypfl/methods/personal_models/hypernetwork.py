"""What methods with a hypernetwork share: a network on the server that makes every client's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common import rng
from raypfl.common.conditions import needs
from raypfl.common.errors import ConfigError
from raypfl.common.limits import BELOW_ONE, COUNT, FROM_ZERO, POSITIVE
from raypfl.common.messages import Each, Scatter
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD, AdamW, LocalOptimizer, Update
from raypfl.models.flat import FlatModel
from raypfl.models.hypernetworks import Size, hypernetwork

LEARNING_RATES = {"average": 1.0, "sgd": 1e-2, "adam": 1e-3}


def network(task: Task, name: str, factory: Callable[[], nn.Module]) -> FlatModel:
    """A network that the server trains, in addition to the clients'."""
    return FlatModel(factory, rng.key(task.seed, name) % 2**31, task.model.dtype, task.model.device)


def initial(task: Task, name: str) -> Tensor:
    """The first parameters of one of the method's networks."""
    return task.networks[name].init(rng.key(task.seed, name) % 2**31)


class HypernetworkMethod(Method):
    """A hypernetwork on the server turns a vector for each client into that client's model ``theta_i = h(v_i)``.

    Clients train the model that they get and send back how far it moved, ``Delta theta_i``, in which direction the
    server moves the hypernetwork: by ``(d theta_i / d eta_h)^T Delta theta_i``, the mean over the cohort. No client
    keeps anything, and the hypernetwork is never sent.

    Attributes
    ----------
    length : of a client's vector, l; None: a quarter of the number of clients.
    size : 1, 3 or 5 square hidden layers of 100 units in the hypernetwork (``S``, ``M``, ``L``), after the first one.
        With torch's initial weights, deep ones make nearly the same model for all clients at first, and for long.
    server_optimizer : ``average`` adds the mean of what clients' steps are pulled back to (PeFLL, Algorithm 2);
        ``sgd`` and ``adam`` take it for a negative gradient, to which ``sgd`` adds the decay 2 lambda eta, as torch
        does; ``adam`` shrinks eta by 2 lambda `server_lr` apart from its step, as AdamW.
    server_lr : its learning rate; None: 1 with ``average``, 0.01 with ``sgd``, 0.001 with ``adam``.
    server_momentum : of ``sgd``.
    server_clip_norm : norm to which the mean is clipped, of all that the server trains together; None: no clipping.
    lam_h : lambda_h, weight of ``||eta_h||^2`` in the objective, of the hypernetwork's parameters.
    lam_v : lambda_v, weight of ``||eta_v||^2``, of the parameters that make clients' vectors.
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

    def networks(self, task: Task) -> dict[str, FlatModel]:
        length, outputs = self.vector_length(task), task.model.num_parameters
        return {"hyper": network(task, "hyper", lambda: hypernetwork(length, outputs, self.size))}

    def vector_length(self, task: Task) -> int:
        """l, of this experiment."""
        return self.length or max(task.num_clients // 4, 1)

    def start(self, task: Task) -> ServerState:
        return {"hyper": initial(task, "hyper"), "moments": {}}

    def send_and_train(self, server: ServerState, cohort: Cohort, v: Tensor, stream: str = "") -> tuple[Tensor, Tensor]:
        """One exchange: models from the clients' vectors ``v[C, l]`` go down, how far training moved them comes up.

        Returns
        -------
        The mean over the cohort of the steps pulled back to the hypernetwork ``[Q]``, and each client's step pulled
        back to its vector ``[C, l]``, of zeros for a client that was skipped.
        """
        eta, v = (tensor.detach().clone().requires_grad_() for tensor in (server["hyper"], v))
        with torch.enable_grad():
            theta = cohort.task.networks["hyper"](eta, v)
        step = cohort.run(self.train, theta=Scatter(theta.detach()), stream=stream)["step"]
        present = int(cohort.present.sum())
        pulled, steps = torch.autograd.grad(theta, [eta, v], step / present)
        return pulled, steps * present

    def train(self, clients: Clients, theta: Tensor, stream: str = "") -> dict[str, Each]:
        def regularizer(p: Tensor, batch: Batch) -> Tensor:
            return self.lam_theta * p.square().sum()

        trained = clients.sgd(clients.loss, theta, penalty=regularizer if self.lam_theta else None, stream=stream)
        return {"step": Each(trained - theta)}

    def move(self, server: ServerState, pulled: dict[str, Tensor], lr: float) -> None:
        """Move what the server trains, by name, along the means over the cohort; `lr` is the clients' rate, beta."""
        lam = {"hyper": self.lam_h}
        rate = LEARNING_RATES[self.server_optimizer] if self.server_lr is None else self.server_lr
        norm = torch.stack([step.norm() for step in pulled.values()]).norm()
        share = 1.0 if self.server_clip_norm is None else (self.server_clip_norm / (norm + 1e-6)).clamp_max(1.0)
        for name, step in pulled.items():
            eta, decay = server[name], lam.get(name, self.lam_v)
            if self.server_optimizer == "average":
                server[name] = (1 - 2 * lr * decay) * eta + rate * share * step
                continue
            update = Update(self._optimizer, rate, weight_decay=2 * decay)
            flat, kept = eta.clone().reshape(-1), server["moments"].get(name)
            memory = update.init(flat) if kept is None else {key: one.clone() for key, one in kept.items()}
            update.step_(flat, -share * step.reshape(-1), memory)
            server[name], server["moments"][name] = flat.reshape(eta.shape), memory

    @property
    def _optimizer(self) -> LocalOptimizer:
        if self.server_optimizer == "sgd":
            return SGD(momentum=self.server_momentum)
        # Adam would divide the decay by the size of the clients' steps, which are far smaller, and so follow it alone.
        return AdamW()

    def send(self, server: ServerState, cohort: Cohort, v: Tensor) -> None:
        """One exchange: the cohort gets its models from its vectors ``v[C, l]``, for evaluation."""
        with torch.no_grad():
            theta = cohort.task.networks["hyper"](server["hyper"], v)
        cohort.run(self.keep, theta=Scatter(theta))

    def keep(self, clients: Clients, theta: Tensor) -> None:
        clients.state["theta"] = theta

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return clients.state["theta"]
