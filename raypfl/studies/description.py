"""A study's file: its cells, the layout of its table, and the published numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from raypfl.common.errors import ConfigError, did_you_mean, one_message
from raypfl.common.packaged_yaml import is_file_name
from raypfl.experiment.checks.file_kinds import refuse_other_kind
from raypfl.experiment.checks.validation import FilePart, validation_mistakes
from raypfl.experiment.yaml_text import read
from raypfl.studies import STUDIES
from raypfl.studies.parts import MetricColumn
from raypfl.studies.search.description import Search, search_mistakes

_REPLACED = ("published", "choices")
"""Keys that an extending study replaces as a whole, rather than merges."""

PLACEHOLDER = re.compile(r"\{([^{}]+) ([\w.]+)\}")
"""Placeholder in a choice, such as ``{Ditto method.lam}``: a setting's value in a method's cells."""

_DASHES = {"–", "—", "-"}
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?")


class PublishedNumber(NamedTuple):
    """A published number in percent, and the number after the ±."""

    value: float
    spread: float | None = None


class Variation(FilePart):
    """Changes of a block or a group of columns: parts of the experiment, and options of methods by label."""

    experiment: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)


class PublishedTable(FilePart):
    """The table in the paper.

    Attributes
    ----------
    source : the paper and the number of the table.
    notes : remarks on the numbers.
    rows : the table as printed: by block (if there are any) and method, a list with an entry for each column; or, by
        metric, a list with an entry for each group of columns.
    """

    source: str
    notes: list[str] = Field(default_factory=list)
    rows: dict[str, Any]


class Study(FilePart):
    """A grid of methods, settings and seeds.

    Attributes
    ----------
    name : name of the study and of its folder.
    experiment : settings that all cells share, as in an experiment's file.
    methods : label -> method with its options.
    down, across : label -> changes of this block of rows, or of this group of columns.
    metrics : heading -> metric, in each group of columns.
    datasets : name of a data set -> its folder, or settings that read another copy of it.
    seeds : number of seeds for each method in each setting.
    search : the search that sets some settings of each row; None: they are as described.
    choices : sentences about what the paper leaves open and this study chooses. ``{Ditto method.lam}`` stands for the
        value of this setting in the method's cells.
    published : the published table; None: there is nothing to compare with.
    """

    name: str
    experiment: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, Any]
    down: dict[str, Variation] = Field(default_factory=dict)
    across: dict[str, Variation] = Field(default_factory=dict)
    metrics: dict[str, MetricColumn]
    datasets: dict[str, Any] = Field(default_factory=dict)
    seeds: int = Field(default=1, ge=1)
    search: Search | None = None
    choices: list[str] = Field(default_factory=list)
    published: PublishedTable | None = None

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The table's columns, as (group, metric)."""
        return [(group, metric) for group in self.across or [""] for metric in self.metrics]

    @property
    def positions(self) -> list[tuple[str, str, str]]:
        """Method, block and group of columns of every number in the table, in the order in which cells are planned."""
        blocks_and_groups = product(self.down or [""], self.across or [""])
        return [(method, down, across) for down, across in blocks_and_groups for method in self.methods]

    @property
    def dataset_names(self) -> set[str]:
        """Names of the data sets that cells read, for their clients or as pools."""
        variations = [*self.down.values(), *self.across.values()]
        names: set[str] = set()
        for settings in (self.experiment, *(variation.experiment for variation in variations)):
            names.update(_names_of(settings.get("data")))
        return names

    @property
    def published_blocks(self) -> dict[str, Any]:
        """The published rows by block; without blocks, under an empty name."""
        rows = self.published.rows if self.published else {}
        return rows if self.down else {"": rows}

    def quoted(self, method: str, down: str, across: str, metric: str) -> PublishedNumber | None:
        """Return the published number of a column in a method's row, if there is one."""
        rows = self.published_blocks.get(down, {})
        if method not in rows or (across, metric) not in self.columns:
            return None

        row = rows[method]
        if isinstance(row, dict):
            if metric not in row:
                return None
            group = list(self.across or [""]).index(across)
            return _parsed(row[metric][group])
        return _parsed(row[self.columns.index((across, metric))])


