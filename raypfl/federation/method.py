"""What a federated method is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.common.component import Component
from raypfl.common.errors import IncompleteError, MethodError
from raypfl.common.registry import Registry
from raypfl.federation.cohort import Cohort
from raypfl.federation.task import Task
from raypfl.learning.objectives import Objective
from raypfl.models.flat import FlatModel
from raypfl.models.predictor import Predictor

METHODS = Registry("method")

ServerState = dict[str, Any]
"""A method's server state: tensors, numbers, strings, dicts and lists of them. Assign to it, never to the method."""

ServerView = Mapping[str, Any]
"""The server's state as clients see it in an evaluation. An entry is fetched when it is read."""


def _refused(method: Method, name: str, value: Any) -> None:
    raise MethodError(
        f"{type(method).__name__}.{name} cannot be set: one method object, of hyperparameters alone, serves all "
        f'clients. What clients remember belongs in clients.state["{name}"], what the server remembers in '
        f'server["{name}"] of round(self, server, cohort).'
    )


class Method(Component):
    """A federated method: a frozen dataclass of its hyperparameters, and what server and clients do in a round.

    Subclasses become dataclasses by themselves. Nothing is kept on the method object: what the server remembers is in
    `server`, what a client remembers in ``clients.state``.

    Attributes
    ----------
    objectives : what it can learn, with subclasses; a run of it with another objective is refused.
    test_data_in_training : whether its rounds may read clients' test samples, as in ``clients.evaluate(theta,
        "test")``. Test results then do not show how well it does on new samples.
    """

    section: ClassVar[str] = "method."
    objectives: ClassVar[tuple[type[Objective], ...]] = (Objective,)
    test_data_in_training: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__setattr__ = _refused  # type: ignore[method-assign,assignment]

    def network(self, network: nn.Module) -> nn.Module:
        """The clients' network as this method needs it, from the one that the experiment names."""
        return network

    def check(self, model: FlatModel) -> None:
        """Raise a ConfigError if the options do not fit the clients' network; asked before anything is started."""

    def needed_pools(self) -> tuple[str, ...]:
        """The names in ``data.pools`` that this method needs; a run without one of them is refused."""
        return ()

    def networks(self, task: Task) -> dict[str, FlatModel]:
        """Networks other than the clients' model; later they are in ``task.networks`` and ``clients.networks``."""
        return {}

    def start(self, task: Task) -> ServerState:
        """The server's state before the first round."""
        raise IncompleteError(f"{type(self).__name__} does not say how it starts: define start(self, task).")

    def round(self, server: ServerState, cohort: Cohort) -> None:
        """One round: change `server`, calling ``cohort.run(self.some_client_function, ...)``."""
        raise IncompleteError(
            f"{type(self).__name__} does not say what a round is: define round(self, server, cohort)."
        )

    def global_model(self, server: ServerState) -> Tensor | None:
        """The server's model ``[P+B]``, or None if the method has none."""
        return None

    def personalize(self, server: ServerState, cohort: Cohort) -> None:
        """Exchanges by which clients get their models, for methods in which the server takes part in that.

        Runs on the server in each evaluation, for all clients, in cohorts no larger than a round's. ``cohort.unseen``
        says whether they are clients that are never trained. What clients put into ``clients.state`` is there for
        `personal_model` and `unseen_model` and is then discarded, as are changes to `server` and what is logged. The
        ledger counts what is sent, apart from training. By default there is nothing to do.
        """

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor | None:
        """Each client's own model ``[K, P+B]``, or None if the method has none. Runs on the clients.

        A model that is not the network at a vector (a memory of samples, a mixture of models) is a
        :class:`raypfl.Predictor`. An entry of `server` is sent to the clients when it is read; it is not charged.
        """
        return None

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor | Predictor | None:
        """The models of clients that are never trained, as in `personal_model`, or None for the global model.

        Runs on the clients. It may use their training samples, as in ``clients.sgd(clients.loss, server["theta"])``;
        what it leaves in ``clients.state`` is discarded. By default None or, for a method that has `personalize`, the
        result of `personal_model`.
        """
        return self.personal_model(clients, server) if self.has("personalize") else None

    def has(self, function: str) -> bool:
        """Whether the method has a function of this name of its own, in place of the one that does nothing."""
        return getattr(type(self), function) is not getattr(Method, function)
