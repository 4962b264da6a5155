"""Checks of an attack with the data that it is to run on, and of a rule with the method and the cohort."""

from __future__ import annotations

import numpy as np

from raypfl.common.errors import AggregationError, ConfigError
from raypfl.data import FederatedData
from raypfl.engine.prepared import Prepared
from raypfl.federation.cohort_draw import cohort_size
from raypfl.federation.robustness import LabelAttack
from raypfl.learning.objectives import KINDS
from raypfl.runs.checks.rehearsal import refuse_rehearsed


def refuse_unfit_attack(prepared: Prepared) -> None:
    """Raise a ConfigError unless there are honest and malicious clients, and labels that an attack can change."""
    attack = prepared.experiment.attack
    if attack is None:
        return

    malicious = np.flatnonzero(prepared.is_malicious).tolist()
    if not isinstance(attack, LabelAttack):
        return
    data = prepared.data
    if data.kind != "classes" or not isinstance(data, FederatedData):
        targets = KINDS[data.kind] if isinstance(data, FederatedData) else "made client by client"
        raise ConfigError(
            f"attack changes labels, which are {KINDS['classes']}, but the targets of {data.name!r} are {targets}. "
            "Choose an attack on messages, such as sign_flip."
        )

    is_poisoned = np.zeros(len(data.labels), dtype=bool)
    for client in malicious:
        is_poisoned[data.indices(client, "train")] = True
    for client in np.flatnonzero(~prepared.is_malicious).tolist():
        samples = data.indices(client, "train")
        shared = samples[is_poisoned[samples]]
        if len(shared):
            raise ConfigError(
                f"attack changes the labels of sample {shared[0]}, which honest client {client} has too. Choose a "
                "partition that gives each sample to one client, or an attack on messages, such as sign_flip."
            )


def refuse_unfit_rule(prepared: Prepared) -> None:
    """Raise a ConfigError unless a rule fits the cohort's size, and replaces all that the method's clients send."""
    rule = prepared.experiment.aggregation
    if rule is None:
        return
    rule.check(cohort_size(prepared.experiment.cohort, prepared.num_trained))
    refuse_rehearsed(prepared, AggregationError)
