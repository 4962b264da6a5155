"""Trials of a study's search: settings that are drawn at random, and runs that look at no test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raypfl.common import rng
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.data.datasets.population import is_described
from raypfl.experiment.assignments import assign, parse_assignments
from raypfl.experiment.checks.limits import aggregates
from raypfl.experiment.spaces import Space, configured, values_by_setting
from raypfl.studies.cells import Position, StudyCell, by_position
from raypfl.studies.description import Study, checked
from raypfl.studies.search.description import Search

_CANDIDATES = 16
"""Draws of which the one farthest from those of the trials before is used."""


@dataclass(frozen=True)
class SearchTrial:
    """A configuration of a method in one setting.

    Attributes
    ----------
    number : from 1 on; trials of different methods with the same number share the draws of shared settings.
    values : setting -> value that was drawn.
    cells : its runs, one for each seed of the search.
    """

    position: Position
    number: int
    values: Mapping[str, Any]
    cells: Sequence[StudyCell]


def with_search(study: Study, assignments: Sequence[str]) -> tuple[Study, list[str]]:
    """Return the study with its search as assignments such as ``search.trials=8`` change it, and the other assignments.

    Raises
    ------
    ConfigError : if the study has no search, an assignment is wrong, or one sets what is searched.
    """
    # A study's file has settings of its runs under `experiment`, a command with or without it.
    assignments = [text.strip().removeprefix("experiment.") for text in assignments]
    changes = [text for text in assignments if text.startswith("search.")]
    other_assignments = [text for text in assignments if text not in changes]
    if changes:
        if study.search is None:
            raise ConfigError(
                f"{changes[0]!r} is set, but the study {study.name} has no search; write one into a study's file, such "
                "as search: {trials: 8, shared: {training.lr: {loguniform: [0.001, 1]}}}."
            )
        study = _changed(study, study.search, changes)

    if study.search:
        for path, _ in parse_assignments(other_assignments):
            key = ".".join(path)
            if key in study.search.keys:
                raise ConfigError(f"{key} is set, but the study {study.name} searches it; leave one of them out.")
    return study, other_assignments


def _changed(study: Study, search: Search, changes: Sequence[str]) -> Study:
    values = {"search": search.model_dump()}
    for path, value in parse_assignments(changes):
        if len(path) != 2 or path[1] in ("shared", "methods"):
            names = Search.model_fields.keys() - {"shared", "methods"}
            raise ConfigError(
                f"{'.'.join(path)} cannot be set in a command, since spaces are written in the study's file; "
                f"{did_you_mean(path[1], names)}"
            )
        assign(values, path, value)
    return checked(study.name, study.model_dump() | values)


def planned_trials(study: Study, cells: Sequence[StudyCell]) -> list[SearchTrial]:
    """Return all trials of the search: for each method in each setting of `cells`, equally many.

    Raises
    ------
    ConfigError : if a drawn value is refused in a method, or validation data are missing.
    """
    search = study.search
    if search is None:
        return []

    trials = []
    for position, (cell, *_) in by_position(cells).items():
        _require_validation(study, search, cell)
        configurations = draw(search.spaces(cell.method), search.seed, search.trials)
        for number, values in enumerate(configurations, start=1):
            runs = _runs(cell, values, number, search.seeds)
            trials.append(SearchTrial(position, number, values, runs))
    return trials


def draw(spaces: Sequence[Space], seed: int, trials: int) -> list[dict[str, Any]]:
    """Return the values of each trial by setting.

    A setting's draws depend on the seed and its name alone: they are the same whatever else is searched, and more
    trials begin with the same ones.
    """
    shares = {space.name: _spread_shares(seed, space.name, trials) for space in spaces}
    configurations = []
    for trial in range(trials):
        draws = {space.name: space.at(shares[space.name][trial]) for space in spaces}
        configurations.append(values_by_setting(list(spaces), draws))
    return configurations


def _spread_shares(seed: int, name: str, count: int) -> list[float]:
    """Return uniform draws from [0, 1) that are spread out, as a few independent ones often are not.

    Each is the one of several candidates that is farthest from all before it on a circle (Mitchell 1991).
    """
    shares: list[float] = []
    for trial in range(count):
        candidates = rng.generator(seed, f"search {name}", trial).random(_CANDIDATES)
        nearest = np.full(_CANDIDATES, np.inf)
        for share in shares:
            distance = np.abs(candidates - share)
            nearest = np.minimum(nearest, np.minimum(distance, 1 - distance))
        shares.append(float(candidates[np.argmax(nearest)]))
    return shares


def _runs(cell: StudyCell, values: Mapping[str, Any], trial: int, seeds: int) -> list[StudyCell]:
    # A trial does not touch test data, so they cannot influence the choice.
    without_test_data = {"evaluation.protocols": ("val",), "evaluation.masks": ()}
    try:
        experiment = configured(cell.experiment, {**values, **without_test_data})
    except ConfigError as error:
        raise ConfigError(f"In trial {trial} of {cell.method}: {error}") from None

    runs = []
    for seed in range(experiment.seed, experiment.seed + seeds):
        runs.append(replace(cell, experiment=experiment.model_copy(update={"seed": seed}), trial=trial))
    return runs


def _require_validation(study: Study, search: Search, cell: StudyCell) -> None:
    experiment = cell.experiment
    # A described population decides by itself who has validation samples.
    if not experiment.data.val_fraction and not is_described(experiment.data):
        raise ConfigError(
            f"The search of the study {study.name} is on validation data, but data.val_fraction is 0. Set it under "
            "experiment, such as data.val_fraction: 0.2."
        )
    available = aggregates(experiment.objective, experiment.extra_metrics)
    if search.value is not None and search.value not in available:
        raise ConfigError(
            f"search.value is {search.value!r}, which is not a metric; {did_you_mean(search.value, available)}"
        )
