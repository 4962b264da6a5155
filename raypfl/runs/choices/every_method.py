"""An experiment that every registered method accepts."""

from __future__ import annotations

from collections.abc import Iterable

from raypfl.experiment import Experiment
from raypfl.methods import METHODS


def experiment_for_every_method(changes: Iterable[str] = ()) -> Experiment:
    """Return an experiment on digits that has the pools and the validation samples that some methods need.

    Parameters
    ----------
    changes : assignments ``key=value``.
    """
    pools: dict[str, float] = {}
    for name in METHODS:
        needed_pools = METHODS.get(name)().needed_pools()
        pools |= dict.fromkeys(needed_pools, 0.1)
    return Experiment().override([f"data.pools={pools}", "data.val_fraction=0.2", *changes])
