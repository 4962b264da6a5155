"""What holds for every method: it resumes, is evaluated before the first round, and trains in bf16."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pyarrow.compute as pc
import pytest

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.engine.events import Evaluated, RoundFinished
from raypfl.methods import METHODS
from tests.support.runs import Interrupt, experiment, same_tables
from tests.support.tiers import methods

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
    **{name: {"finetune_epochs": 1} for name in ("fedavg-ft", "fedbabu")},
    "fedrep": {"personal_epochs": 1},
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
    "ffa-lora",
    "per-fedavg",
    "knn-per",
    "q-ffl",
    "term",
}
"""Methods whose server has one model, as FedAvg's, and whose clients keep nothing."""

PRESETS = {"partial", "fedrep", "fedbabu", "lg-fedavg", "fedbn", "fedalt", "fedsim", "fedsa-lora"}
"""Methods that differ from FedPer in their options alone."""


def changes_for(method: str) -> dict[str, object]:
    """Changes of `experiment` for a short run of a method."""
    return SMALL | {"method": method} | {f"method__{key}": value for key, value in OPTIONS.get(method, {}).items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], raypfl.Result]:
    """A function that returns a method's undisturbed run, carried out once."""

    @functools.cache
    def run(method: str) -> raypfl.Result:
        return raypfl.run(experiment(tmp_path_factory.mktemp(method), **changes_for(method)))

    return run


def stateful_methods() -> set[str]:
    names = {name for name in METHODS if METHODS.get(name).__module__.startswith("raypfl.")}
    return names - KEEP_NOTHING - PRESETS


@pytest.mark.parametrize("method", methods(stateful_methods()))
def test_a_run_that_is_stopped_after_a_round_ends_with_the_bits_of_one_that_was_not(method, whole, tmp_path):
    stopped = raypfl.run(experiment(tmp_path, **changes_for(method)), listeners=[Interrupt(2)])
    assert stopped.status == "stopped"
    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole(method).weights_hash and same_tables(resumed, whole(method))


@pytest.mark.parametrize("method", methods(set(METHODS) - {"partial"}))
def test_evaluation_before_the_first_round_is_of_the_initial_models(method, whole, tmp_path):
    without = whole(method)
    events = []
    result = raypfl.run(
        experiment(tmp_path, **changes_for(method), evaluation__at_start="true"), listeners=[events.append]
    )
    at_start = result.evaluations.filter(pc.field("round") == 0)

    assert result.evaluations.slice(at_start.num_rows).equals(without.evaluations)

    trained = pc.field("phase") == "training"
    assert result.weights_hash == without.weights_hash
    assert result.ledger.filter(trained).equals(without.ledger.filter(trained))

    kinds = [type(event) for event in events if isinstance(event, RoundFinished | Evaluated)]
    assert kinds == [Evaluated, RoundFinished, RoundFinished, RoundFinished, Evaluated]

    keys = ["client", "protocol", "model", "samples"]
    assert at_start.select(keys).equals(without.evaluations.select(keys))


@pytest.mark.parametrize("method", methods(METHODS))
def test_every_method_trains_in_bf16_and_sends_the_models_dtype(method, tmp_path):
    result = raypfl.run(experiment(tmp_path, **changes_for(method), training__precision="bf16"))
    assert np.isfinite(result.rounds["loss"].to_numpy()).all()


@pytest.mark.parametrize("method", ["feddbe", "fedcp", "fedphp", "moon"])
def test_methods_that_compare_features_learn_the_next_token(method, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text("the cat sat; a dog ran. " * (30 + 10 * number))
    result = raypfl.run(
        raypfl.Experiment(
            data={"name": "text", "root": str(tmp_path / "texts")},
            partition="by_column",
            model={"name": "gru", "width": 4},
            method=method,
            rounds=2,
            training={"steps": 2},
            engine={"backend": "inline"},
            output=str(tmp_path),
        )
    )
    assert np.isfinite(result.rounds["loss"].to_numpy()).all()


@pytest.mark.parametrize("method", methods(METHODS))
def test_a_frozen_output_layer_is_refused_before_the_run_or_left_alone(method, tmp_path):
    """A method never fails because of it in a round, which would be a RaypflError that is no ConfigError."""
    try:
        raypfl.run(experiment(tmp_path, **changes_for(method), model__frozen="output layer"))
    except ConfigError as error:
        assert "frozen" in str(error)
