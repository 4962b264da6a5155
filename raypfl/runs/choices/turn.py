"""What a method asks of a client in one round, as a rehearsal shows it."""

from __future__ import annotations

from raypfl.common.errors import ConfigError, MethodError
from raypfl.common.threads import threads
from raypfl.common.user_code import explain_user_errors, with_location
from raypfl.devices import Turn
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.runs.checks.rehearsal import Rehearsal


def turn_of(prepared: Prepared) -> Turn | None:
    """Rehearse two rounds, and return what the second asks of a client; None if there is no simulated time.

    In the first round, some methods do not send all that they send later.

    Raises
    ------
    ConfigError : if the method uses raypfl in a wrong way, or a round with several exchanges is to end before all
        clients have finished.
    """
    experiment = prepared.experiment
    if experiment.devices.hardware is None:
        return None

    with (
        threads(threads_of_server(experiment)),
        explain_user_errors("in a rehearsed round", function=experiment.method.round),
    ):
        try:
            rehearsal = Rehearsal.of_cohort(prepared)
            rehearsal.train()
            turn = rehearsal.turn()
        except MethodError as error:
            raise ConfigError(with_location(error)) from error

    ends_early = experiment.cohort.deadline is not None or experiment.cohort.over_selection > 1
    if len(turn.exchanges) > 1 and ends_early:
        raise ConfigError(
            f"{type(experiment.method).__name__} has {len(turn.exchanges)} exchanges in a round, which cannot go on "
            "without the clients that are late in the first one; leave out cohort.deadline and cohort.over_selection."
        )
    return turn
