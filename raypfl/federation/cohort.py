"""The clients of one round, as the server calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.worker import Call, Group, Reply
from raypfl.common import rng
from raypfl.common.errors import ClientError, Diverged, EmptyCohort, MethodError, PrivacyError, did_you_mean
from raypfl.common.messages import Broadcast, Scatter
from raypfl.common.user_code import where_defined
from raypfl.federation.charges import Recipients, tensors_of
from raypfl.federation.exchange.aggregation import ReplyAggregator
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import LedgerEntry, MessageSize, Phase
from raypfl.federation.logged import EarlierKinds, Log, Logged
from raypfl.federation.robustness.wire import Kind, Messages, Wire
from raypfl.federation.server_training import ServerTraining
from raypfl.learning.privacy import Spending, server_noise
from raypfl.storage.tree import flatten

_WHERE_CLIENTS_ARE = (
    "cohort.run(self.train, theta=...) calls train(clients, theta) where they are. Their numbers are cohort.ids."
)


class CohortReply(dict[str, Tensor]):
    """The cohort's reply by name; `function` describes the client function that returned it."""

    def __init__(self, values: Mapping[str, Tensor], function: str):
        super().__init__(values)
        self.function = function

    def __missing__(self, name: str) -> Tensor:
        names = ", ".join(map(repr, self)) or "nothing"
        raise MethodError(
            f"{self.function} returned {names}; there is no {name!r}. The reply of cohort.run has the names that the "
            f"function returned: use one of them, or return {{{name!r}: Mean(...)}}."
        )


def round_record(cohort: Cohort) -> tuple[dict[int, float], Logged]:
    """Return each client's training loss and what was logged in a round, also where privacy hides them from methods."""
    return cohort._losses, cohort._logged


