"""A hyperparameter search on the page: the table of its trials and its pictures, from the sweep's folder."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from raypfl.evaluation import Measures
from raypfl.results.report.tables import as_uri
from raypfl.results.units import Unit
from raypfl.runs.result import RECIPE

TABLE = "trials.csv"
"""The file that makes a folder a sweep's."""

CONFIGURATIONS = "configurations.png"
IMPORTANCE = "importance.png"

PICTURES = {
    CONFIGURATIONS: "Each line is a configuration: its value of every setting and, on the last axis, the metric.",
    IMPORTANCE: "The share of the metric's variance over the search space that each setting explains (fANOVA).",
}

BEST_TRIALS = 6
"""Number of best trials whose runs are on the page."""


@dataclass(frozen=True)
class FinishedSweep:
    """A finished sweep.

    Attributes
    ----------
    rows : the rows of the table, the best trial first.
    pictures : a PNG as a URI and its caption, for each picture.
    """

    name: str
    headings: list[str]
    rows: list[list[str]]
    pictures: list[tuple[str, str]]


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is a sweep's, with a table."""
    return (folder / TABLE).is_file()


def read(folder: Path, measures: Measures) -> FinishedSweep:
    """Return the table and the pictures of a sweep with these metrics."""
    trials = _trials(folder)
    columns = [name for name in trials[0] if any(trial[name] for trial in trials)]
    units = {}
    for name in columns:
        # A column may be called accuracy/val.
        aggregate = name.split("/")[0]
        if aggregate in measures.aggregates:
            units[name] = Unit(measures.metric_of(aggregate))

    headings = []
    for name in columns:
        if name in units and units[name].sign:
            headings.append(f"{name} (%)")
        else:
            headings.append(name)

    rows = []
    for trial in trials:
        # The name of a trial may be hexadecimal, and look like 12345e67.
        rows.append([trial[name] if name == "trial" else _cell(trial[name], units.get(name)) for name in columns])

    pictures = []
    for name, caption in PICTURES.items():
        if (folder / name).is_file():
            pictures.append((as_uri(folder / name), caption))
    return FinishedSweep(folder.name, headings, rows, pictures)


def best_runs(folder: Path) -> tuple[list[Path], str]:
    """Return the folders of the best trials' runs, and a sentence on the others; empty if there are none."""
    names = [trial["trial"] for trial in _trials(folder)]
    runs = []
    for name in names[:BEST_TRIALS]:
        runs += [file.parent for file in sorted((folder / "trials" / name).rglob(RECIPE))]

    if len(names) <= BEST_TRIALS:
        return runs, ""
    return runs, f"Of the {len(names)} trials of {folder.name}, the runs of the {BEST_TRIALS} best are shown."


def _trials(folder: Path) -> list[dict[str, str]]:
    with (folder / TABLE).open(newline="") as file:
        return list(csv.DictReader(file))


def _cell(text: str, unit: Unit | None) -> str:
    """A number with few digits, in its unit if it has one; other text as it is."""
    try:
        number = float(text)
    except ValueError:
        return text or "–"
    if unit:
        return unit.text(*unit.of([number]))
    return text if text.isdigit() else f"{number:.4g}"
