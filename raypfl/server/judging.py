"""How clients are judged: they are given their models, which may take exchanges of its own, and those are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raypfl.clients.clients import Clients, learning_rate
from raypfl.common.errors import MethodError, RaypflError
from raypfl.common.messages import Each, Scatter, Sum
from raypfl.common.user_code import where_defined
from raypfl.evaluation import Measures, tabulate
from raypfl.federation.cohort import Exchanger, Judged
from raypfl.federation.method import Method
from raypfl.federation.schedule import cohort_size, even
from raypfl.federation.totals import Total
from raypfl.models.predictor import Predictor
from raypfl.server.scoring import score
from raypfl.server.setup import groups_for
from raypfl.storage.tree import cloned
from raypfl.training.unkeyed import ON_CLIENTS, ON_SERVER, refuse_unkeyed

if TYPE_CHECKING:
    from raypfl.config import Experiment


class Judge:
    """Judges all clients of a run. What they and the server know is afterwards as it was before.

    Parameters
    ----------
    exchanger : of the run, whose clients' states are looked at.
    """

    def __init__(self, experiment: Experiment, exchanger: Exchanger):
        self.experiment = experiment
        self.method = experiment.method
        self.exchanger = exchanger
        self.task = exchanger.task
        self.measures = Measures(self.task.objective, experiment.evaluation.metrics, self.task.num_classes)

    def columns(self, state: dict[str, Any], round: int) -> dict[str, list[Any]]:
        """Columns of the evaluations table, given the server's state after a round."""
        protocols = self.experiment.evaluation.protocols
        known = self._judged(state, round, self._tested(), [p for p in protocols if p != "unseen"], unseen=False)
        new = self.task.unseen.tolist()
        unseen = self._judged(state, round, new, [p for p in protocols if p == "unseen"], unseen=True)
        return {name: values + unseen[name] for name, values in known.items()}

    def _judged(
        self, state: dict[str, Any], round: int, clients: list[int], protocols: list[str], unseen: bool
    ) -> dict[str, list[Any]]:
        if not clients or not protocols:
            return tabulate(self.measures, round, {}, [], [])
        # Methods that fine-tune what is judged do so at the rate of the round before.
        lr = learning_rate(self.experiment.training, max(round - 1, 0), self.experiment.rounds)
        arguments = self._arguments(state, clients) | {"protocols": protocols, "maker": maker(unseen)}
        total = Total(len(clients), torch.device("cpu"))
        for pairs in self._portions(clients):
            personalize(self.method, state, Judged(self.exchanger, [c for _, c in pairs], round, lr, unseen))
            call, groups = self.exchanger.call(_score, pairs, round, lr, arguments, self._groups)
            for group, reply in self.exchanger.run(call, groups, _unjudged):
                total.add(group, reply.values)
            self.exchanger.states.abandon()
        return tabulate(self.measures, round, total.result(), clients, protocols)

    def _arguments(self, state: dict[str, Any], clients: list[int]) -> dict[str, Any]:
        arguments: dict[str, Any] = {"server": self.method.judged_with(state)}
        if (shared := self.method.global_model(state)) is not None:
            said = self.exchanger.said
            arguments["shared"] = _fitting(shared, [self.task.model.size], self.method.global_model, said)
        position = Scatter(torch.arange(len(clients)))
        return arguments | {"position": position, "total": len(clients)}

    def _portions(self, clients: list[int]) -> list[list[tuple[int, int]]]:
        """``(position, client)``: all at once, or as many as a round has, where they are a cohort of the method's."""
        pairs = list(enumerate(clients))
        if not self.method.has("personalize"):
            return [pairs]
        size = cohort_size(self.experiment.cohort, self.task.num_clients)
        ends = np.cumsum(even(len(pairs), -(-len(pairs) // size))).tolist()
        return [pairs[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _groups(self, clients: int) -> tuple[list[int], str]:
        return groups_for(self.experiment, clients, judged=True), self.experiment.engine.executor

    def _tested(self) -> list[int]:
        """The clients to evaluate: on their own test data alone, those who have any."""
        trained = np.ones(self.task.num_clients, dtype=bool)
        trained[self.task.unseen] = False
        if set(self.experiment.evaluation.protocols) <= {"local", "unseen"}:
            trained &= self.task.num_test_samples > 0
        return np.flatnonzero(trained).tolist()


def personalize(method: Method, state: dict[str, Any], cohort: Judged) -> None:
    """Let a method give clients their models, if that takes exchanges; what it changes on the server is forgotten."""
    if method.has("personalize"):
        with refuse_unkeyed(method.personalize, cohort.task.model.device, ON_SERVER):
            method.personalize(cloned(state), cohort)


def maker(unseen: bool) -> str:
    """Name of the method's function that makes clients' models."""
    return "unseen_model" if unseen else "personal_model"


class Shown(dict[str, Any]):
    """The part of the server's state that clients see when they are judged."""

    def __missing__(self, name: str) -> Any:
        raise MethodError(
            f"The server's {name!r} is not there when clients are judged: judged_with(server) leaves it out. Name it "
            "there, or send it in personalize(server, cohort) and keep it in clients.state."
        )


def _score(
    clients: Clients,
    method: Method,
    server: dict[str, Any],
    protocols: list[str],
    maker: str,
    position: torch.Tensor,
    total: int,
    shared: torch.Tensor | None = None,
) -> Mapping[str, Each | Sum]:
    known = Shown(server)
    shares = [(i, total) for i in position.tolist()]
    make = getattr(method, maker)

    def models(group: Clients) -> torch.Tensor | Predictor | None:
        with refuse_unkeyed(make, group.device, ON_CLIENTS):
            made = make(group, known)
        if isinstance(made, Predictor):
            return _for_all(made, len(group), make)
        return None if made is None else _fitting(made, [len(group), group.model.size], make)

    return score(clients, models, shared, protocols, shares)


def _fitting(made: torch.Tensor, shape: list[int], maker: Callable[..., Any], said: str = "") -> torch.Tensor:
    """The models that a method's function made, if they are of the shape that it must return; else `said` is told."""
    if list(made.shape) != shape:
        meant = "of each client of the group, a row each" if len(shape) > 1 else "in the order of task.model.init"
        text = (
            f"{where_defined(maker)} returned {list(made.shape)}, which is no model of this network; it must "
            f"return {shape}: all parameters and buffer entries, {meant}. {said}"
        )
        raise MethodError(text.rstrip())
    return made


def _for_all(made: Predictor, clients: int, maker: Callable[..., Any]) -> Predictor:
    if len(made) != clients:
        raise MethodError(
            f"{where_defined(maker)} returned a Predictor of {len(made)} clients, but the group has {clients}: a "
            "tensor that is passed row by row must have a row for each."
        )
    return made


def _unjudged(client: int, why: str) -> None:
    raise RaypflError(f"Client {client} could not be evaluated. {why}")