def load(source: str, extended_by: tuple[str, ...] = ()) -> tuple[Study, Study]:
    """Load a study, by name or from a file ending in ``.yaml``, and the study with the published table.

    The second is the study itself or, if it has no published table and extends another study, that other study.

    Parameters
    ----------
    extended_by : the studies that extend it, the one that was asked for first.

    Raises
    ------
    ConfigError : if there is no such study, or for every mistake in it.
    """
    is_file = is_file_name(source)
    values: dict[str, Any] = {"name": Path(source).stem if is_file else source}
    values |= read(Path(source) if is_file else STUDIES.text(source))
    refuse_other_kind(values, source, "study")
    base = values.pop("extends", None)
    if base is None:
        study = checked(source, values)
        _refuse_misspelt_choices(source, study, study.choices)
        return study, study
    if not isinstance(base, str):
        raise ConfigError(f"{source}: extends is {base!r}; it must be the name of a study, or a file.")

    extending = (*extended_by, source)
    if base in extending:
        raise ConfigError(f"{' extends '.join([*extending, base])}: a study cannot extend itself. Name another one.")

    extended, reference = load(base, extending)
    parent = extended.model_dump(exclude={"name", "published"})
    replaced = {key: values[key] for key in _REPLACED if key in values}
    if isinstance(values.get("metrics"), Mapping):
        # Each metric is replaced as a whole, and null removes it.
        metrics = {**parent["metrics"], **values["metrics"]}
        replaced["metrics"] = {heading: metric for heading, metric in metrics.items() if metric is not None}

    changes = {key: value for key, value in values.items() if key not in replaced}
    study = checked(source, merged(parent, changes) | replaced)
    # Those of the extended study may be about methods that this one does not have.
    _refuse_misspelt_choices(source, study, values.get("choices", ()))
    if "published" in values:
        return study, study
    return study, reference


def _refuse_misspelt_choices(source: str, study: Study, choices: Iterable[str]) -> None:
    """Raise a ConfigError if a sentence names a method that the study does not have."""
    for choice in choices:
        for label, _ in PLACEHOLDER.findall(choice):
            if label not in study.methods:
                raise ConfigError(
                    f"The study {source} has no method {label!r}, which its choices name; "
                    f"{did_you_mean(label, study.methods)}"
                )


def merged(base: Any, change: Any) -> Any:
    """Return `base` with a change: mappings are merged key by key, and None removes a key."""
    if not isinstance(change, Mapping):
        return change
    if isinstance(base, str):
        # A component given by its name.
        base = {"name": base}
    elif not isinstance(base, Mapping):
        base = {}

    result = dict(base)
    for key, value in change.items():
        result[key] = merged(base.get(key), value)
    return {key: value for key, value in result.items() if value is not None}


def is_source(pool: Any) -> bool:
    """Return whether a pool is another data set, rather than a share of the clients' samples."""
    return isinstance(pool, Mapping) and "name" in pool


