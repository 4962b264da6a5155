"""Evaluation of all clients of a run: make their models, with exchanges if the method needs them, and test them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from raypfl.clients.clients import Clients
from raypfl.clients.group import ClientGroup
from raypfl.common.counting import counted
from raypfl.common.errors import ClientError, EvaluationError, MethodError
from raypfl.common.global_draws import ON_CLIENTS, ON_SERVER, refuse_unkeyed
from raypfl.common.messages import Each, Scatter, Sum, unmarked
from raypfl.common.rounds import is_due
from raypfl.common.user_code import where_defined
from raypfl.common.user_warnings import user_warnings
from raypfl.engine.building.groups import groups_for
from raypfl.engine.prepared import Prepared
from raypfl.engine.scoring import score
from raypfl.evaluation import BestRound, select, summarise, tabulate, validation_aggregates
from raypfl.evaluation.masking import Mask
from raypfl.evaluation.protocols import BACKDOOR
from raypfl.federation.cohort import Cohort
from raypfl.federation.cohort_draw import cohort_size
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.exchange.grouping import even_sizes
from raypfl.federation.method import Method
from raypfl.learning.privacy import Spending
from raypfl.models.double_precision import refuse_mixed_precision
from raypfl.models.predictor import Predictor
from raypfl.storage.tree import Copies

EXCHANGE = "evaluation"
"""The name of the exchange in which models are made; noise that a private training draws is keyed by it."""


class EvaluationCohort(Cohort):
    """The cohort in :meth:`raypfl.Method.personalize`: clients that are about to be evaluated.

    Nobody drops out. A client that fails ends the run, since the mean over the others would be another quantity.
    """

    phase = "prediction"

    def __init__(self, runner: GroupRunner, ids: Sequence[int], round: int, lr: float, unseen: bool):
        super().__init__(runner, tuple(ids), round, lr)
        self.unseen = unseen

    def run_everyone(self, function: Callable[..., Any], /, **arguments: Any) -> NoReturn:
        raise EvaluationError(
            f"{where_defined(function)} was called by cohort.run_everyone in an evaluation, which is of all clients, "
            "one cohort after the other; call cohort.run."
        )

    def _drop_client(self, client: int, error: ClientError) -> None:
        raise type(error)(f"Client {client} could not be given its model. {error}", [client])


class Evaluator:
    """Evaluates all clients of a run without changing any state, and keeps track of the best round.

    `spent` : what the last evaluation spent of clients' privacy.
    """

    def __init__(self, prepared: Prepared, runner: GroupRunner):
        self._last = 0
        self.spent: list[Spending] = []
        self._validated: dict[int, dict[str, Any]] = {}
        self.experiment = prepared.experiment
        self.method = prepared.experiment.method
        self.runner = runner
        self.task = prepared.task
        self.measures = prepared.measures
        self._is_malicious = prepared.is_malicious

    @property
    def best_round(self) -> int | None:
        """The best round by validation data; None: no round was validated."""
        return self._selection().round

    def is_due(self, round: int) -> bool:
        """Return whether clients still have to be evaluated after this round."""
        settings = self.experiment.evaluation
        return round > self._last and (round == 0 or is_due(round, settings.every, self.experiment.rounds))

    def reason_to_stop(self) -> str | None:
        """Return why the run ends before its last round, as a sentence; None if it continues."""
        patience = self.experiment.evaluation.patience
        if patience is None:
            return None
        selection = self._selection()
        if selection.waited < patience:
            return None
        best = "none had a value" if selection.round is None else f"round {selection.round} was the best"
        return f"{counted(selection.waited, 'evaluation')} in a row gave nothing better on validation data; {best}."

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the evaluator, for :meth:`restore`."""
        return {"evaluated": self._last, "validated": [[round, row] for round, row in self._validated.items()]}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Go back to what a checkpoint has `saved`; None: to the start of the run."""
        if saved is not None:
            self._last = saved["evaluated"]
            self._validated = dict(saved["validated"])
            return

        # -1: the evaluation before the first round, of round 0, is due.
        self._last = -1 if self.experiment.evaluation.at_start else 0
        self._validated = {}

    def evaluate(self, state: dict[str, Any], round: int) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
        """Evaluate all clients, given the server's state after a round.

        Returns the columns of the evaluations table, and their summary.
        """
        self.spent = []
        columns = self._columns(state, round)
        self._warn_of_nan(columns, round)
        self._warn_of_no_models(columns)
        return columns, summarise(self.measures, columns)

    def record(self, round: int, summary: list[dict[str, Any]]) -> None:
        """Remember that clients were evaluated after a round, with this summary."""
        self._last = round
        aggregates = validation_aggregates(summary)
        if aggregates is not None:
            self._validated[round] = aggregates

    def evaluate_clients(
        self, state: dict[str, Any], round: int, clients: list[int], protocols: list[str], unseen: bool
    ) -> dict[str, list[Any]]:
        """Evaluate some clients, all `unseen` or all trained; return their columns of the evaluations table."""
        masks = self.experiment.evaluation.masks
        maker = model_hook(unseen)
        if not clients or not protocols:
            return tabulate(self.measures, round, {}, [], [])

        # Methods that fine-tune models for evaluation use the learning rate of the round before.
        lr = self.experiment.training.learning_rate(max(round - 1, 0), self.experiment.rounds)
        arguments = {
            "protocols": protocols,
            "maker": maker,
            "total": len(clients),
            "masks": list(masks),
            "position": Scatter(torch.arange(len(clients))),
        }
        shared = self.global_model(state)
        if shared is not None:
            arguments["shared"] = shared
        # Only these two functions of a method read the server's state.
        makes_models = self.method.has("personal_model") or self.method.has("unseen_model")
        visible_state = state if makes_models else {}

        group_sizes = partial(groups_for, self.experiment.engine, evaluation=True)
        copies = Copies()
        replies = ReplyAggregator(len(clients), torch.device("cpu"))
        for pairs in self._portions(clients):
            cohort = EvaluationCohort(self.runner, [client for _, client in pairs], round, lr, unseen)
            with user_warnings() as texts:
                personalize(self.method, state, cohort, copies)
            call, groups = self.runner.prepare(
                _score, pairs, round, lr, arguments, group_sizes, visible_state, exchange=EXCHANGE
            )
            spent: dict[int, list[Spending]] = {}
            for group, done in self.runner.run(call, groups, _refuse_failure):
                replies.add(group, done.reply.values, done.subtrees)
                spent[group.index] = done.reply.spent
                texts.update(done.reply.notes)
            replies.next_exchange()
            for text in sorted(texts):
                self.runner.warn(text)

            self.spent += cohort.spent
            for _, group_spent in sorted(spent.items()):
                self.spent += group_spent
            # What clients stored for their evaluation is discarded.
            self.runner.states.abandon()

        for name, sizes in replies.sent.items():
            num_with_model = sum(clients_of_size for *_, clients_of_size in sizes)
            if name.startswith("personal/") and num_with_model < len(clients):
                raise _none_for_some(getattr(self.method, maker))
        return tabulate(self.measures, round, replies.result("The evaluation"), clients, protocols, masks)

    def global_model(self, state: dict[str, Any], hint: str = "") -> torch.Tensor | None:
        """Return the method's global model ``[P+B]`` at a state of the server, or None.

        `hint` : a sentence on where the state is from, for errors.

        Raises
        ------
        EvaluationError : if the method returns what is no model of the clients' network.
        """
        model = self.experiment.global_model(state)
        if model is None:
            return None
        hint = f"{hint} {self.runner.last_exchange}".strip()
        _refuse_misshapen(model, [self.task.model.size], self.method.global_model, hint)
        _refuse_unless_finite(model[None], self.method.global_model, ["the global model"], hint)
        return model

    def _selection(self) -> BestRound:
        return select(self.measures, self._validated, self.experiment.evaluation)

    def _columns(self, state: dict[str, Any], round: int) -> dict[str, list[Any]]:
        """Return columns of the evaluations table: first the trained clients, then the unseen ones."""
        protocols = self.experiment.evaluation.protocols
        for_trained = [protocol for protocol in protocols if protocol != "unseen"]
        for_unseen = [protocol for protocol in protocols if protocol == "unseen"]
        trained = self.evaluate_clients(state, round, self._trained_clients(), for_trained, unseen=False)
        unseen = self.evaluate_clients(state, round, self.task.unseen.tolist(), for_unseen, unseen=True)
        return {name: values + unseen[name] for name, values in trained.items()}

    def _warn_of_nan(self, columns: Mapping[str, list[Any]], round: int) -> None:
        """Warn of models whose outputs are nan although they are finite: they count as models that guess."""
        if "loss" not in columns:
            return
        rows = zip(columns["model"], columns["client"], columns["loss"], strict=True)
        failed: dict[str, None] = {}
        for model, client, loss in rows:
            if loss is not None and math.isnan(loss):
                failed["the global model" if model == "global" else f"client {client}'s model"] = None
        if failed:
            models = f"{counted(len(failed), 'model')}, such as {next(iter(failed))}"
            self.runner.warn(
                f"After round {round}, test outputs are nan for {models}: each counts as one that guesses. A smaller "
                "training.lr or training.clip_norm may help."
            )

    def _warn_of_no_models(self, columns: Mapping[str, list[Any]]) -> None:
        """Warn if a user's function for personal models returned none, perhaps for lack of a `return`."""
        make = self.method.personal_model
        is_users = self.method.has("personal_model") and not make.__module__.startswith("raypfl.")
        if is_users and columns["model"] and "personal" not in columns["model"]:
            self.runner.warn(
                f"{where_defined(make)} returned None, so only the global model was tested. Return the clients' models "
                "[K, P+B], or leave the function out."
            )

    def _portions(self, clients: list[int]) -> list[list[tuple[int, int]]]:
        """Return lists of ``(position, client)``: one or, for methods that personalize, several of a cohort's size."""
        pairs = list(enumerate(clients))
        if not self.method.has("personalize"):
            return [pairs]

        size = cohort_size(self.experiment.cohort, self.task.num_trained)
        portions = []
        start = 0
        for portion_size in even_sizes(len(pairs), math.ceil(len(pairs) / size)):
            portions.append(pairs[start : start + portion_size])
            start += portion_size
        return portions

    def _trained_clients(self) -> list[int]:
        """Return the trained clients to evaluate: honest ones, and with test data if no others are used."""
        is_tested = np.ones(self.task.num_clients, dtype=bool)
        is_tested[self.task.unseen] = False
        is_tested[self._is_malicious] = False
        if set(self.experiment.evaluation.protocols) <= {"local", "unseen", BACKDOOR}:
            is_tested &= self.task.num_test_samples > 0
        return np.flatnonzero(is_tested).tolist()


