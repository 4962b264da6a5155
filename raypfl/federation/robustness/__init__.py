"""Clients that attack the training, and rules with which the server withstands them."""

from raypfl.federation.robustness.attacks import ATTACKS, Attack, LabelAttack, UpdateAttack, Updates
from raypfl.federation.robustness.backdoor import Backdoor
from raypfl.federation.robustness.rules import AGGREGATIONS, Aggregation
from raypfl.federation.robustness.wire import Wire

__all__ = [
    "AGGREGATIONS",
    "ATTACKS",
    "Aggregation",
    "Attack",
    "Backdoor",
    "LabelAttack",
    "UpdateAttack",
    "Updates",
    "Wire",
]
