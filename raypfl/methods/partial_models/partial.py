"""Partial personalization: a part of the network stays on the client, the rest is averaged."""

from __future__ import annotations

import warnings
from typing import Annotated, Literal, NamedTuple

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs, needs_some
from raypfl.common.errors import ConfigError
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.common.messages import Mean, Weighting, per_client, unmarked
from raypfl.federation.cohort import Cohort
from raypfl.federation.method import METHODS, Method, ServerState, ServerView
from raypfl.federation.task import Task
from raypfl.methods.local_training import finetuned, mask_of_option, with_entries
from raypfl.models.flat import FlatModel


class Parts(NamedTuple):
    """Division of a model vector's entries: three masks ``bool[P+B]``, exactly one of them true at each entry.

    Attributes
    ----------
    personal : entries that each client trains and keeps.
    shared : entries that are trained and averaged.
    frozen : entries that stay at the initial values and are never sent. They are in the vector because fine-tuning
        trains them.
    """

    personal: Tensor
    shared: Tensor
    frozen: Tensor


@METHODS.register("partial")
class PartialPersonalization(Method):
    """Each client keeps a part of the network; the rest is averaged (Pillutla et al. 2022).

    ``min_{u, v_1..v_K} sum_k n_k F_k(u, v_k)``, with ``u`` shared and ``v_k`` kept on client k. ``u``, with its
    batch-norm statistics, is sent both ways. If nothing is personal it is FedAvg, and if nothing is shared it is local
    training, bit for bit.

    The global model is the shared part with everything else at its initial values (Dai et al. 2023).

    Attributes
    ----------
    personal : what stays on the client: comma-separated names, modules, globs or parts such as ``output layer`` (see
        :meth:`FlatModel.names`); empty: nothing.
    frozen : what keeps its initial values on all clients until fine-tuning, named in the same way.
    order : order of local training: both parts ``together``, or one after the other with the other part fixed.
    personal_epochs, shared_epochs : number of epochs of a part that is trained alone; None: training.epochs.
    body : shared part of personal models in evaluations: the server's ``average``, or the client's ``last`` trained
        one, which the client then has to keep.
    unseen_epochs : number of epochs of the personal part of a client that was never trained, with the shared part
        fixed; None: personal_epochs.
    finetune_epochs : number of epochs of fine-tuning before each evaluation. It trains the whole model, frozen parts
        too, and the run does not use the result.
    finetune_lr : learning rate of fine-tuning; None: that of the last round.
    weighting : weights of clients in the average: training samples (``samples``) or equal (``uniform``).
    """

    personal: str = "output layer"
    frozen: str = ""
    order: Annotated[Literal["together", "personal first", "shared first"], needs("personal")] = "together"
    personal_epochs: Annotated[int | None, FROM_ZERO, needs("order", "personal first", "shared first")] = None
    shared_epochs: Annotated[int | None, FROM_ZERO, needs("order", "personal first", "shared first")] = None
    unseen_epochs: Annotated[int | None, FROM_ZERO, needs("personal")] = None
    body: Literal["average", "last"] = "average"
    finetune_epochs: Annotated[int, FROM_ZERO] = 0
    finetune_lr: Annotated[float | None, POSITIVE, needs_some("finetune_epochs")] = None
    weighting: Weighting = "samples"

    def parts(self, model: FlatModel) -> Parts:
        """Return the personal, shared and frozen parts of the network.

        Raises
        ------
        ConfigError : if a pattern selects nothing, or a segment is both personal and frozen.
        """
        personal = mask_of_option(model, "personal", self.personal)
        frozen = mask_of_option(model, "frozen", self.frozen)
        if bool((personal & frozen).any()):
            both = [name for name in model.names(self.personal) if name in model.names(self.frozen)]
            raise ConfigError(
                f"method.personal {self.personal!r} and method.frozen {self.frozen!r} both select {', '.join(both)}; "
                "a client cannot train what is frozen."
            )
        return Parts(personal, ~(personal | frozen), frozen)

    def leaves_untrained(self) -> bool:
        return bool(self.personal)

    def check(self, model: FlatModel) -> None:
        if bool(self.parts(model).frozen.all()):
            raise ConfigError(
                f"method.frozen {self.frozen!r} is all of this network, so no round would train or send anything. "
                "Choose a network with more layers, or another method."
            )

    def exchanged(self, model: FlatModel) -> Tensor:
        return self.parts(model).shared

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
        parts = self.parts(clients.model)
        start = clients.initial
        if shared is not None:
            start = with_entries(clients, parts.shared, shared)

        theta = self._with_personal(clients, start)
        for trainable, epochs in self._phases(parts):
            theta = clients.sgd(clients.loss, theta, train=trainable, epochs=epochs)

        if bool(parts.personal.any()):
            clients.state["personal"] = theta[:, parts.personal]
        if self.body == "last":
            clients.state["shared"] = theta[:, parts.shared]
        if shared is None:
            return {}
        return {"shared": Mean(theta[:, parts.shared], clients.weights(self.weighting))}

    def global_model(self, server: ServerState) -> Tensor | None:
        return server["theta"]

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        average = clients.complete(server["theta"])
        theta = self._with_personal(clients, average)
        if self.body == "last":
            shared = self.parts(clients.model).shared
            theta[:, shared] = clients.state.get("shared", default=average[shared])
        return finetuned(clients, theta, self.finetune_epochs, self.finetune_lr)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        """Train the personal part from the initial values, with the shared part fixed."""
        personal = self.parts(clients.model).personal
        theta = clients.complete(server["theta"])
        if bool(personal.any()):
            epochs = self.personal_epochs if self.unseen_epochs is None else self.unseen_epochs
            theta = clients.sgd(clients.loss, theta, train=personal, epochs=epochs, stream="unseen")
        return finetuned(clients, theta, self.finetune_epochs, self.finetune_lr)

    def _with_personal(self, clients: Clients, theta: Tensor) -> Tensor:
        """Return each client's model ``[K, P+B]``: `theta`, one or ``[K, P+B]``, with its personal part."""
        personal = self.parts(clients.model).personal
        rows = unmarked(theta).expand(len(clients), -1).clone()
        if bool(personal.any()):
            rows[:, personal] = unmarked(clients.state.get("personal", default=theta[..., personal]))
        return per_client(rows)

    def _phases(self, parts: Parts) -> list[tuple[Tensor | None, int | None]]:
        """Return what each phase trains, as a mask (None: everything), and its epochs (None: training.epochs)."""
        phases: list[tuple[Tensor, int | None]] = [(~parts.frozen, None)]
        if self.order != "together":
            phases = [(parts.personal, self.personal_epochs), (parts.shared, self.shared_epochs)]
        if self.order == "shared first":
            phases.reverse()

        result: list[tuple[Tensor | None, int | None]] = []
        for trainable, epochs in phases:
            if bool(trainable.any()) and epochs != 0:
                result.append((None if bool(trainable.all()) else trainable, epochs))
        return result


def _warn_if_absent(model: FlatModel, pattern: str) -> None:
    for part in pattern.split(","):
        name = part.strip()
        if not model.common_parts.get(name, [name]):
            warnings.warn(f"The network has no {name}, so nothing of it is personal.", stacklevel=2)