def personalize(method: Method, state: dict[str, Any], cohort: EvaluationCohort, copies: Copies) -> None:
    """Call the method's `personalize`, if it has one, with a copy of the server's state."""
    if method.has("personalize"):
        model = cohort.task.model
        with refuse_unkeyed(method.personalize, model.device, ON_SERVER), refuse_mixed_precision(model.dtype):
            method.personalize(copies.of(state), cohort)


def model_hook(unseen: bool) -> str:
    """Return the name of the method's function that makes clients' models."""
    return "unseen_model" if unseen else "personal_model"


def _score(
    group: ClientGroup,
    method: Method,
    server: Mapping[str, Any],
    protocols: list[str],
    maker: str,
    position: torch.Tensor,
    total: int,
    masks: list[Mask],
    shared: torch.Tensor | None = None,
) -> Mapping[str, Each | Sum]:
    """Make and test the models of a group of clients; runs on the clients.

    Parameters
    ----------
    maker : the name of the method's function that makes personal models.
    position : ``int64[K]``, the place of each client among all `total` clients that are evaluated.
    shared : the global model ``[P+B]``, or None.
    """
    shares = [(i, total) for i in unmarked(position).tolist()]
    make = getattr(method, maker)
    have_models: set[bool] = set()

    def make_models(clients: Clients) -> torch.Tensor | Predictor | None:
        # A new client has nothing to keep, so its function may share code with a training that stores something.
        clients.state.is_stored = maker != "personal_model"
        with refuse_unkeyed(make, clients.device, ON_CLIENTS), refuse_mixed_precision(clients.model.dtype):
            models = make(clients, server)
        have_models.add(models is not None)
        if len(have_models) > 1:
            raise _none_for_some(make)
        if isinstance(models, Predictor) and len(models) != len(clients):
            raise MethodError(
                f"{where_defined(make)} returned a Predictor of {len(models)} clients, but the group has "
                f"{len(clients)}: a tensor that is passed row by row must have a row for each."
            )
        if models is not None and not isinstance(models, Predictor):
            _refuse_misshapen(models, [len(clients), clients.model.size], make)
            _refuse_unless_finite(models, make, [f"client {client}" for client in clients.ids])
        return models

    return score(group, make_models, shared, protocols, shares, masks)


