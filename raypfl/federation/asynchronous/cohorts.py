"""The two halves of a method's round in an asynchronous run: what it sends, and what comes back.

A method's `round` is called twice for a model of the server. The first time, on a copy of the server's state, it ends
at ``cohort.run``, whose arguments are the message to the clients that are drawn in this round. The second time,
``cohort.run`` returns the replies that make the next model. A reply that is late counts by how far the client got from
the model that it was sent, added to the current one; so the method need not know that it is late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from raypfl.clients.replies.turns import share_of
from raypfl.common.errors import ClientError, Diverged, LateReplyError
from raypfl.common.messages import Scatter
from raypfl.common.user_code import where_defined
from raypfl.federation.charges import tensors_of
from raypfl.federation.cohort import Cohort, CohortReply, describe_exchange
from raypfl.federation.exchange.group_runner import GroupRunner
from raypfl.federation.ledger import MessageSize
from raypfl.federation.logged import EarlierKinds
from raypfl.federation.method import Method
from raypfl.storage.tree import clone

SEVERAL_EXCHANGES = "several exchanges a round"


class Sent(BaseException):
    """Leaves a method's round at its exchange; no error, so that no ``except Exception`` of the method stops it."""

    def __init__(self, message: Message):
        super().__init__()
        self.message = message


@dataclass(frozen=True)
class Message:
    """What the clients of a round receive: the name of the client function, and its arguments without marks."""

    function: str
    arguments: Mapping[str, Any]


class AsynchronousCohort(Cohort):
    """A cohort whose clients train when their replies are needed, or earlier."""

    def run_everyone(self, function: Callable[..., Any], /, **arguments: Any) -> NoReturn:
        raise LateReplyError(
            f"A round calls {where_defined(function)} by cohort.run_everyone, but in an asynchronous run, some clients "
            "are still at work with earlier models.",
            SEVERAL_EXCHANGES,
        )


class SendingCohort(AsynchronousCohort):
    """The clients that are drawn in a round, to whom the method sends its message; their replies come later."""

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        name = self._name_of(function)
        self._check(function, arguments)
        for argument, value in arguments.items():
            if isinstance(value, Scatter):
                raise LateReplyError(
                    f"{where_defined(function)} gets {argument!r} as a Scatter, a row for each client of a cohort; "
                    "asynchronous rounds have no fixed cohort.",
                    f"each client of a cohort gets its own `{argument}`",
                )
        self._charge_down(arguments)
        # A method may change its tensors in place later.
        raise Sent(Message(name, clone({name: tensors_of(value) for name, value in arguments.items()})))


@dataclass
class RoundReplies:
    """The replies that make a model, added up.

    Attributes
    ----------
    function : the name of the client function that the clients ran.
    clients : the clients' numbers, ascending.
    as_sent : whether `means` are of what clients returned. Otherwise they are of shares of it: of its differences to
        what clients were sent or, if models are mixed, of the models themselves.
    means, sums, logged : what the client function returned and logged, by name.
    sent : name -> the sizes of the clients' messages.
    losses : the training loss of each client that has one.
    failed : client -> why it was skipped.
    diverged : the failed clients whose training diverged.
    """

    function: str
    clients: tuple[int, ...]
    as_sent: bool
    means: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, list[MessageSize]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    diverged: tuple[int, ...] = ()


class ReplyingCohort(AsynchronousCohort):
    """The clients whose replies make a model."""

    def __init__(
        self,
        runner: GroupRunner,
        replies: RoundReplies,
        round: int,
        lr: float,
        earlier_kinds: EarlierKinds,
    ):
        super().__init__(runner, replies.clients, round, lr, earlier_kinds)
        self._replies = replies

    def run(self, function: Callable[..., Any], /, **arguments: Any) -> dict[str, Tensor]:
        described_function = where_defined(function)
        if self._exchanges or self._name_of(function) != self._replies.function:
            raise LateReplyError(
                f"A round calls cohort.run for more than one exchange ({self._replies.function!r}, then "
                f"{function.__name__!r}). A late reply is part of one exchange, so an asynchronous round can have no "
                "more.",
                SEVERAL_EXCHANGES,
            )
        self._check(function, arguments)

        for client, why in self._replies.failed.items():
            error_class = Diverged if client in self._replies.diverged else ClientError
            self._drop_client(client, error_class(why, [client]))
        self._refuse_empty()
        self._losses.update(self._replies.losses)
        for name, sizes in self._replies.sent.items():
            self._charge("up", name, sizes)
        self.log(**self._replies.logged)

        current = {name: tensors_of(value) for name, value in arguments.items()}
        reply = CohortReply(self._replies_at(current), described_function)
        self._exchanges += 1
        self._runner.last_exchange = describe_exchange(described_function, arguments, reply)
        return reply

    def _replies_at(self, current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean replies as if all clients had been sent the current arguments."""
        means = self._replies.means
        if self._replies.as_sent:
            return {name: mean for name, mean in means.items() if name in current} | self._replies.sums

        values = dict(self._replies.sums)
        for name in means:
            if name not in current:
                continue
            share = means.get(share_of(name))
            remainder = current[name] if share is None else (1 - share).to(means[name]) * current[name]
            values[name] = remainder + means[name]
        return values


def message_of(method: Method, state: dict[str, Any], cohort: Cohort) -> Message:
    """Return what a method sends to a cohort at a state of the server, which stays as it is.

    Raises
    ------
    LateReplyError : if the round has no exchange.
    """
    try:
        method.round(clone(state), cohort)
    except Sent as sent:
        return sent.message
    raise LateReplyError(
        f"{where_defined(method.round)} returned without calling cohort.run, so an asynchronous round has no replies.",
        "no exchange in a round",
    )
