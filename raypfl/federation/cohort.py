"""The clients of one round, as the server calls them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.errors import ClientError, EmptyCohort, MethodError, PrivacyError
from raypfl.common.messages import Broadcast, Scatter, numbers_charged
from raypfl.common.user_code import where_defined
from raypfl.federation.aggregation import ReplyAggregator
from raypfl.federation.group_runner import GroupRunner
from raypfl.federation.ledger import LedgerEntry, Phase
from raypfl.federation.logged import Log, Logged
from raypfl.federation.server_training import ServerTraining
from raypfl.learning.privacy import Spending, server_noise
from raypfl.storage.tree import flatten


class _Answer(dict[str, Tensor]):
    """The cohort's reply by name, which the client function `who` returned."""

    def __init__(self, values: Mapping[str, Tensor], who: str):
        super().__init__(values)
        self.who = who

    def __missing__(self, name: str) -> Tensor:
        raise MethodError(
            f"{self.who} returned {', '.join(map(repr, self)) or 'nothing'}; there is no {name!r}. The reply of "
            f"cohort.run has the names that the function returned: use one of them, or return {{{name!r}: Mean(...)}}."
        )


def recorded(cohort: Cohort) -> tuple[dict[int, float], Logged]:
    """The training loss of each client in a round, and what was logged, for the run's record."""
    return cohort._losses, cohort._logged


