"""A small experiment that many tests run, and what they do with its results."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import raypfl
from raypfl.engine.events import RoundFinished
from raypfl.methods import METHODS

NEEDED = {name: {"data__pools": "{auxiliary: 0.3}"} for name in ("feddf", "perada")}
NEEDED["fedfomo"] = {"data__val_fraction": 0.2}
NEEDED |= {name: {"model__lora": 2} for name in METHODS if METHODS.get(name).needs_lora}
"""Settings without which a method does not run."""

ON_RAY = {"engine__backend": "ray", "ray__actors": 2, "ray__cpus_per_actor": 0.5}
"""Changes of `experiment` for two client actors, which a session keeps for the next test of the same process."""

TIMED = {"devices__hardware": "lognormal", "cohort__size": 6}
"""Changes of `experiment` for simulated time, in which all that is drawn finish."""

EVENTFUL = TIMED | {
    "cohort__size": 4,
    "cohort__over_selection": 1.5,
    "cohort__deadline": 3.0,
    "cohort__late": "partial",
    "devices__dropout": 0.2,
    "devices__partial_work": 0.3,
    "devices__availability": "{name: uniform, low: 0.5, high: 1.0}",
}
"""Changes of `experiment` for simulated time in which clients are late, drop out and do parts of their work."""


def experiment(tmp_path: Path, **changes) -> raypfl.Experiment:
    """Return a small experiment in `tmp_path`; a change of ``a.b`` is written ``a__b=value``."""
    changes = NEEDED.get(str(changes.get("method")), {}) | changes
    if "output" not in changes:
        changes["output"] = tmp_path / "runs"
    return _base().override([f"{key.replace('__', '.')}={value}" for key, value in changes.items()])


@functools.cache
def _base() -> raypfl.Experiment:
    return raypfl.Experiment(
        rounds=6,
        method="ditto",
        partition={"name": "dirichlet", "clients": 12, "alpha": 0.3},
        cohort={"size": 6},
        model={"name": "mlp", "hidden": [16]},
        training={"batch_size": 50},  # a few steps an epoch
        evaluation={"every": 3},
        checkpoint={"every": 2},
        engine={"backend": "inline", "group_size": 2},
        tracking={"mlflow": False},
    )


def same_tables(a: raypfl.Result, b: raypfl.Result) -> bool:
    """Return whether two runs recorded the same, except how long their rounds took."""
    deterministic = [name for name in a.rounds.column_names if name != "seconds"]
    # As texts: the loss of a round without clients is NaN, which does not equal itself.
    rounds = [str(result.rounds.select(deterministic).to_pydict()) for result in (a, b)]
    return a.evaluations.equals(b.evaluations) and a.ledger.equals(b.ledger) and rounds[0] == rounds[1]


class Interrupt:
    """A listener that sends this process a signal at the end of a round, once for all runs that it listens to."""

    was_sent = False

    def __init__(self, round: int, number: int = signal.SIGINT):
        self.round = round
        self.number = number

    def __call__(self, event) -> None:
        if isinstance(event, RoundFinished) and event.round == self.round and not self.was_sent:
            self.was_sent = True
            os.kill(os.getpid(), self.number)
