"""Whether a run can keep what its privacy settings promise."""

from __future__ import annotations

from raypfl.common.errors import ConfigError, PrivacyError
from raypfl.engine.prepared import Prepared
from raypfl.learning.privacy.accounting import refuse_without_accountant
from raypfl.runs.checks.rehearsal import refuse_rehearsed


def refuse_unprotected(prepared: Prepared) -> None:
    """Raise a ConfigError if the network or the method breaks what the privacy settings promise."""
    privacy = prepared.experiment.privacy
    refuse_without_accountant(privacy)

    if privacy.noise is not None and any(model.mixes_rows for model in prepared.architectures):
        raise ConfigError(
            f"privacy.noise is {privacy.noise}, but batch norm in {prepared.experiment.model.name} mixes the samples "
            "of a batch, so one sample's influence cannot be bounded. Choose group norm (norm: group) or a network "
            "without batch norm, or freeze the layers that have it."
        )

    if privacy.noise is not None or privacy.secure_aggregation:
        setting = ""
        if privacy.protects_clients:
            setting = "privacy.unit=client"
        elif privacy.secure_aggregation:
            setting = "privacy.secure_aggregation"
        refuse_rehearsed(prepared, PrivacyError, setting)
