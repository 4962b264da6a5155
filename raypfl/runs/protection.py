"""Whether a run can keep what its privacy settings promise, found out before it begins."""

from __future__ import annotations

import torch

from raypfl.common.errors import ConfigError, PrivacyError
from raypfl.common.threads import threads
from raypfl.common.user_code import with_location
from raypfl.data import ClientData
from raypfl.engine.setup import threads_of_server
from raypfl.experiment import Experiment
from raypfl.federation.schedule import cohort_size
from raypfl.learning.privacy.accounting import refuse_without_accountant
from raypfl.models import FlatModel
from raypfl.runs.rehearsal import Rehearsal

FEW = 2
"""Clients of the round that shows whether a method's messages can be protected."""


def refuse_unprotected(experiment: Experiment, data: ClientData, model: FlatModel) -> None:
    """Raise a ConfigError if the network or the method does not let the privacy settings hold."""
    privacy = experiment.privacy
    refuse_without_accountant(privacy)
    if privacy.noise is not None and model.mixes_rows:
        raise ConfigError(
            f"privacy.noise is {privacy.noise}, but batch norm in {experiment.model.name} mixes the samples "
            "of a batch, so that the part of one cannot be bounded. Choose group norm (norm: group) or a network "
            "without batch norm, or freeze what has it."
        )
    if privacy.noise is not None or privacy.secure_aggregation:
        _refuse_unprotected_messages(experiment, data, model.device)


def _refuse_unprotected_messages(experiment: Experiment, data: ClientData, device: torch.device) -> None:
    """Only a round tells what a method's clients send, and how they read their data."""
    cohort = cohort_size(experiment.cohort, data.num_clients - len(data.unseen))
    try:
        with threads(threads_of_server(experiment)):
            rehearsal = Rehearsal(experiment, data, device, min(FEW, cohort))
            rehearsal.train()
            rehearsal.evaluate()
    except PrivacyError as error:
        raise ConfigError(with_location(error)) from error
    except Exception:
        return  # what else may fail, the run itself says with its round and client
