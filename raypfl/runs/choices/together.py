"""Whether clients of an asynchronous run that were sent different models can train in one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypfl.common.errors import ConfigError, LateReplyError, MethodError
from raypfl.common.threads import threads
from raypfl.common.user_code import explain_user_errors
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.federation.asynchronous.cohorts import SEVERAL_EXCHANGES
from raypfl.runs.checks.rehearsal import FEW_CLIENTS, Rehearsal
from raypfl.storage.tree import flatten

_SAME = 1e-4
"""Largest difference of results that are the same up to rounding, as a share of their largest number."""


def trains_together(prepared: Prepared) -> bool:
    """Rehearse two asynchronous rounds of two clients, in one group and apart, and return whether all is the same.

    In one group, the client function gets a row for each client where the method sends a tensor to all. So this tells
    whether it works with such rows.

    Raises
    ------
    ConfigError : if the method's late replies could not be used.
    """
    # Compression that rounds at random would make a difference in rounding a large one.
    prepared = prepared.with_settings(prepared.experiment.replace(compression=None))
    apart = refuse_unusable_replies(prepared)
    if apart is None:
        return False
    try:
        with threads(threads_of_server(prepared.experiment)):
            together = Rehearsal(prepared, FEW_CLIENTS).asynchronous(together=True)
    except Exception:
        return False
    return _are_same(apart, together)


def refuse_unusable_replies(prepared: Prepared) -> dict[str, Any] | None:
    """Rehearse two asynchronous rounds of two clients apart; return their states, or None if rounds are synchronous.

    Raises
    ------
    ConfigError : if the method's late replies could not be used.
    """
    experiment = prepared.experiment
    if experiment.asynchronous.buffer is None:
        return None

    if experiment.method.needs_whole_replies() and not experiment.asynchronous.counts_whole:
        error = LateReplyError(
            f"{type(experiment.method).__name__} keeps state on the server that must stay in step with its clients, so "
            "late replies must count in full. Set asynchronous.staleness=constant, without asynchronous.mixing.",
            "replies must count in full, by `asynchronous.staleness: constant`",
        )
        raise ConfigError(str(error)) from error

    _refuse_statistics(prepared)
    try:
        with (
            threads(threads_of_server(experiment)),
            explain_user_errors("in a rehearsed round", function=experiment.method.round),
        ):
            return _rehearsed_apart(prepared)
    except MethodError as error:
        raise ConfigError(str(error)) from error


def _rehearsed_apart(prepared: Prepared) -> dict[str, Any]:
    try:
        return Rehearsal(prepared, FEW_CLIENTS).asynchronous(together=False)
    except LateReplyError:
        _refuse_several_exchanges(prepared)
        raise


def _refuse_statistics(prepared: Prepared) -> None:
    """Raise a ConfigError if late replies could make a variance of batch norm negative: such a model's outputs are NaN.

    A reply's variance may have fallen by more than is left of the current one. With `mixing`, models are averaged.
    """
    experiment = prepared.experiment
    if experiment.asynchronous.mixing is not None:
        return

    model = prepared.task.model
    exchanged = experiment.method.exchanged(model)
    for name, segment in model.segments.items():
        if name.endswith("running_var") and bool(exchanged[segment.start : segment.stop].any()):
            raise ConfigError(
                f"In asynchronous rounds, the model moves by how far clients got from older ones, which could make "
                f"the variances of batch norm ({name}) negative. Set asynchronous.mixing, such as 0.6, with which "
                "models are averaged, or choose group norm (norm: group), a network without batch norm, or a method "
                "whose clients keep theirs, such as fedbn."
            )


def _refuse_several_exchanges(prepared: Prepared) -> None:
    """Raise a LateReplyError if the method has several exchanges in its first round.

    To a user, this says more than what its first exchange returns.
    """
    num_exchanges = Rehearsal(prepared, FEW_CLIENTS).train()
    if num_exchanges > 1:
        raise LateReplyError(
            f"{type(prepared.experiment.method).__name__} has {num_exchanges} exchanges in a round. A late reply is "
            "part of one exchange, so an asynchronous round can have no more.",
            SEVERAL_EXCHANGES,
        )


def _are_same(a: Any, b: Any) -> bool:
    tensors_of_a = _tensors(a)
    tensors_of_b = _tensors(b)
    if tensors_of_a.keys() != tensors_of_b.keys():
        return False

    for name, tensor in tensors_of_a.items():
        other = tensors_of_b[name]
        if tensor.shape != other.shape:
            return False
        largest = tensor.abs().max() if tensor.numel() else torch.zeros(())
        if not torch.allclose(tensor, other, rtol=0, atol=_SAME * float(largest), equal_nan=True):
            return False
    return True


def _tensors(tree: Any) -> dict[str, Tensor]:
    _, tensors = flatten(tree)
    return {name: tensor.double() for name, tensor in tensors.items()}
