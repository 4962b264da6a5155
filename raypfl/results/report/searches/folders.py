"""Folders of sweeps and studies: which of them have a search, their trials, and what was chosen."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from raypfl.common.errors import ConfigError
from raypfl.evaluation import Measures
from raypfl.results.units import Unit
from raypfl.runs.records import DESCRIPTION, SEARCH, TRIALS
from raypfl.runs.several.sweeps import is_sweep

CONFIGURATIONS = "configurations.png"
IMPORTANCE = "importance.png"

BEST_TRIALS = 6
"""Number of best trials of a sweep whose runs are on the page."""


def has_search(folder: Path) -> bool:
    """Return whether a folder is that of a sweep, or of a study with a search, and has the table of its trials."""
    return (folder / TRIALS).is_file() and (is_sweep(folder) or (folder / SEARCH).is_file())


def chosen_trials(sweep: Path, measures: Measures) -> tuple[str, list[Path]]:
    """Return the metric that a sweep goes by, and the folders of all trials with the settings that it chose.

    The list is empty if the sweep was killed before it wrote its table, or if no trial has a value.
    """
    if not (sweep / TRIALS).is_file():
        return "", []

    trials = trials_of(sweep)
    best = trials[0]
    units = units_of_metrics(best, measures)
    metric = next(iter(units), "")
    if math.isnan(number_of(best.get(metric, ""))):
        return metric, []

    settings = best.keys() - units.keys() - {"trial", "status", "round", "error"}
    chosen = []
    for trial in trials:
        if all(trial[name] == best[name] for name in settings):
            chosen.append(sweep / "trials" / trial["trial"])
    return metric, chosen


def units_of_metrics(trial: Mapping[str, str], measures: Measures) -> dict[str, Unit]:
    """The units of a sweep's metrics, by column; the search goes by the first."""
    units = {}
    for name in trial:
        # A column may be called accuracy/val.
        aggregate = name.split("/")[0]
        if aggregate in measures.aggregates:
            units[name] = Unit(measures.metric_of(aggregate))
    return units


def best_runs(folder: Path) -> tuple[list[Path], str]:
    """Return the folders of the best trials' runs of a sweep, and a sentence on the others; empty if there are none."""
    if not (folder / TRIALS).is_file():
        runs = [file.parent for file in sorted((folder / "trials").rglob(DESCRIPTION))]
        return runs, (
            f"{folder} has no {TRIALS}, since its sweep was killed: all its trials' runs are shown, whichever is best. "
            "The same raypfl tune continues the sweep."
        )

    names = [trial["trial"] for trial in trials_of(folder)]
    runs = []
    for name in names[:BEST_TRIALS]:
        runs += [file.parent for file in sorted((folder / "trials" / name).rglob(DESCRIPTION))]

    if len(names) <= BEST_TRIALS:
        return runs, ""
    return runs, f"Of the {len(names)} trials of {folder.name}, the runs of the {BEST_TRIALS} best are shown."


def trials_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of a folder's table of trials, which are those of a sweep from the best to the worst."""
    with (folder / TRIALS).open(newline="") as file:
        trials = list(csv.DictReader(file))
    if not trials:
        raise ConfigError(f"{folder / TRIALS} has no trials.")
    return trials


def number_of(text: str) -> float:
    """A number; NaN for other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan
