"""Searches on the page: what was searched, all trials with their scores, and pictures of score against setting.

A search is a sweep's, or that of a study, which has one for each method in each of its settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypfl.common.counting import counted, series
from raypfl.common.errors import ConfigError
from raypfl.evaluation import Measures
from raypfl.experiment.spaces import Space, in_words, spaces_of
from raypfl.experiment.yaml_text import read as read_yaml
from raypfl.results.report.figures import ReportFigure
from raypfl.results.report.searches.figure import Disc, search_figure
from raypfl.results.report.searches.folders import (
    CONFIGURATIONS,
    IMPORTANCE,
    is_sweep,
    number_of,
    trials_of,
    units_of_metrics,
)
from raypfl.results.report.tables import as_uri
from raypfl.results.units import Unit
from raypfl.runs.records import SEARCH, SWEEP
from raypfl.runs.several.costs import COSTS, cpu_seconds

PICTURES = {
    CONFIGURATIONS: "Each line is a configuration: its value of every setting and, on the last axis, the metric.",
    IMPORTANCE: "The share of the metric's variance over the search space that each setting explains (fANOVA).",
}

MOST_ROWS = 12
"""Most trials in a table that is not folded."""

_CPU_SECONDS = "CPU seconds"

Row = tuple[list[str], bool]
"""A trial's cells, the first of which names it, and whether the trial was chosen."""


@dataclass(frozen=True)
class SearchedMethod:
    """The trials of a method of a study, or all trials of a sweep.

    Attributes
    ----------
    title : the method's label; empty for a sweep.
    about : sentences on the spaces and the CPU time.
    rows : the rows of all trials.
    shown : the rows that are not folded; the same as `rows` if these are few.
    """

    title: str
    about: str
    headings: list[str]
    rows: list[Row]
    shown: list[Row]
    figures: list[ReportFigure]


@dataclass(frozen=True)
class FinishedSearch:
    """The search of a sweep or a study, as the page shows it.

    Attributes
    ----------
    about : sentences on all methods.
    places : labels of the study's settings, each with a colour in the pictures; empty if there is one.
    pictures : a PNG as a URI and its caption, for each picture.
    """

    name: str
    about: str
    places: list[str]
    methods: list[SearchedMethod]
    pictures: list[tuple[str, str]]


def read(folder: Path, measures: Measures, number: int = 1) -> FinishedSearch:
    """Return the search in a folder that :func:`has_search`.

    Parameters
    ----------
    measures : the metrics of its runs.
    number : that of the search on the page.

    Raises
    ------
    ConfigError : if a file of the folder is damaged.
    """
    try:
        if is_sweep(folder):
            return _sweep(folder, measures, number)
        return _study(folder, measures, number)
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The search in {folder} cannot be read: {type(error).__name__}: {error}") from error


def _sweep(folder: Path, measures: Measures, number: int) -> FinishedSearch:
    spaces = spaces_of(read_yaml(folder / SWEEP)["search"])
    trials = trials_of(folder)
    units = units_of_metrics(trials[0], measures)
    score, *_ = units
    score_unit = units[score]

    discs = []
    for i, trial in enumerate(trials):
        costs = (folder / "trials" / trial["trial"]).rglob(COSTS)
        seconds = cpu_seconds(file.parent for file in costs)
        trial[_CPU_SECONDS] = "" if seconds is None else str(seconds)
        value = score_unit.factor * number_of(trial[score])
        is_best = i == 0 and not math.isnan(value)
        discs.append(Disc(trial, value, is_chosen=is_best, is_whole=trial["status"] == "finished"))

    columns = [name for name in trials[0] if any(trial[name] for trial in trials)]
    method = _method("", columns, units, discs, spaces, _label(score, score_unit), f"search-{number}")
    about = (
        f"{counted(len(trials), 'trial')}, the best first by {score}. Bold, and in a ring: the best, which best.yaml "
        "describes."
    )
    pictures = [(as_uri(folder / name), text) for name, text in PICTURES.items() if (folder / name).is_file()]
    return FinishedSearch(folder.name, about, [], [method], pictures)


