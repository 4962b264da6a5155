"""Whether a run can keep what its privacy settings promise."""

from __future__ import annotations

from raypfl.common.errors import ConfigError, PrivacyError
from raypfl.common.threads import threads
from raypfl.common.user_code import with_location
from raypfl.engine.prepared import Prepared, threads_of_server
from raypfl.federation.cohort_draw import cohort_size
from raypfl.learning.privacy.accounting import refuse_without_accountant
from raypfl.runs.checks.rehearsal import Rehearsal

FEW = 2
"""Clients in the rehearsed round."""


def refuse_unprotected(prepared: Prepared) -> None:
    """Raise a ConfigError if the network or the method breaks what the privacy settings promise."""
    privacy = prepared.experiment.privacy
    refuse_without_accountant(privacy)

    if privacy.noise is not None and prepared.model.mixes_rows:
        raise ConfigError(
            f"privacy.noise is {privacy.noise}, but batch norm in {prepared.experiment.model.name} mixes the samples "
            "of a batch, so one sample's influence cannot be bounded. Choose group norm (norm: group) or a network "
            "without batch norm, or freeze the layers that have it."
        )

    if privacy.noise is not None or privacy.secure_aggregation:
        _refuse_unprotected_messages(prepared)


def _refuse_unprotected_messages(prepared: Prepared) -> None:
    """Rehearse a round, since only that tells what a method's clients send, and how they read their data."""
    experiment = prepared.experiment
    cohort = cohort_size(experiment.cohort, prepared.num_trained)
    try:
        with threads(threads_of_server(experiment)):
            rehearsal = Rehearsal(prepared, min(FEW, cohort))
            rehearsal.train()
            rehearsal.evaluate()
    except PrivacyError as error:
        raise ConfigError(with_location(error)) from error
    # Any other failure is left to the run itself, which reports it with its round and client.
    except Exception:
        return