def _none_for_some(maker: Callable[..., Any]) -> EvaluationError:
    """Return the error for a method's function that makes models for some clients only: a mean would be over those."""
    return EvaluationError(
        f"{where_defined(maker)} returned None for some clients and models for others, but every client needs one. "
        'Give those that have not trained yet a default, as in clients.state.get(name, default=server["theta"]).'
    )


def _refuse_misshapen(models: object, shape: list[int], maker: Callable[..., Any], hint: str = "") -> None:
    """Raise an EvaluationError, which ends in `hint`, unless a method's function made models of this shape."""
    if isinstance(models, torch.Tensor) and list(models.shape) == shape:
        return

    returned = list(models.shape) if isinstance(models, torch.Tensor) else f"a {type(models).__name__}"
    problem = "no model of this network"
    entries = "all parameters and buffer entries"
    if len(shape) == 1:
        must_return = f"{shape}: {entries}, in the order of task.model.init"
    else:
        must_return = f"[len(clients), {shape[1]}], here {shape}: {entries} of each client's model, a row each"
        if returned == shape[1:]:
            problem = "one model, not one for each client"
            must_return += ", as theta.repeat(len(clients), 1) makes them"
    text = f"{where_defined(maker)} returned {returned}, which is {problem}; it must return {must_return}. {hint}"
    raise EvaluationError(text.rstrip())


def _refuse_unless_finite(
    models: torch.Tensor, maker: Callable[..., Any], owners: Sequence[str], hint: str = ""
) -> None:
    """Raise a MethodError if a row of models ``[K, P+B]`` has nan or infinity: it would count as one that guesses.

    `hint` : the end of the error.
    """
    rows = unmarked(models)
    for owner, total in zip(owners, rows.sum(1).tolist(), strict=True):
        if not math.isfinite(total):
            text = f"{where_defined(maker)} returned a model with nan or infinity for {owner}. {hint}"
            raise MethodError(text.rstrip())


def _refuse_failure(client: int, error: ClientError) -> None:
    raise type(error)(f"Client {client} could not be evaluated. {error}", [client])