class Cohort(Log, ServerTraining):
    """The clients of one round, and what the server can do in it.

    Attributes
    ----------
    ids : the clients' numbers, ascending. Rows of a ``Scatter`` and of an ``Each`` reply are in this order.
    present : ``bool[C]``; False for a client that failed in an earlier exchange of this round and was skipped.
    round, lr : the round's number, from 1, and its learning rate.
    unseen : whether these clients are never trained.
    task : the task that the method was started with.
    failed : client -> why it was skipped.
    spent : the privacy that clients have spent in this round.
    """

    phase: ClassVar[Phase] = "training"

    def __init__(
        self,
        runner: GroupRunner,
        ids: tuple[int, ...],
        round: int,
        lr: float,
        earlier_kinds: EarlierKinds = MappingProxyType({}),
        lost: tuple[int, ...] = (),
        work: np.ndarray | None = None,
    ):
        Log.__init__(self, earlier_kinds)
        self.ids = ids
        self.unseen = False
        self.round = round
        self.lr = lr
        self.task = runner.task
        self.context = runner.context

        self.present = np.ones(len(ids), dtype=bool)
        self.failed: dict[int, str] = {}
        self.spent: list[Spending] = []

        self._losses: dict[int, float] = {}
        self._only_divergences = True
        self._runner = runner
        self._runner.last_exchange = ""
        self._lost = lost
        self._work = work
        self._exchanges = 0

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> NoReturn:
        raise MethodError(f"The server has no clients to loop over: {_WHERE_CLIENTS_ARE}")

    def __getitem__(self, index: object) -> NoReturn:
        raise MethodError(f"The server has no clients, so there is no cohort[{index!r}]: {_WHERE_CLIENTS_ARE}")

    def __getattr__(self, name: str) -> NoReturn:
        names = [member for member in (*dir(type(self)), *vars(self)) if not member.startswith("_")]
        if name == "clients":
            raise AttributeError(f"cohort has no 'clients', since they are not on the server: {_WHERE_CLIENTS_ARE}")
        raise AttributeError(f"cohort has no {name!r}; {did_you_mean(name, names)}")

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
        """Return a generator for the server's own draws; the same stream gives the same draws in a round.

        It draws on the CPU, so that every device gets the same numbers: ``torch.randn(3, generator=g).to(device)``.
        """
        key = rng.key(self.task.seed, "server" + stream, self.round)
        return torch.Generator().manual_seed(key)

    def rows(self, table: Tensor) -> Tensor:
        """Return the rows ``[C, ...]`` of the cohort's clients in a table with a row for each client, ``[N, ...]``."""
        return table[torch.tensor(self.ids, dtype=torch.int64, device=table.device)]

    def with_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Return the table ``[N, ...]`` with the rows ``[C, ...]`` of the cohort's clients, except for failed ones."""
        shape = [len(self.ids), *table.shape[1:]]
        if list(rows.shape) != shape:
            raise MethodError(
                f"cohort.with_rows needs {shape}, a row for each client of the cohort, but was given "
                f"{list(rows.shape)}. A Mean or Sum in a reply is one row for all clients; Each(rows) gives a row for "
                "each."
            )

        replaced = table.clone()
        for client, present, row in zip(self.ids, self.present, rows, strict=True):
            if present:
                replaced[client] = row
        return replaced

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        """Call one of the method's client functions on every client of the cohort: one exchange.

        Parameters
        ----------
        function : a client function of the method, such as ``self.train``. It is called as
            ``function(clients, **arguments)`` on groups of clients and returns ``{name: Mean | Sum | Each}``.
        arguments : what the clients receive. A tensor or a list of tensors is a broadcast; a ``Broadcast`` also says
            how much of it is charged; a ``Scatter`` sends each client its row; numbers and strings go to every client.

        Returns
        -------
        name -> tensor: the mean or the sum over the cohort, or ``[C, ...]`` for ``Each`` (a row of zeros where
        `present` is False).

        Raises
        ------
        MethodError : if `function` is not a method of the federated method, or an argument cannot be sent.
        EmptyCohort : if no client is left.
        """
        function_name = self._name_of(function)
        described_function = where_defined(function)
        self._check(function, arguments)
        # Charged before anyone computes: a client that fails in this exchange has received its message.
        self._charge_down(arguments)
        self._refuse_empty()

        arguments = {name: tensors_of(value) for name, value in arguments.items()}
        call, groups = self._prepare(function_name, arguments)

        combine = partial(self._combined, arguments) if self._wire.needs_rows else None
        replies = ReplyAggregator(len(self.ids), self.task.model.device, combine)
        logged = ReplyAggregator(len(self.ids), self.task.model.device)
        finished: dict[int, tuple[tuple[int, ...], Reply]] = {}
        for group, done in self._runner.run(call, groups, self._drop_client):
            reply = done.reply
            replies.add(group, reply.values, done.subtrees)
            logged.add(group, reply.logged)
            for note in reply.notes:
                self._runner.warn(note)
            reply.values = {}  # added up, and large
            finished[group.index] = (group.clients, reply)

        self._refuse_empty()
        replies.refuse_exposed(described_function)
        self._wire.refuse_unless_means(described_function, replies.kinds)
        for _, (clients, reply) in sorted(finished.items()):
            self.spent += reply.spent
            if reply.losses is not None:
                self._losses.update(zip(clients, reply.losses.tolist(), strict=True))
        for name, sizes in replies.sent.items():
            self._charge("up", name, sizes)
        self.log(**logged.result(described_function))

        cohort_reply = CohortReply(
            self._add_noise(function_name, replies.result(described_function)), described_function
        )
        self._exchanges += 1
        self._runner.last_exchange = describe_exchange(described_function, arguments, cohort_reply)
        return cohort_reply

    def run_everyone(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        """Call a client function on all clients that are trained, for a phase that needs every client once.

        Like :meth:`run`, but on all trained clients, not the drawn ones: none is unavailable or drops out. Rows of a
        ``Scatter`` and of an ``Each`` reply are in the order of ``task.trained``. The round's losses stay the cohort's;
        a client of it that fails here is not in the round's later exchanges.
        """
        everyone = Cohort(self._runner, tuple(self.task.trained.tolist()), self.round, self.lr)
        everyone._exchanges = self._exchanges
        reply = everyone.run(function, **arguments)
        self._exchanges = everyone._exchanges
        self._logged.values.update(everyone._logged.values)
        self.failed |= everyone.failed
        self.present &= ~np.isin(self.ids, list(everyone.failed))
        self.spent += everyone.spent
        return reply

    @property
    def num_exchanges(self) -> int:
        """The number of exchanges in the round so far."""
        return self._exchanges

    @property
    def exchange(self) -> str:
        """The exchange's name, different from all others of the round."""
        return f"{self.phase} {self._exchanges}"

    def _prepare(self, function_name: str, arguments: Mapping[str, Any]) -> tuple[Call, list[Group]]:
        """Prepare the call and the groups of an exchange with the clients that are present."""
        present = [(position, client) for position, client in enumerate(self.ids) if self.present[position]]
        if self._runner.privacy.secure_aggregation and len(present) == 1:
            raise PrivacyError(
                f"The cohort of round {self.round} has only one client, so the sum is that client's own message: "
                "privacy.secure_aggregation needs two clients or more in every cohort."
            )

        training = self.phase == "training"
        return self._runner.prepare(
            function_name,
            present,
            self.round,
            self.lr,
            arguments,
            observers=self._runner.observers if training else (),
            exchange=self.exchange,
            training=training,
            work=self._work if training else None,
        )

    def _refuse_unprotected(self, name: str) -> None:
        privacy = self._runner.privacy
        if privacy.noise is not None or privacy.secure_aggregation:
            raise PrivacyError(
                f"cohort.{name} was measured without noise and masks, for the run's record only. Under privacy.noise "
                "or privacy.secure_aggregation, a method must not use it: let clients return what the server needs."
            )

    @property
    def _wire(self) -> Wire:
        """What happens to messages on their way; nobody attacks an evaluation."""
        return self._runner.wire if self.phase == "training" else Wire()

    def _combined(
        self, arguments: Mapping[str, Any], name: str, kind: Kind, rows: Tensor, weights: np.ndarray
    ) -> Tensor:
        """Return the aggregate that reaches the server, of the rows ``[C, ...]`` of a message."""
        generator = self.generator(f" attack {self._exchanges} {name}")
        messages = Messages(np.array(self.ids), rows, weights, arguments.get(name), generator)
        return self._wire.combine(kind, messages)

    def _add_noise(self, function: str, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add noise to the means of clients' clipped updates, if the unit of privacy is a client."""
        privacy = self._runner.privacy
        if not privacy.protects_clients:
            return means

        num_present = int(self.present.sum())
        for name, mean in means.items():
            purpose = self.phase + name
            noise = server_noise(mean, privacy, num_present, self.task.seed, purpose, self.round, self._exchanges)
            means[name] = mean + noise

        if means:
            for client, present in zip(self.ids, self.present, strict=True):
                if present:
                    self.spent.append(Spending(client, function, 1.0, 1, len(means)))
        return means

    def _name_of(self, function: Callable[..., Any]) -> str:
        # Actors look the function up by name in their own copy of the method, so it must be the class's own.
        method = getattr(function, "__self__", None)
        class_function = getattr(type(method), getattr(function, "__name__", ""), None)
        if method is None or class_function is None or class_function is not getattr(function, "__func__", None):
            raise MethodError("cohort.run takes a client function of the method, as in cohort.run(self.train, ...).")
        return function.__name__

    def _check(self, function: Any, arguments: Mapping[str, Any]) -> None:
        mismatch = _mismatch(function.__func__, tuple(arguments))
        if mismatch is not None:
            names = ", ".join(["clients", *arguments])
            raise MethodError(
                f"{where_defined(function)} was called with ({names}), from cohort.run, but takes other arguments: "
                f"{mismatch}."
            )

        for name, value in arguments.items():
            if isinstance(value, Scatter) and isinstance(value.rows, Tensor):
                if list(value.rows.shape[:1]) != [len(self.ids)]:
                    raise MethodError(
                        f"Scatter for {name!r} has the shape {list(value.rows.shape)}, but the cohort of round "
                        f"{self.round} has {len(self.ids)} clients: its first axis must run over them."
                    )
            elif not isinstance(value, int | float | str) and not _is_broadcast(value):
                raise MethodError(
                    f"cohort.run cannot send {name!r}, {_kind_of(value)}; send tensors, bare or in a Broadcast or "
                    "Scatter, numbers or strings."
                )

    def _refuse_empty(self) -> None:
        if not self.present.any():
            raise EmptyCohort(f"No client is left in the cohort of round {self.round}.")

    def _drop_client(self, client: int, error: ClientError) -> None:
        """Continue without a client that failed, unless too few are left: a divergence, if all that failed diverged."""
        self.failed[client] = error.message
        self._only_divergences &= isinstance(error, Diverged)
        self.present[self.ids.index(client)] = False
        self._runner.warn(f"Skipped: {error}")

        min_fraction = self._runner.failures.min_success_fraction
        if self.present.mean() < min_fraction:
            error_class = Diverged if self._only_divergences else ClientError
            raise error_class(
                f"Only {self.present.sum()} of {len(self.ids)} clients of round {self.round} succeeded, fewer than "
                f"failures.min_success_fraction = {min_fraction} asks for. The last failure: {error}",
                [client],
            )

    def _charge_down(self, arguments: Mapping[str, Any]) -> None:
        # Clients that drop out or are late still receive the round's first message.
        lost = self._lost if self._exchanges == 0 else ()
        recipients = Recipients(self.ids, self.present, lost, self.task.num_clients)
        for name, sizes in recipients.charges(arguments):
            self._charge("down", name, sizes)

    def _charge(self, direction: Literal["down", "up"], name: str, sizes: Sequence[MessageSize]) -> None:
        """Charge a message of these sizes."""
        for numbers, num_bytes, clients in sizes:
            if numbers and clients:
                entry = LedgerEntry(
                    self.round, self._exchanges, direction, name, clients, numbers, num_bytes, self.phase
                )
                self._runner.ledger.add(entry)


@lru_cache
def _mismatch(function: Callable[..., Any], names: tuple[str, ...]) -> str | None:
    """Say why a client function does not take arguments of these names; None if it does."""
    try:
        inspect.signature(function).bind(None, None, **dict.fromkeys(names))
    except TypeError as error:
        return str(error)
    return None


def _is_broadcast(value: Any) -> bool:
    tensors = tensors_of(value)
    if not isinstance(tensors, list | tuple):
        return isinstance(tensors, Tensor)
    return all(isinstance(tensor, Tensor) for tensor in tensors)


def _kind_of(value: Any) -> str:
    """Return the type of a value that cannot be sent and, if it is a message, of what it holds."""
    if isinstance(value, Scatter):
        return f"a Scatter of a {type(value.rows).__name__}"
    if isinstance(value, Broadcast):
        return f"a Broadcast of a {type(value.tensor).__name__}"
    return f"a {type(value).__name__}"


def describe_exchange(function: str, arguments: Mapping[str, Any], reply: Mapping[str, Any]) -> str:
    """Describe an exchange by the shapes that a client function got and returned, for errors that follow it."""
    return f"Last exchange: {function} got {_shapes(arguments)} and returned {_shapes(reply)}."


def _shapes(values: Mapping[str, Any]) -> str:
    """Describe the shapes that one client sees: ``"theta [9610]"``."""
    client_values = {}
    for name, value in values.items():
        client_values[name] = value.rows[0] if isinstance(value, Scatter) else value

    _, tensors = flatten(client_values)
    shapes = [f"{path} {list(tensor.shape)}" for path, tensor in tensors.items()]
    return ", ".join(shapes) or "nothing"
