"""Every method goes on after an interruption as if there had been none."""

from __future__ import annotations

import pytest

import raypfl
from raypfl.methods import METHODS
from tests.support.runs import Interrupt, experiment

SMALL = {
    "rounds": 3,
    "partition__clients": 5,
    "cohort__size": 3,
    "training__steps": 2,
    "model__hidden": "[4]",
    "evaluation__every": 0,
    "checkpoint__every": 1,
}

OPTIONS = {
    # The second half of a method begins before the interruption or right after it.
    "floco": {"subspace_round": 1},
    "floco-plus": {"subspace_round": 1},
    "pfedsim": {"warmup": 0.3},
    **{name: {"window": 1, "outer_steps": 2} for name in ("fedptr", "fedptr-s", "extra-images")},
    **{name: {"steps": 2} for name in ("feddf", "perada")},
    "fedavg": {"server_optimizer": "adagrad"},
    "fednova": {"server_optimizer": "momentum"},
    "creff": {"feature_steps": 2, "head_steps": 2},
}

KEEP_NOTHING = {
    "fedavg-ft",
    "fedprox",
    "fedsam",
    "fedasam",
    "fedexp",
    "feddf",
    "per-fedavg",
    "knn-per",
    "q-ffl",
    "term",
}
"""Methods whose server has one model, as FedAvg's, and whose clients keep nothing."""

PRESETS = {"partial", "fedrep", "fedbabu", "lg-fedavg", "fedbn", "fedalt", "fedsim"}
"""Methods that differ from FedPer in their options alone."""


def stateful_methods() -> list[str]:
    names = {name for name in METHODS if METHODS.get(name).__module__.startswith("raypfl.")}
    return sorted(names - KEEP_NOTHING - PRESETS)


@pytest.mark.parametrize("name", stateful_methods())
def test_a_run_that_is_stopped_after_a_round_ends_with_the_bits_of_one_that_was_not(name, tmp_path):
    changes = SMALL | {"method": name, **{f"method__{key}": value for key, value in OPTIONS.get(name, {}).items()}}
    stopped = raypfl.run(experiment(tmp_path, **changes), listeners=[Interrupt(2)])
    assert stopped.status == "stopped"
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == raypfl.run(experiment(tmp_path, **changes)).weights_hash
