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
"""What makes a folder a sweep's."""

CONFIGURATIONS, IMPORTANCE = "configurations.png", "importance.png"

PICTURES = {
    CONFIGURATIONS: "Each line is a configuration: its value of every setting and, on the last axis, the metric.",
    IMPORTANCE: "The share of the metric's variance over the search space that each setting explains (fANOVA).",
}

SHOWN = 6
"""Trials, the best, whose runs are on the page."""


@dataclass(frozen=True)
class Search:
    """What a sweep found.

    Attributes
    ----------
    rows : of the table, the best trial first. pictures : each a PNG as a URI, and its caption.
    """

    name: str
    headings: list[str]
    rows: list[list[str]]
    pictures: list[tuple[str, str]]


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep's, with a table."""
    return (folder / TABLE).is_file()


def read(folder: Path, measures: Measures) -> Search:
    """The table and the pictures of a sweep with such metrics."""
    trials = _trials(folder)
    used = [name for name in trials[0] if any(trial[name] for trial in trials)]
    units = {name: Unit(measures.of(value)) for name in used if (value := name.split("/")[0]) in measures.aggregates}
    pictures = [(as_uri(folder / name), text) for name, text in PICTURES.items() if (folder / name).is_file()]
    headings = [f"{name}{' (%)' if name in units and units[name].sign else ''}" for name in used]
    rows = [[_shown(trial[name], units.get(name)) for name in used] for trial in trials]
    return Search(folder.name, headings, rows, pictures)


def best_runs(folder: Path) -> tuple[list[Path], str]:
    """Folders of the best trials' runs, and a sentence on the others; empty if there are none."""
    names = [trial["trial"] for trial in _trials(folder)]
    runs = [file.parent for name in names[:SHOWN] for file in sorted((folder / "trials" / name).rglob(RECIPE))]
    more = f"Of the {len(names)} trials of {folder.name}, the runs of the {SHOWN} best are shown."
    return runs, more if len(names) > SHOWN else ""


def _trials(folder: Path) -> list[dict[str, str]]:
    with (folder / TABLE).open(newline="") as file:
        return list(csv.DictReader(file))


def _shown(text: str, unit: Unit | None) -> str:
    """A number with few digits, in its unit if it has one; other text as such."""
    try:
        number = float(text)
    except ValueError:
        return text or "–"
    if unit:
        return unit.text(*unit.of([number]))
    return text if text.isdigit() else f"{number:.4g}"
