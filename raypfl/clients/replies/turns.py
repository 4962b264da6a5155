"""Clients that train in one group although they were sent the models of several rounds: asynchronous runs.

What such a group sends back is reduced round by round, so that the server can add it up like any other sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.replies.reduction import Value, logged_means, reduced
from raypfl.common.errors import LateReplyError
from raypfl.common.messages import Each, Mean, Sum, bytes_charged, numbers_charged, per_client, unmarked
from raypfl.common.transfer import to_device


@dataclass(frozen=True)
class Turns:
    """The turns of a group's clients in an asynchronous run.

    Attributes
    ----------
    rounds : the round in which each client was sent its message, ``int64[K]``.
    joins : the round that its reply is part of, ``int64[K]``.
    shares : how much of its reply counts, ``float64[K]``.
    as_sent : whether all replies of the round that it joins count as in a synchronous one, ``bool[K]``.
    mixes_models : whether a share is one of the client's model; else of how far it got from the model that it was sent.
    """

    rounds: np.ndarray
    joins: np.ndarray
    shares: np.ndarray
    as_sent: np.ndarray
    lr: float
    mixes_models: bool = False

    def of(self, members: Sequence[int] | np.ndarray) -> Turns:
        """Return the turns of some of the clients."""
        members = np.asarray(members, dtype=np.int64)
        return replace(
            self,
            rounds=self.rounds[members],
            joins=self.joins[members],
            shares=self.shares[members],
            as_sent=self.as_sent[members],
        )

    def members(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each round that replies join, and the positions of their clients in the group."""
        for round in np.unique(self.joins).tolist():
            yield round, np.flatnonzero(self.joins == round)


def name_in_round(round: int, name: str) -> str:
    """Return the name of a value for one of several rounds; :func:`round_and_name` is the inverse."""
    return f"{round} {name}"


def round_and_name(name: str) -> tuple[int, str]:
    """Return the round, and the name that the client function gave."""
    round, _, name_in_function = name.partition(" ")
    return int(round), name_in_function


def share_of(name: str) -> str:
    """Return the name of the mean share of clients' models in a mixture."""
    return f"share of {name}"


def arguments_of(turns: Turns, message_of: Callable[[int], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of a client function: tensors have a row for each client if their messages differ.

    ``message_of(round)`` returns the message of a round.
    """
    rounds, message_of_client = np.unique(turns.rounds, return_inverse=True)
    messages = [message_of(round) for round in rounds.tolist()]
    if len(messages) == 1:
        return dict(messages[0])
    return {name: _rows([message[name] for message in messages], message_of_client) for name in messages[0]}


def _rows(values: Sequence[Any], index: np.ndarray) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return per_client(torch.stack(list(values))[to_device(index, first.device)])
    if isinstance(first, list | tuple):
        return type(first)(_rows(parts, index) for parts in zip(*values, strict=True))
    return first


def values_by_round(
    function: str, returned: Mapping[str, Any], arguments: Mapping[str, Any], turns: Turns
) -> dict[str, Value]:
    """Reduce a client function's returned values to one row for each round that replies join.

    `function` describes the client function, for errors.

    Raises
    ------
    LateReplyError : if something is neither the mean of an argument of that name after training nor a sum that counts
        late.
    """
    num_clients = len(turns.joins)
    values: dict[str, Value] = {}
    for name, value in returned.items():
        if isinstance(value, Sum) and value.counts_late:
            for round, members in turns.members():
                values[name_in_round(round, name)] = reduced(function, name, _of_members(value, members), len(members))
            continue

        start = _rows_at_start(function, name, value, arguments.get(name), num_clients)
        for round, members in turns.members():
            part = _of_members(value, members)
            if not turns.as_sent[members[0]]:
                part = _shares_of(name, part, turns.of(members), start[members])
            values[name_in_round(round, name)] = reduced(function, name, part, len(members))

            if turns.mixes_models:
                share = replace(part, rows=torch.from_numpy(turns.shares[members]), charged=False, num_bytes=None)
                values[name_in_round(round, share_of(name))] = reduced(function, name, share, len(members))
    return values


def logged_by_round(logged: Mapping[str, Tensor], turns: Turns) -> dict[str, Value]:
    """Sum the numbers that clients logged, for each round that their replies join."""
    values: dict[str, Value] = {}
    for round, members in turns.members():
        means = logged_means({name: rows[members] for name, rows in logged.items()})
        values |= {name_in_round(round, name): value for name, value in means.items()}
    return values


def _shares_of(name: str, mean: Mean, turns: Turns, start: Tensor) -> Mean:
    """Return what counts of each reply: a share of the client's model, or of how far it got from ``start[K, ...]``."""
    like = start if start.is_floating_point() else start.device
    shares = torch.from_numpy(turns.shares).to(like)
    reference = 0.0 if turns.mixes_models else start
    rows = shares.view(-1, *[1] * (start.dim() - 1)) * (unmarked(mean.rows).detach() - reference)
    numbers = numbers_charged(name, mean.charged, len(rows), mean.rows[0].numel())
    # The client sends its rows as they are, whatever type the shares give them.
    return replace(mean, rows=rows, num_bytes=torch.from_numpy(bytes_charged(name, mean, numbers)))


def _rows_at_start(function: str, name: str, value: Any, argument: Any, num_clients: int) -> Tensor:
    """Return the argument that a reply is compared with, a row for each client."""
    if isinstance(value, Mean) and isinstance(argument, Tensor) and len(value.rows) == num_clients:
        shape = value.rows.shape
        rows = unmarked(argument)
        if rows.shape in (shape, shape[1:]):
            return rows.expand(shape)

    reason = f"the mean `{name}` is not of what clients were sent"
    if isinstance(value, Each):
        reason = f"the server needs the `{name}` of each client"
    elif isinstance(value, Sum):
        reason = f"the server needs a sum over the cohort, `{name}`"
    raise LateReplyError(
        f"{function} returns {name!r}, which is not the mean of an argument of that name after training: {reason}. A "
        "late reply counts by how far it got from what the client was sent, and here that is unknown.",
        reason,
    )


def _of_members(value: Any, members: np.ndarray) -> Any:
    """Return the rows of some clients in a mean or a sum; no copy if these are all clients."""
    if len(members) == len(value.rows):
        return value
    part = replace(value, rows=unmarked(value.rows)[members])
    if isinstance(value.charged, Tensor) and value.charged.dim() > 0:
        part = replace(part, charged=value.charged[members])
    if isinstance(value.num_bytes, Tensor) and value.num_bytes.dim() > 0:
        part = replace(part, num_bytes=value.num_bytes[members])
    if isinstance(value, Mean) and value.weight is not None:
        part = replace(part, weight=value.weight[members])
    return part
