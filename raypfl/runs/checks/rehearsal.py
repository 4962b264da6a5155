"""Rounds and an evaluation of a few clients before a run begins, which show what nothing else can."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.steps.local_training import training_length
from raypfl.clients.worker import Worker
from raypfl.common.errors import ConfigError, EvaluationError, LateReplyError, MethodError
from raypfl.common.threads import threads
from raypfl.common.user_code import with_location
from raypfl.devices import Exchange, Loads, RequestedTraining, Training, Turn
from raypfl.engine.backends.inline import Inline
from raypfl.engine.evaluator import Evaluator
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.federation.asynchronous.rounds import AsynchronousRounds
from raypfl.federation.asynchronous.schedule import Schedule
from raypfl.federation.cohort import Cohort
from raypfl.federation.ledger import Ledger, LedgerEntry
from raypfl.federation.method import Method
from raypfl.models.cost import measured_cost
from raypfl.runs.checks.network import FEW, outputs_of_batch
from raypfl.storage.stacks import merged
from raypfl.storage.states import StateTable

FEW_CLIENTS = 2
"""Clients in a rehearsed round: masks and some methods need two."""


class Rehearsal:
    """Rounds of few steps and an evaluation, of the `size` clients with most samples, all in one group."""

    def __init__(self, prepared: Prepared, size: int, steps: int = 1):
        changes = [f"engine.group_size={size}", f"training.steps={steps}", "failures.loss_limit=.inf"]
        # With no share of a GPU, the data stay in the host's memory.
        self._prepared = prepared.with_settings(prepared.experiment.override(changes), gpus=0.0)
        self._size = size
        self._task = self._prepared.task
        self._method = prepared.experiment.method
        self._training_settings = prepared.experiment.training

        self._round = 0
        self._ledger = Ledger()
        worker = Worker(self._prepared.context, self._method)
        backend = Inline(worker, threads=prepared.experiment.engine.threads)
        self._runner = self._prepared.runner(
            backend, StateTable(), self._ledger, emit=lambda event: None, warn=lambda text: None
        )
        self._server = self._method.start(self._task)

    @classmethod
    def of_cohort(cls, prepared: Prepared) -> Rehearsal:
        """Return a rehearsal of as many clients as a cohort has, but of no more than are needed."""
        return cls(prepared, min(FEW_CLIENTS, prepared.cohort_size))

    def train(self, number: int | None = None) -> int:
        """Run a round of this number, or the next one; return its number of exchanges."""
        self._round = self._round + 1 if number is None else number
        clients = self._largest(self._task.num_samples)
        cohort = Cohort(self._runner, clients, self._round, self._prepared.experiment.training.lr)
        self._method.round(self._server, cohort)
        self._runner.states.commit()
        return cohort.num_exchanges

    def turn(self) -> Turn:
        """Run a round, and return what it asks of a client."""
        context = self._prepared.context
        requested: list[RequestedTraining] = []
        for network_context in (context, *context.by_architecture):
            network_context.requested = requested
        self.train()

        clients = self._largest(self._task.num_samples)
        trainings = defaultdict(list)
        for request in requested:
            # An executor that runs clients one by one makes the same requests for each.
            if request.ids[0] == clients[0]:
                trainings[request.exchange].append(self._training(request))
        for network_context in (context, *context.by_architecture):
            network_context.requested = None

        bytes_of: Counter[tuple[int, str]] = Counter()
        for entry in self._ledger.entries:
            if entry.round == self._round:
                bytes_of[entry.exchange, entry.direction] += entry.clients * entry.bytes

        # The mean over the run's clients, of which those of the rehearsal may have larger or smaller messages.
        loads = self._method.loads(self._task) or _loads_of_architectures(self._prepared)
        rehearsed_size = float(len(clients))
        if loads is not None:
            loads = replace(loads, messages=loads.messages / loads.messages[self._task.trained].mean())
            rehearsed_size = loads.messages[list(clients)].sum()
        sizes_in_round = self._method.message_sizes(self._task, self._round)
        if sizes_in_round is not None:
            rehearsed_size = sizes_in_round[list(clients)].sum()

        exchanges = []
        for number in range(1 + max((exchange for exchange, _ in bytes_of), default=0)):
            exchanges.append(
                Exchange(
                    tuple(trainings[f"training {number}"]),
                    bytes_of[number, "down"] / rehearsed_size,
                    bytes_of[number, "up"] / rehearsed_size,
                )
            )
        return Turn(tuple(exchanges), loads)

    def _training(self, request: RequestedTraining) -> Training:
        """Return a requested training, with the run's settings for what the method leaves open."""
        settings = self._training_settings
        length = training_length(settings, request.epochs, request.steps, request.batch_size)
        return Training(*length, settings.smallest_batch, request.models)

    def asynchronous(self, together: bool) -> dict[str, Any]:
        """Run two asynchronous rounds; return the server's state and the clients'.

        The first client's reply ends round 1. It is sent the new model at once, and both clients' replies end round 2.

        Parameters
        ----------
        together : whether the two clients, which then have different models, train in one group.

        Raises
        ------
        LateReplyError : if the method's late replies could not be used, as far as these rounds and the message of the
            run's last one show.
        """
        clients = self._largest_of_one_network()
        schedule = Schedule(
            clients=np.array([0, len(clients) - 1, 0]),
            rounds=np.array([1, 1, 2]),
            joins=np.array([1, 2, 2]),
            drops=np.zeros(3, dtype=bool),
            begins=np.array([0.0, 0.0, 1.0]),
            ends=np.array([1.0, 2.0, 2.0]),
            replies=np.array([0, 1, 2]),
            round_ends=np.array([1.0, 2.0]),
        )
        settings = self._prepared.experiment.asynchronous
        lr = self._prepared.experiment.training.lr
        rounds = AsynchronousRounds(
            settings, schedule, np.array(clients), self._method, self._runner, lambda round: lr, together
        )
        for number in (1, 2):
            cohort = rounds.cohort(number, self._server, {})
            self._method.round(self._server, cohort)
            self._runner.states.commit()
        self._refuse_last_round(rounds, clients)

        return {"server": self._server, "clients": self._states_of(clients)}

    def states(self) -> dict[int, dict[str, Tensor]]:
        """Return what each client keeps, by client and name."""
        return self._states_of(self._largest(self._task.num_samples))

    def _states_of(self, clients: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        states = {}
        for client in clients:
            refs = self._runner.states.refs(client)
            state = merged(ref.stack.state_of(ref.slot) for ref in refs)
            states[client] = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
        return states

    @property
    def messages(self) -> list[LedgerEntry]:
        """The messages of the rounds so far."""
        return self._ledger.entries

    @property
    def bytes_up(self) -> int:
        """The bytes that clients have sent so far."""
        return sum(entry.clients * entry.bytes for entry in self.messages if entry.direction == "up")

    def _refuse_last_round(self, rounds: AsynchronousRounds, clients: tuple[int, ...]) -> None:
        """Raise a LateReplyError if the run's last round, which may follow a warm-up, cannot be asynchronous."""
        try:
            rounds.message(self._prepared.experiment.rounds, clients, self._server)
        except LateReplyError:
            raise
        except Exception:
            # The method may need the rounds in between.
            return

    def evaluate(self, all_protocols: Sequence[str]) -> None:
        """Evaluate by protocols, except for those of unseen clients, which are tested in the same way."""
        protocols = [protocol for protocol in all_protocols if protocol != "unseen"]
        clients = list(self._largest(self._task.num_test_samples))
        Evaluator(self._prepared, self._runner).evaluate_clients(self._server, 1, clients, protocols, unseen=False)

    def _largest(self, samples: np.ndarray) -> tuple[int, ...]:
        """Return the trained clients with most of these samples."""
        return tuple(sorted(self._ranked(samples)[: self._size]))

    def _largest_of_one_network(self) -> tuple[int, ...]:
        """Return the trained clients of one network with most training samples, which can train in one group."""
        ranked = np.array(self._ranked(self._task.num_samples))
        parts = [ranked[positions][: self._size] for positions in self._task.by_architecture(ranked)]
        return tuple(sorted(max(parts, key=len).tolist()))

    def _ranked(self, samples: np.ndarray) -> list[int]:
        """Return the trained clients, those with most of these samples first."""
        unseen = set(self._task.unseen.tolist())
        return [client for client in np.argsort(-samples, kind="stable").tolist() if client not in unseen]


def _loads_of_architectures(prepared: Prepared) -> Loads | None:
    """Return the work of each client's network as a share of the costliest one's; None if all have the same."""
    if prepared.architecture_of is None:
        return None

    multiplications = []
    for homogeneous in prepared.by_architecture():
        with measured_cost(homogeneous.model.module, samples=FEW) as cost:
            outputs_of_batch(homogeneous, channels_last=False, train=False)
        multiplications.append(cost.multiplications)
    work = np.array(multiplications) / max(multiplications)
    return Loads(np.ones(len(prepared.architecture_of)), work[prepared.architecture_of])


def refuse_rehearsed(prepared: Prepared, error_class: type[MethodError], setting: str = "") -> None:
    """Rehearse a round and an evaluation, since only they tell what a method's clients send and read.

    The run's last round, too, which may follow a warm-up. Without the rounds in between, the method may fail in it for
    other reasons.

    Parameters
    ----------
    error_class : the class of what is looked for in the last round; in the first one, it is any mistake of a method.
    setting : the setting that is about what clients send, for a warning if they send nothing; empty: there is none.

    Raises
    ------
    ConfigError : for what is found.
    """
    experiment = prepared.experiment
    sought: type[MethodError] = MethodError
    try:
        with threads(threads_of_server(experiment)):
            rehearsal = Rehearsal.of_cohort(prepared)
            rehearsal.train()
            rehearsal.evaluate(experiment.evaluation.protocols)
            sought = error_class
            rehearsal.train(experiment.rounds)
    except MethodError as error:
        if isinstance(error, sought):
            raise ConfigError(with_location(error)) from error
        return
    # Any other failure is left to the run itself, which reports it with its round and client.
    except Exception:
        return

    if setting and not rehearsal.bytes_up:
        warn_of_silent_clients(experiment.method, setting)


def warn_of_silent_clients(method: Method, setting: str) -> None:
    """Warn that clients sent nothing in rehearsed rounds, so that a setting which is about messages has no effect.

    It is no error: other methods of a comparison may send something, and this one in other rounds.
    """
    warnings.warn(
        f"In the rounds that were tried before the run, clients of {type(method).__name__} send nothing to the server, "
        f"so {setting} has no effect on them.",
        stacklevel=2,
    )


def refuse_failing_evaluation(prepared: Prepared) -> None:
    """Raise a ConfigError if the method makes no models for an evaluation or changes a state, or if a metric fails.

    The run's first one may come hours later. This one is of the models at the start, since a round might take long. The
    methods and objectives of raypfl are tested, so runs with no others, and no further metrics, need not wait for it.
    """
    experiment = prepared.experiment
    components = (experiment.method, prepared.objective)
    are_tested = all(type(component).__module__.startswith("raypfl.") for component in components)
    if are_tested and not experiment.evaluation.metrics:
        return

    try:
        with threads(threads_of_server(experiment)):
            Rehearsal(prepared, FEW_CLIENTS).evaluate(["local"])
    except EvaluationError as error:
        raise ConfigError(with_location(error)) from error
    # Without rounds before it, the method may have no models to return.
    except Exception:
        return
