"""Checks of an attack with the data that it is to run on."""

from __future__ import annotations

import numpy as np

from raypfl.common.errors import ConfigError
from raypfl.data import FederatedData
from raypfl.engine.prepared import Prepared
from raypfl.federation.robustness import LabelAttack
from raypfl.learning.objectives import KINDS


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
