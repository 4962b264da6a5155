"""Checks of an attack with the data that it is to run on, and of a rule with the method and the cohort."""

from __future__ import annotations

import numpy as np

from raypfl.common.errors import AggregationError, ConfigError
from raypfl.data import FederatedData
from raypfl.engine.prepared import Prepared
from raypfl.evaluation.protocols import BACKDOOR
from raypfl.federation.robustness import Backdoor, LabelAttack
from raypfl.learning.objectives import KINDS
from raypfl.runs.checks.rehearsal import refuse_rehearsed


def refuse_unfit_attack(prepared: Prepared) -> None:
    """Raise a ConfigError unless there are honest and malicious clients, and samples that an attack can change."""
    attack = prepared.experiment.attack
    if BACKDOOR in prepared.experiment.evaluation.protocols and not isinstance(attack, Backdoor):
        raise ConfigError(
            f"evaluation.protocols has {BACKDOOR!r}, which tests images with the trigger of an attack, but there is no "
            "such attack; add attack=backdoor."
        )
    if attack is None:
        return

    malicious = np.flatnonzero(prepared.is_malicious).tolist()
    if not isinstance(attack, LabelAttack | Backdoor):
        return
    data = prepared.data
    if data.kind != "classes" or not isinstance(data, FederatedData):
        targets = KINDS[data.kind] if isinstance(data, FederatedData) else "made client by client"
        raise ConfigError(
            f"attack changes labels, which are {KINDS['classes']}, but the targets of {data.name!r} are {targets}. "
            "Choose an attack on messages, such as sign_flip."
        )
    if isinstance(attack, Backdoor):
        _refuse_without_trigger(attack, data)

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


def _refuse_without_trigger(attack: Backdoor, data: FederatedData) -> None:
    """Raise a ConfigError unless the samples are images with room for the trigger, and the target is a class."""
    if len(data.input_shape) != 3:
        raise ConfigError(
            f"attack puts a trigger on images, but the samples of {data.name!r} are not images. Choose another one, "
            "such as label_flip."
        )
    smallest = min(data.input_shape[1:])
    if attack.size >= smallest:
        raise ConfigError(
            f"attack.size is {attack.size}, but the images of {data.name!r} are {smallest} pixels wide or high; choose "
            "a smaller trigger."
        )
    if attack.target >= data.num_classes:
        raise ConfigError(
            f"attack.target is {attack.target}, but the classes of {data.name!r} are numbered from 0 to "
            f"{data.num_classes - 1}."
        )


def refuse_unfit_rule(prepared: Prepared) -> None:
    """Raise a ConfigError unless a rule fits the cohort's size, and replaces all that the method's clients send."""
    rule = prepared.experiment.aggregation
    if rule is None:
        return
    rule.check(prepared.cohort_size)
    method = prepared.experiment.method
    if method.needs_weights():
        raise ConfigError(
            f"aggregation counts all clients equally, but {type(method).__name__} needs its clients' weights. Choose "
            "another method or method.weighting, or leave aggregation out."
        )
    refuse_rehearsed(prepared, AggregationError, "aggregation")