class Cohort(Log, ServerTraining):
    """The clients of one round, and what the server can do in it.

    Attributes
    ----------
    ids : the clients' numbers, ascending. Rows of a ``Scatter`` and of an ``Each`` reply are in this order.
    present : ``bool[C]``; False for a client that failed in an earlier exchange of this round and was skipped.
    round, lr : the round's number, from 1, and its learning rate.
    unseen : whether these clients are never trained.
    task : what the method was started with.
    spent : of clients' privacy so far.
    """

    phase: ClassVar[Phase] = "training"

    def __init__(
        self,
        runner: GroupRunner,
        ids: tuple[int, ...],
        dropped: tuple[int, ...],
        round: int,
        lr: float,
        analysis: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ):
        self.ids = ids
        self.unseen = False
        self.round = round
        self.lr = lr
        self.task = runner.task
        self.context = runner.context
        self.present = np.ones(len(ids), dtype=bool)
        self._losses: dict[int, float] = {}
        self.failed: dict[int, str] = {}
        Log.__init__(self, analysis)
        self.spent: list[Spending] = []
        self._runner = runner
        self._runner.last_exchange = ""
        self._dropped = dropped
        self._exchanges = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def losses(self) -> dict[int, float]:
        """The mean training loss of each client that reported one."""
        self._refuse_unprotected("losses")
        return self._losses

    @property
    def logged(self) -> Logged:
        """What was logged so far."""
        self._refuse_unprotected("logged")
        return self._logged

    def generator(self, stream: str = "") -> torch.Generator:
        """A generator for the server's own draws; the same stream gives the same draws in a round.

        It draws on the CPU, so that every device gets the same numbers: ``torch.randn(3, generator=g).to(device)``.
        """
        return torch.Generator().manual_seed(rng.key(self.task.seed, "server" + stream, self.round))

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        """One exchange: call one of the method's client functions on every client of the cohort.

        Parameters
        ----------
        function : a client function of the method, ``self.train``: called as ``function(clients, **arguments)`` on
            groups of clients, returning ``{name: Mean | Sum | Each}``.
        arguments : sent to the clients. A tensor or a list of tensors is a broadcast; a ``Broadcast`` also says what of
            it is charged; a ``Scatter`` sends each client its row; numbers and strings go to every client.

        Returns
        -------
        name -> tensor: the mean or the sum over the cohort, or ``[C, ...]`` for ``Each`` (a row of zeros where
        `present` is False).

        Raises
        ------
        MethodError : if `function` is not a method of the federated method, or an argument cannot be sent.
        EmptyCohort : if no client is left.
        """
        name = self._name_of(function)
        self._check(function, arguments)
        self._charge_down(arguments)
        arguments = {name: _tensors_of(value) for name, value in arguments.items()}
        self._refuse_empty()
        pairs = [(p, c) for p, c in enumerate(self.ids) if self.present[p]]
        if self._runner.privacy.secure_aggregation and len(pairs) == 1:
            raise PrivacyError(
                f"The cohort of round {self.round} is one client alone, whose message is the sum: "
                "privacy.secure_aggregation needs two clients or more in every cohort."
            )
        training = self.phase == "training"
        observers = self._runner.observers if training else ()
        call, groups = self._runner.prepare(
            name,
            pairs,
            self.round,
            self.lr,
            arguments,
            observers=observers,
            exchange=self.exchange,
            training=training,
        )
        replies, logged = (ReplyAggregator(len(self.ids), self.task.model.device) for _ in range(2))
        for group, reply in self._runner.run(call, groups, self._lose):
            replies.add(group, reply.values)
            logged.add(group, reply.logged)
            self.spent += reply.spent
            if reply.losses is not None:
                self._losses.update(zip(group.clients, reply.losses.tolist(), strict=True))
            for note in reply.notes:
                self._runner.warn(note)
        self._refuse_empty()
        replies.refuse_exposed(where_defined(function))
        for sent, senders in replies.senders.items():
            self._charge("up", sent, senders, replies.sample[sent].array.itemsize)
        self.log(**logged.result())
        answer = _Answer(self._noisy(name, replies.result()), where_defined(function))
        self._exchanges += 1
        self._runner.last_exchange = f"{answer.who} got {_shapes(arguments)} and returned {_shapes(answer)}."
        return answer

    @property
    def exchange(self) -> str:
        """What tells the exchange from others of the round."""
        return f"{self.phase} {self._exchanges}"

    def _refuse_unprotected(self, name: str) -> None:
        privacy = self._runner.privacy
        if privacy.noise is not None or privacy.secure_aggregation:
            raise PrivacyError(
                f"cohort.{name} was measured without noise and masks, for the run's record only. Under privacy.noise "
                "or privacy.secure_aggregation, a method must not use it: let clients return what the server needs."
            )

    def _noisy(self, function: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means of clients' clipped updates with noise, if clients are protected."""
        privacy, clients = self._runner.privacy, int(self.present.sum())
        if not privacy.protects_clients:
            return means
        where = (self.round, self._exchanges)
        for name, mean in means.items():
            means[name] = mean + server_noise(mean, privacy, clients, self.task.seed, self.phase + name, *where)
        here = [client for client, present in zip(self.ids, self.present, strict=True) if present]
        self.spent += [Spending(client, function, 1.0, 1, len(means)) for client in here if means]
        return means

    def _name_of(self, function: Callable[..., Any]) -> str:
        owner = getattr(function, "__self__", None)
        theirs = getattr(type(owner), getattr(function, "__name__", ""), None)
        if owner is None or theirs is None or theirs is not getattr(function, "__func__", None):
            raise MethodError("cohort.run takes a client function of the method, as in cohort.run(self.train, ...).")
        return function.__name__

    def _check(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        try:
            inspect.signature(function).bind(None, **arguments)
        except TypeError as error:
            sent = ", ".join(["clients", *arguments])
            raise MethodError(
                f"{where_defined(function)} is called with ({sent}), as cohort.run was, but takes others: {error}."
            ) from None
        for name, value in arguments.items():
            if isinstance(value, Scatter) and len(value.rows) != len(self.ids):
                raise MethodError(
                    f"Scatter for {name!r} has {len(value.rows)} rows, but the cohort of round {self.round} has "
                    f"{len(self.ids)} clients."
                )
            if not isinstance(value, Scatter | int | float | str) and not _is_broadcast(value):
                raise MethodError(
                    f"cohort.run cannot send {name!r}, a {type(value).__name__}; send tensors, Broadcast, "
                    "Scatter, numbers or strings."
                )

    def _refuse_empty(self) -> None:
        if not self.present.any():
            raise EmptyCohort(f"Nobody is left in the cohort of round {self.round}.")

    def _lose(self, client: int, why: str) -> None:
        """Go on without a client that failed, unless too few are left."""
        self.failed[client] = why
        self.present[self.ids.index(client)] = False
        self._runner.warn(f"Skipped: {why}")
        least = self._runner.failures.min_success_fraction
        if self.present.mean() < least:
            raise ClientError(
                f"Only {self.present.sum()} of {len(self.ids)} clients of round {self.round} succeeded, fewer than "
                f"failures.min_success_fraction = {least} asks for. The last failure: {why}",
                [client],
            )

    def _charge_down(self, arguments: Mapping[str, Any]) -> None:
        for name, value in arguments.items():
            if isinstance(value, Scatter):
                self._charge_received(name, value.rows, value.rows.shape[1:].numel(), value.charged)
            else:
                charged = value.charged if isinstance(value, Broadcast) else True
                for each, tensor in flatten(_tensors_of(value), name)[1].items():
                    self._charge_received(each, tensor, tensor.numel(), charged)

    def _charge_received(self, name: str, tensor: Tensor, whole: int, charged: bool | int | Tensor) -> None:
        numbers = numbers_charged(name, charged, len(self.ids), whole)
        received = Counter(numbers[self.present].tolist())
        if self._exchanges == 0:  # a client that drops out still receives the round's first message
            received[max(numbers.tolist(), default=whole)] += len(self._dropped)
        self._charge("down", name, received, tensor.element_size())

    def _charge(self, direction: Any, name: str, clients: Mapping[int, int], size: int) -> None:
        """Charge a message: how many `clients` sent or received how many numbers of `size` bytes."""
        for numbers, count in sorted(clients.items(), reverse=True):
            if numbers and count:
                sent = (direction, name, count, numbers, numbers * size)
                self._runner.ledger.add(LedgerEntry(self.round, self._exchanges, *sent, self.phase))


def _tensors_of(value: Any) -> Any:
    return value.tensor if isinstance(value, Broadcast) else value


def _is_broadcast(value: Any) -> bool:
    tensors = _tensors_of(value)
    return all(isinstance(one, Tensor) for one in (tensors if isinstance(tensors, list | tuple) else [tensors]))


def _shapes(values: Mapping[str, Any]) -> str:
    """``"theta [9610]"``: the shapes that one client sees."""
    sent = {name: value.rows[0] if isinstance(value, Scatter) else value for name, value in values.items()}
    shapes = [f"{name} {list(tensor.shape)}" for name, tensor in flatten(sent)[1].items()]
    return ", ".join(shapes) or "nothing"
