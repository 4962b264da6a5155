"""An experiment that methods accept with their default options, and which methods can be made with these."""

from __future__ import annotations

from collections.abc import Iterable

from raypfl.common.errors import RaypflError
from raypfl.experiment import Experiment
from raypfl.experiment.components import Option, options_of
from raypfl.methods import METHODS


def experiment_for_every_method(changes: Iterable[str] = (), methods: Iterable[str] = METHODS) -> Experiment:
    """Return an experiment on digits that has the pools and the validation samples that some methods need.

    Parameters
    ----------
    changes : assignments ``key=value``.
    methods : the names of methods that need no options.
    """
    pools: dict[str, float] = {}
    for name in methods:
        needed_pools = METHODS.get(name)().needed_pools()
        pools |= dict.fromkeys(needed_pools, 0.1)
    return Experiment().override([f"data.pools={pools}", "data.val_fraction=0.2", *changes])


def with_method(experiment: Experiment, name: str) -> Experiment:
    """Return the experiment with this method, and with adapters if the method needs them."""
    chosen = experiment.override([f"method={name}"])
    return chosen.override(["model.lora=2"]) if chosen.method.needs_lora else chosen


def why_not_made(name: str) -> str:
    """Return why a method cannot be made with its default options; empty: it can."""
    try:
        method = METHODS.get(name)
        missing = [key for key, option in options_of(method).items() if option.default is Option.empty]
        if missing:
            return f"it needs options: {', '.join(missing)}"
        Experiment().override([f"method={name}"])
    except RaypflError as error:
        return f"it cannot be made: {error}"
    return ""
