"""Partial personalization: some parts of the network stay on the client, the others are averaged."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs, needs_some
from raypfl.common.errors import ConfigError
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.local_training import finetuned
from raypfl.models.flat import FlatModel


class Parts(NamedTuple):
    """How the entries of a model vector are divided: three masks ``bool[P+B]``, exactly one of them true at each entry.

    Attributes
    ----------
    personal : trained and kept by each client.
    shared : trained and averaged.
    frozen : fixed at the initial values and never sent. In the vector, because fine-tuning trains it.
    """

    personal: Tensor
    shared: Tensor
    frozen: Tensor


@METHODS.register("partial")
class PartialPersonalization(Method):
    """Each client keeps a part of the network; the rest is averaged (Pillutla et al. 2022).

    ``min_{u, v_1..v_K} sum_k n_k F_k(u, v_k)``, with ``u`` shared and ``v_k`` kept on client k. Sent, both ways: ``u``,
    with its batch-norm statistics. If nothing is personal it is FedAvg, and if nothing is shared it is local training,
    bit for bit.

    The global model is the shared part with everything else at its initial values (Dai et al. 2023).

    Attributes
    ----------
    personal, frozen : comma-separated names, modules, globs or parts such as ``output layer`` (see
        :meth:`FlatModel.names`); empty: nothing.
    order : whether a client trains both parts ``together``, or one after the other with the other part fixed.
    personal_epochs, shared_epochs : epochs of a part that is trained on its own; None: training.epochs.
    body : the shared part of personal models in evaluations: the server's ``average``, or what the client trained
        ``last``, which it then has to keep.
    unseen_epochs : epochs of the personal part of a client that was never trained, the shared part being fixed; None:
        personal_epochs.
    finetune_epochs : epochs of fine-tuning before each evaluation. It trains the whole model, frozen parts too, and the
        run does not use the result.
    finetune_lr : learning rate of fine-tuning; None: that of the last round.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    personal: str = "output layer"
    frozen: str = ""
    order: Literal["together", "personal first", "shared first"] = "together"
    personal_epochs: Annotated[int | None, FROM_ZERO, needs("order", "personal first", "shared first")] = None
    shared_epochs: Annotated[int | None, FROM_ZERO, needs("order", "personal first", "shared first")] = None
    unseen_epochs: Annotated[int | None, FROM_ZERO] = None
    body: Literal["average", "last"] = "average"
    finetune_epochs: Annotated[int, FROM_ZERO] = 0
    finetune_lr: Annotated[float | None, POSITIVE, needs_some("finetune_epochs")] = None
    weighting: Weighting = "samples"

    def parts(self, model: FlatModel) -> Parts:
        """The personal, shared and frozen parts of the network.

        Raises
        ------
        ConfigError : if a pattern selects nothing, or a segment is both personal and frozen.
        """
        personal, frozen = (_selected(model, name, getattr(self, name)) for name in ("personal", "frozen"))
        if bool((personal & frozen).any()):
            both = [name for name in model.names(self.personal) if name in model.names(self.frozen)]
            raise ConfigError(
                f"method.personal {self.personal!r} and method.frozen {self.frozen!r} both select {', '.join(both)}; "
                "a client cannot train what is frozen."
            )
        return Parts(personal, ~(personal | frozen), frozen)

    def check(self, model: FlatModel) -> None:
        self.parts(model)

    def start(self, task: Task) -> ServerState:
        return {"theta": task.model.init(task.seed)}

    def round(self, server: ServerState, cohort: Cohort) -> None:
        shared = self.parts(cohort.task.model).shared
        if not bool(shared.any()):
            cohort.run(self.train)
            return
        reply = cohort.run(self.train, shared=server["theta"][shared])
        server["theta"] = server["theta"].masked_scatter(shared, reply["shared"])

    def train(self, clients: Clients, shared: Tensor | None = None) -> dict[str, Mean]:
        _warn_if_absent(clients.model, self.personal)
        parts, start = self.parts(clients.model), clients.initial
        theta = self._with_personal(clients, start if shared is None else start.masked_scatter(parts.shared, shared))
        for moving, epochs in self._phases(parts):
            theta = clients.sgd(clients.loss, theta, train=moving, epochs=epochs)
        if bool(parts.personal.any()):
            clients.state["personal"] = theta[:, parts.personal]
        if self.body == "last":
            clients.state["shared"] = theta[:, parts.shared]
        if shared is None:
            return {}
        return {"shared": Mean(theta[:, parts.shared], clients.weights(self.weighting))}

    def global_model(self, server: ServerState) -> Tensor:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        theta = self._with_personal(clients, server["theta"])
        if self.body == "last":
            shared = self.parts(clients.model).shared
            theta[:, shared] = clients.state.get("shared", default=server["theta"][shared])
        return finetuned(clients, theta, self.finetune_epochs, self.finetune_lr)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        """A client that never took part trains its personal part from the initial values; the shared part is fixed."""
        personal, theta = self.parts(clients.model).personal, server["theta"]
        if bool(personal.any()):
            epochs = self.personal_epochs if self.unseen_epochs is None else self.unseen_epochs
            theta = clients.sgd(clients.loss, theta, train=personal, epochs=epochs, stream="unseen")
        return finetuned(clients, theta, self.finetune_epochs, self.finetune_lr)

    def _with_personal(self, clients: Clients, theta: Tensor) -> Tensor:
        """Each client's model ``[K, P+B]``: `theta` ``[P+B]`` with the client's personal part."""
        personal = self.parts(clients.model).personal
        rows = theta.repeat(len(clients), 1)
        if bool(personal.any()):
            rows[:, personal] = unmarked(clients.state.get("personal", default=theta[personal]))
        return per_client(rows)

    def _phases(self, parts: Parts) -> list[tuple[Tensor | None, int | None]]:
        """Masks of what each phase trains (None: everything), and its epochs (None: training.epochs)."""
        phases: list[tuple[Tensor, int | None]] = [(~parts.frozen, None)]
        if self.order != "together":
            phases = [(parts.personal, self.personal_epochs), (parts.shared, self.shared_epochs)]
        if self.order == "shared first":
            phases.reverse()
        return [(None if bool(moving.all()) else moving, e) for moving, e in phases if bool(moving.any()) and e != 0]


def _selected(model: FlatModel, option: str, pattern: str) -> Tensor:
    if not pattern:
        return torch.zeros(model.size, dtype=torch.bool, device=model.device)
    try:
        return model.mask(pattern)
    except ConfigError as error:
        raise ConfigError(f"method.{option} is {pattern!r}. {error}") from None


def _warn_if_absent(model: FlatModel, pattern: str) -> None:
    for word in (part.strip() for part in pattern.split(",")):
        if not model.common_parts.get(word, [word]):
            warnings.warn(f"The network has no {word}, so nothing of it is personal.", stacklevel=2)