def _names_of(data: Any) -> Iterable[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        if "name" in data:
            yield data["name"]
        for pool in data.get("pools", {}).values():
            if is_source(pool):
                yield pool["name"]


def plain_label(label: str) -> str:
    """Return a label for comparisons: its letters and digits in lower case."""
    return re.sub(r"[\W_]+", "", label.casefold())


def checked(source: str, values: dict[str, Any]) -> Study:
    """Return the study of these values, which `source` has.

    Raises
    ------
    ConfigError : for every mistake in it.
    """
    try:
        study = Study(**values)
    except ValidationError as error:
        raise ConfigError(one_message(validation_mistakes(error, _unknown), f"The study {source}")) from None

    lines = [*_label_mistakes(study), *_option_mistakes(study), *_published_mistakes(study)]
    if study.search:
        lines += search_mistakes(study.search, study.methods)
    if lines:
        raise ConfigError(one_message(lines, f"The study {source}"))
    return study


def _unknown(path: tuple[int | str, ...]) -> str:
    """Return the text that follows an unknown key in a message."""
    key = str(path[-1])
    parts: dict[str, type[BaseModel]] = {
        "metrics": MetricColumn,
        "down": Variation,
        "across": Variation,
        "published": PublishedTable,
        "search": Search,
    }
    part = parts.get(str(path[0]), Study) if len(path) > 1 else Study
    where = "a study" if part is Study else f"what a study has in {path[0]}"
    keys = [*part.model_fields, "extends"] if part is Study else list(part.model_fields)
    return f"is not a key of {where}; {did_you_mean(key, keys)}"


def _label_mistakes(study: Study) -> Iterable[str]:
    if not study.methods or not study.metrics:
        yield "methods and metrics must not be empty: they are the table's rows and columns."
    seen: dict[str, str] = {}
    for label in (*study.methods, *study.down, *study.across):
        plain = plain_label(label)
        if plain in seen or not plain:
            yield f"The labels {seen.get(plain, '')!r} and {label!r} must differ in letters or digits."
        seen[plain] = label


def _option_mistakes(study: Study) -> Iterable[str]:
    for name in study.datasets.keys() - study.dataset_names:
        hint = did_you_mean(name, study.dataset_names)
        yield f"datasets.{name} is set, but the study reads no data set of this name; {hint}"
    for heading, metric in study.metrics.items():
        if metric.last is not None and metric.last > 1 and metric.choose != "last":
            yield f"metrics.{heading}.last has no effect with choose: {metric.choose}; leave one of them out."
        yield from _cost_mistakes(f"metrics.{heading}", metric)
        for block in metric.down or ():
            if block not in study.down:
                yield f"metrics.{heading}.down has {block!r}, which is no block; {did_you_mean(block, study.down)}"
    for axis in ("down", "across"):
        for label, setting in getattr(study, axis).items():
            for method in setting.methods:
                if method not in study.methods:
                    hint = did_you_mean(method, study.methods)
                    yield f"{axis}.{label}.methods.{method} is not one of the study's methods; {hint}"


def _cost_mistakes(where: str, metric: MetricColumn) -> Iterable[str]:
    if metric.cost is None:
        for key in ("target", "budget"):
            if getattr(metric, key) is not None:
                yield f"{where}.{key} needs {where}.cost: what is counted, such as simulated_seconds."
    elif (metric.target is None) == (metric.budget is None):
        yield (
            f"{where}.cost needs either a target, so that the column is what a run spends until it, or a budget, so "
            "that the column is how good a run is within it."
        )
    elif metric.target is not None:
        for key in ("value", "choose", "last", "spread"):
            if getattr(metric, key) != MetricColumn.model_fields[key].default:
                yield f"{where}.{key} has no effect with a target, which is of the primary metric; leave it out."
    elif metric.choose != "last":
        yield f"{where}.choose has no effect with a budget: the round is the last one within it; leave it out."


def _published_mistakes(study: Study) -> Iterable[str]:
    for block, rows in study.published_blocks.items():
        where = "published.rows" + (f".{block}" if study.down else "")
        if study.down and block not in study.down:
            yield f"{where} is no block of the table; {did_you_mean(block, study.down)}"
        if not isinstance(rows, dict):
            yield f"{where} is {rows!r}; it must have a row for each method."
            continue
        for method, row in rows.items():
            yield from _row_mistakes(study, f"{where}.{method}", method, row)


def _row_mistakes(study: Study, where: str, method: str, row: Any) -> Iterable[str]:
    if method not in study.methods:
        yield f"{where} is not one of the study's methods; {did_you_mean(method, study.methods)}"
    if isinstance(row, dict):
        for metric, entries in row.items():
            if metric not in study.metrics:
                yield f"{where}.{metric} is not a metric of the study; {did_you_mean(metric, study.metrics)}"
            yield from _entry_mistakes(f"{where}.{metric}", entries, [(group,) for group in study.across or [""]])
    else:
        yield from _entry_mistakes(where, row, study.columns)


def _entry_mistakes(where: str, row: Any, columns: Sequence[tuple[str, ...]]) -> Iterable[str]:
    if not isinstance(row, list) or len(row) != len(columns):
        headings = ", ".join(" ".join(filter(None, column)) for column in columns)
        count = f"{len(row)} entries" if isinstance(row, list) else repr(row)
        yield f"{where} has {count}; it must have one for each column: {headings}."
        return
    for entry in row:
        try:
            _parsed(entry)
        except ValueError:
            yield f"{where} has {entry!r}; an entry is a number, '66.40 ± 3.13', or '–' if there is none."


def _parsed(entry: Any) -> PublishedNumber | None:
    text = str(entry).strip()
    if text in _DASHES:
        return None
    match = _NUMBER.fullmatch(text)
    if not match:
        raise ValueError(text)
    value, spread = match.groups()
    return PublishedNumber(float(value), None if spread is None else float(spread))