def _study(folder: Path, measures: Measures, number: int) -> FinishedSearch:
    search = read_yaml(folder / SEARCH)
    trials = trials_of(folder)
    value = search["value"] or measures.primary.name
    unit = Unit(measures.metric_of(value))
    phrase = unit.phrase
    if value in measures.aggregates and value != unit.metric.name:
        phrase = f"{value.replace('_', ' ')} {phrase}"
    label = _label(phrase, unit)

    by_method: dict[str, list[Disc]] = {}
    places = list(dict.fromkeys(_place(trial) for trial in trials))
    for trial in trials:
        disc = Disc(
            # A study writes scores in their unit.
            {**trial, "setting": _place(trial), _CPU_SECONDS: trial["cpu_seconds"], label: trial["score"]},
            number_of(trial["score"]),
            is_chosen=trial["chosen"] == "True",
            place=places.index(_place(trial)),
        )
        by_method.setdefault(trial["method"], []).append(disc)

    methods = []
    for i, (method, discs) in enumerate(by_method.items()):
        spaces = spaces_of(search["shared"] | search["methods"].get(method, {}))
        columns = ["trial", *(["setting"] if len(places) > 1 else []), label]
        columns += [*dict.fromkeys(space.key for space in spaces), _CPU_SECONDS]
        methods.append(
            _method(method, columns, {label: unit}, discs, spaces, label, f"search-{number}-{i}", in_unit=True)
        )

    chosen_round = "the last round" if search["choose"] == "last" else "the round that these data choose"
    about = (
        f"{counted(search['trials'], 'trial')} of every method{' in every setting' if len(places) > 1 else ''}, each "
        f"with {counted(search['seeds'], 'seed')}, scored by {label} on validation data in {chosen_round}. "
        "Bold, and in a ring: the chosen ones, whose settings the runs below have."
    )
    return FinishedSearch(folder.name, about, places if len(places) > 1 else [], methods, [])


def _method(
    title: str,
    columns: Sequence[str],
    units: Mapping[str, Unit],
    discs: Sequence[Disc],
    spaces: Sequence[Space],
    label: str,
    name: str,
    in_unit: bool = False,
) -> SearchedMethod:
    """Return a method's table and figures.

    Parameters
    ----------
    columns : names of the table's columns, which are keys of the discs' texts.
    units : the unit of each column that is a metric.
    label : of the score.
    name : of the figures, unique on the page.
    in_unit : whether the texts of metrics are in their unit already, rather than shares.
    """
    headings = [_label(column, units[column]) if column in units and not in_unit else column for column in columns]
    rows = []
    for disc in discs:
        cells = []
        for column in columns:
            # The name of a trial may be hexadecimal, and look like 12345e67.
            text = disc.texts[column]
            cells.append(text if column == "trial" else _cell(text, units.get(column), in_unit))
        rows.append((cells, disc.is_chosen))

    shown = rows
    if len(rows) > MOST_ROWS:
        shown = [row for row in rows if row[1]] if title else rows[:MOST_ROWS]

    sentences = [f"Searched: {_listed(spaces)}."]
    seconds = [number_of(disc.texts.get(_CPU_SECONDS, "")) for disc in discs]
    if not any(map(math.isnan, seconds)):
        sentences.append(f"All trials took {sum(seconds):,.0f} seconds of CPU time.")

    figures = []
    for key in dict.fromkeys(space.key for space in spaces):
        figure = search_figure(name, key, [space for space in spaces if space.key == key], discs, label)
        if figure is not None:
            figures.append(figure)
    return SearchedMethod(title, " ".join(sentences), headings, rows, shown, figures)


def _listed(spaces: Iterable[Space]) -> str:
    """``training.lr (loguniform from 0.01 to 1) and method.lam (0.1, 1 or 10)``."""
    texts = []
    for space in spaces:
        if space.is_range:
            low, high = space.values
            step = "" if space.step is None else f" in steps of {space.step:g}"
            texts.append(f"{space.key} ({space.kind} from {low:g} to {high:g}{step})")
        else:
            texts.append(f"{space.key} ({space.kind} of {', '.join(str(in_words(value)) for value in space.values)})")
    return series(texts)


def _place(trial: Mapping[str, str]) -> str:
    return " · ".join(filter(None, [trial["down"], trial["across"]]))


def _label(name: str, unit: Unit) -> str:
    return f"{name} (%)" if unit.sign else name


def _cell(text: str, unit: Unit | None, in_unit: bool) -> str:
    """A number with few digits, in its unit if it has one; other text as it is."""
    number = number_of(text)
    if math.isnan(number):
        return text or "–"
    if unit:
        return unit.text(number if in_unit else unit.factor * number)
    return text if text.isdigit() else f"{number:.4g}"
