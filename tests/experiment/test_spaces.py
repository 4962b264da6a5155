"""Search spaces: which values they accept, and what a configuration sets."""

from __future__ import annotations

import math

import pytest

from raypfl.common.errors import ConfigError
from raypfl.experiment import Experiment
from raypfl.experiment.spaces import configured, spaces_of, values_by_setting


def test_an_option_that_was_drawn_holds_although_its_component_is_searched_after_it():
    spaces = spaces_of({"method.lam": {"uniform": [0.1, 0.9]}, "method": {"choice": ["ditto", "fedacg"]}})
    for position, name in enumerate(("Ditto", "FedACG")):
        experiment = configured(Experiment(), values_by_setting(spaces, {"method.lam": 0.5, "method": position}))
        assert type(experiment.method).__name__ == name
        assert experiment.to_dict()["method"]["lam"] == 0.5


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [("randint", [1, 2.5]), ("lograndint", [1, math.inf]), ("uniform", [0, math.inf]), ("randint", [False, True])],
)
def test_bounds_of_a_range_are_finite_numbers_of_its_kind(kind: str, bounds: list):
    with pytest.raises(ConfigError, match=r"all of them (whole )?numbers"):
        spaces_of({"training.epochs": {kind: bounds}})
