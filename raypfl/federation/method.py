"""What a federated method is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common.component import Component
from raypfl.common.errors import IncompleteError, MethodError
from raypfl.common.registry import Registry
from raypfl.devices import Loads
from raypfl.federation.cohort import Cohort
from raypfl.federation.task import Task
from raypfl.learning.objectives import Objective
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor

METHODS = Registry("method")

ServerState = dict[str, Any]
"""A method's state on the server: tensors, numbers, strings, dicts and lists of them."""

ServerView = Mapping[str, Any]
"""The server's state as clients see it in an evaluation. An entry is fetched when it is read."""


class Method(Component):
    """Base class of federated methods: hyperparameters, and what the server and the clients do in a round.

    Subclasses automatically become frozen dataclasses. The method object stores hyperparameters only: what the server
    remembers is in `server`, what a client remembers in ``clients.state``.

    Attributes
    ----------
    objectives : the objectives that the method can learn, subclasses included; a run with another one is refused.
    test_data_in_training : whether rounds may read clients' test samples, as in ``clients.evaluate(theta, "test")``.
        Test results then do not show how well the method does on new samples.
    needs_validation : whether rounds read validation samples, as in ``clients.evaluate(theta, "val")``; a run in which
        a client has none is refused.
    needs_lora : whether clients' networks must have low-rank adapters, ``model.lora``; a run without them is refused.
    needs_output_layer : whether rounds change the output layer's weight; a run that freezes it is refused.
    needs_sgd : whether local training must be by SGD, ``training.optimizer=sgd``; a run with another optimizer is
        refused.
    """

    section: ClassVar[str] = "method."
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)
    test_data_in_training: ClassVar[bool] = False
    needs_validation: ClassVar[bool] = False
    needs_lora: ClassVar[bool] = False
    needs_output_layer: ClassVar[bool] = False
    needs_sgd: ClassVar[bool] = False

    def _assignment_error(self, name: str) -> Exception:
        return MethodError(
            f"{type(self).__name__}.{name} cannot be set: one method object, which holds only hyperparameters, serves "
            f'all clients. What clients remember belongs in clients.state["{name}"], what the server remembers in '
            f'server["{name}"] of round(self, server, cohort).'
        )

    def network(self, network: nn.Module) -> nn.Module:
        """Return the clients' network as this method needs it, given the one that the experiment names."""
        return network

    def check(self, model: FlatModel) -> None:
        """Raise a ConfigError if the options do not fit the clients' network. Called before a run starts anything."""

    def exchanged(self, model: FlatModel) -> Tensor:
        """Return which entries of the clients' network go from clients to the server or back, ``bool[P+B]``.

        By default all. A method that exchanges at most the output layer can train clients with different architectures.
        The server then has that layer alone, and :meth:`Clients.complete` adds the rest of a client's network.
        """
        return torch.ones(model.size, dtype=torch.bool, device=model.device)

    def needed_pools(self) -> tuple[str, ...]:
        """Return the names in ``data.pools`` that this method needs; a run without one of them is refused."""
        return ()

    def needs_whole_replies(self) -> bool:
        """Return whether the server's state must match the clients', such as the mean of their control variates.

        In an asynchronous run, replies must then count in full, however late.
        """
        return False

    def needs_weights(self) -> bool:
        """Return whether clients' weights in a mean make the method what it is, so that no equal ones can replace them.

        A run with a robust rule, under which all clients count equally, is then refused.
        """
        return False

    def depends_on_rounds(self) -> bool:
        """Return whether a round depends on the number of rounds, ``cohort.task.rounds``.

        The number of rounds of such a run cannot be changed once it has begun.
        """
        return False

    def loads(self, task: Task) -> Loads | None:
        """Return the message sizes and work of each client, if these differ for other reasons than their samples.

        Simulated time depends on them; None: clients differ in their samples alone.
        """
        return None

    def message_sizes(self, task: Task, round: int) -> np.ndarray | None:
        """Return the sizes of clients' messages in a round, if they change, ``float64[num_clients]``.

        They are relative to the mean over clients and rounds. None: they are those of `loads` in every round.
        """
        return None

    def leaves_untrained(self) -> bool:
        """Return whether the global model has initial values where clients keep a part of their own."""
        return False

    def networks(self, task: Task) -> dict[str, FlatModel]:
        """Return further networks by name; they are then in ``task.networks`` and ``clients.networks``."""
        return {}

    def start(self, task: Task) -> ServerState:
        """Return the server's state before the first round."""
        raise IncompleteError(f"{type(self).__name__} does not say how it starts: define start(self, task).")

    def round(self, server: ServerState, cohort: Cohort) -> None:
        """Run one round: call ``cohort.run(self.some_client_function, ...)`` and change `server`."""
        raise IncompleteError(
            f"{type(self).__name__} does not say what a round is: define round(self, server, cohort)."
        )

    def global_model(self, server: ServerState) -> Tensor | None:
        """Return the server's model ``[P+B]``, or None if the method has none."""
        return None

    def personalize(self, server: ServerState, cohort: Cohort) -> None:
        """Prepare personal models before an evaluation, if the server takes part in making them.

        Runs on the server in each evaluation, for all clients, in cohorts no larger than a round's. ``cohort.unseen``
        says whether they are clients that are never trained. `personal_model` and `unseen_model` find in
        ``clients.state`` what clients put there; it is then discarded, as are changes to `server` and what is logged.
        The ledger counts these messages apart from training. Does nothing by default.
        """

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor | None:
        """Return each client's own model ``[K, P+B]``, or None if the method has none. Runs on the clients.

        A model that is not the network at a vector (a memory of samples, a mixture of models) is a
        :class:`raypfl.Predictor`. An entry of `server` is sent to the clients when it is read; it is not charged.
        """
        return None

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor | None:
        """Return the models of clients that are never trained, as in `personal_model`, or None for the global model.

        Runs on the clients. It may use their training samples, as in ``clients.sgd(clients.loss, server["theta"])``;
        changes of ``clients.state`` are discarded. By default None or, for a method that has `personalize`, the result
        of `personal_model`.
        """
        return self.personal_model(clients, server) if self.has("personalize") else None

    def has(self, function: str) -> bool:
        """Return whether the method overrides this function."""
        return getattr(type(self), function) is not getattr(Method, function)
