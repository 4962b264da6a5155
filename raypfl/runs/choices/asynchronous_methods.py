"""Which methods can have asynchronous rounds, found by rehearsing each of them: ``raypfl list asynchronous``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from raypfl.common.errors import LateReplyError, Refused
from raypfl.engine.prepared import Prepared
from raypfl.methods import METHODS
from raypfl.runs.choices.every_method import experiment_for_every_method, why_not_made, with_method
from raypfl.runs.choices.together import refuse_unusable_replies


class AsynchronousMethods:
    """Registered methods by name, and why one's rounds cannot be asynchronous. They are rehearsed when first asked."""

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def summary(self, name: str) -> str:
        """Return whether the method's rounds can be asynchronous, in words."""
        reason = self.reasons[name]
        return f"cannot be asynchronous: {reason}" if reason else "can be asynchronous"

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Why each method's rounds, with its default options, cannot be asynchronous; empty: they can.

        A method that cannot be made without options is not rehearsed.
        """
        why_not = {name: why_not_made(name) for name in METHODS}
        experiment = experiment_for_every_method(
            [
                "partition.clients=10",
                "model={name: mlp, hidden: [4]}",
                "cohort.size=2",
                "devices.hardware=lognormal",
                "asynchronous.buffer=1",
                "engine.executor=vectorised",
            ],
            methods=[name for name in METHODS if not why_not[name]],
        )
        data = experiment.load_data()

        reasons: dict[str, str] = {}
        for name in METHODS:
            if why_not[name]:
                reasons[name] = f"unknown, since {why_not[name]}"
            else:
                prepared = Prepared(with_method(experiment, name), data)
                reasons[name] = _reason(prepared)
        return reasons


ASYNCHRONOUS_METHODS = AsynchronousMethods()


def _reason(prepared: Prepared) -> str:
    try:
        refuse_unusable_replies(prepared)
    except Refused as error:
        cause = error.__cause__
        if isinstance(cause, LateReplyError) and cause.reason:
            return cause.reason
        return f"its rehearsal on digits failed: {error}"
    return ""
