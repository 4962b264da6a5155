"""Whether compression can be used with a network, and does something with a method."""

from __future__ import annotations

from raypfl.common.errors import ConfigError
from raypfl.common.threads import threads
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.runs.checks.rehearsal import Rehearsal, warn_of_silent_clients

_ROUNDS = 2
"""In the first round, some methods do not send all that they send later."""


def refuse_idle_compression(prepared: Prepared) -> None:
    """Raise a ConfigError if no message would be compressed, but some are sent, or if the network would be spoilt."""
    experiment = prepared.experiment
    if experiment.compression is None:
        return

    # Of different networks, the server has the layer that clients exchange.
    if prepared.task.model.num_buffers:
        raise ConfigError(
            "compression changes all numbers of a model, but some that this network and method have are not "
            "parameters: running statistics, such as those of batch norm, whose variances could become negative. "
            "Choose group norm (norm: group) or a network without batch norm, or freeze the layers that have it."
        )

    try:
        bytes_up = _bytes_up(prepared)
        is_idle = bytes_up == _bytes_up(prepared.with_settings(experiment.replace(compression=None)))
    # The run itself reports any failure with its round and client.
    except Exception:
        return
    if not bytes_up:
        warn_of_silent_clients(experiment.method, "compression")
    elif is_idle:
        raise ConfigError(
            f"compression has no effect on {type(experiment.method).__name__}: it compresses what clients make of an "
            "argument that they were sent under the same name, and this method's clients send no such message, or one "
            'that would not become shorter. In a method of your own, call the reply as the argument: {"theta": '
            "Mean(trained)} for cohort.run(self.train, theta=...); otherwise, leave compression out."
        )


def _bytes_up(prepared: Prepared) -> int:
    """Return the bytes that the clients of rehearsed rounds send."""
    with threads(threads_of_server(prepared.experiment)):
        rehearsal = Rehearsal.of_cohort(prepared)
        for _ in range(_ROUNDS):
            rehearsal.train()
    return rehearsal.bytes_up
