"""A study's file: which cells it has, how its table is laid out, and what was published."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.config.sentences import listed, sentences
from raypfl.config.yaml_text import read
from raypfl.studies import STUDIES

_WHOLE = ("metrics", "published", "choices")  # what a study that extends another replaces, rather than adds to
_DASHES = {"–", "—", "-"}
_QUOTED = re.compile(r"(-?\d+(?:\.\d+)?)(?:\s*±\s*(\d+(?:\.\d+)?))?")


class Quoted(NamedTuple):
    """A published number in percent, and what stands behind its ±."""

    value: float
    spread: float | None = None


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Metric(_Part):
    """A column of the table.

    Attributes
    ----------
    protocol, model : which rows of an evaluation. value : which of their aggregates: a metric, or ``weighted``,
        ``worst_decile`` or ``std`` of the primary one; None: that one. Shares are shown in percent.
    spread : what stands behind the ±: the standard deviation over the ``seeds``, or that over the ``clients``.
    """

    protocol: str
    model: Literal["personal", "global"] = "personal"
    value: str | None = None
    spread: Literal["seeds", "clients"] = "seeds"


class Setting(_Part):
    """What a block or a group of columns changes: parts of the experiment, and options of methods by their labels."""

    experiment: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)


class Published(_Part):
    """Numbers from elsewhere.

    Attributes
    ----------
    source : where they stand, with the number of the table.
    notes : what one should know of them.
    alike : what is true of the gaps only where nothing deviates from the published protocol.
    rows : the table as it is printed: by block (where there are any) and method, a list with an entry for each column.
    """

    source: str
    notes: list[str] = Field(default_factory=list)
    alike: list[str] = Field(default_factory=list)
    rows: dict[str, Any]


class Study(_Part):
    """A named grid of methods, settings and seeds.

    Attributes
    ----------
    name : of its folder.
    experiment : what all cells share, as in an experiment's file.
    methods : label -> method with its options.
    down, across : label -> what that block of rows, or that group of columns, changes.
    metrics : heading -> what is shown, for each group of columns.
    seeds : how often each method is run in each setting.
    choices : what the source leaves open and is chosen here, in sentences.
    published : None: there is nothing to compare with.
    """

    name: str
    experiment: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, Any]
    down: dict[str, Setting] = Field(default_factory=dict)
    across: dict[str, Setting] = Field(default_factory=dict)
    metrics: dict[str, Metric]
    seeds: int = Field(default=1, ge=1)
    choices: list[str] = Field(default_factory=list)
    published: Published | None = None

    def quoted(self, method: str, down: str, across: str, metric: str) -> Quoted | None:
        """The published number there, if there is one."""
        if self.published is None:
            return None
        rows = self.published.rows.get(down, {}) if self.down else self.published.rows
        columns = _columns(self)
        if method not in rows or (across, metric) not in columns:
            return None
        return _parsed(rows[method][columns.index((across, metric))])


def load(source: str) -> tuple[Study, Study]:
    """A study that comes with the package, or that of a file ending in ``.yaml``; and the one it is held against.

    That is itself or, if its file extends another one and publishes nothing of its own, that other one.

    Raises
    ------
    ConfigError : if there is none, or for everything that is wrong with it.
    """
    given = _given(source)
    base = given.pop("extends", None)
    if base is None:
        study = _made(source, given)
        return study, study
    if not isinstance(base, str):
        raise ConfigError(f"{source}: extends is {base!r}; it must be the name of a study, or a file.")
    extended, reference = load(base)
    parent = extended.model_dump(exclude={"name", "published"})
    study = _made(source, _extended(parent, given))
    return study, study if "published" in given else reference


def merged(base: Any, change: Any) -> Any:
    """`change` laid over `base`: mappings merge, key by key, and None takes a key away."""
    if not isinstance(change, Mapping):
        return change
    under = {"name": base} if isinstance(base, str) else base if isinstance(base, Mapping) else {}
    over = {key: merged(under.get(key), value) for key, value in change.items()}
    return {key: value for key, value in {**under, **over}.items() if value is not None}


def _extended(parent: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = merged(parent, {key: value for key, value in given.items() if key not in _WHOLE})
    return both | {key: given[key] for key in _WHOLE if key in given}


def plain_label(label: str) -> str:
    """How labels are compared: letters and digits alone, in lower case."""
    return re.sub(r"[\W_]+", "", label.casefold())


def _given(source: str) -> dict[str, Any]:
    if not source.endswith((".yaml", ".yml")):
        return {"name": source, **read(STUDIES.text(source))}
    return {"name": Path(source).stem, **read(Path(source))}


def _made(source: str, values: dict[str, Any]) -> Study:
    try:
        study = Study(**values)
    except ValidationError as error:
        raise ConfigError(listed(sentences(error, _unknown), f"The study {source}")) from None
    if lines := [*_label_mistakes(study), *_option_mistakes(study), *_published_mistakes(study)]:
        raise ConfigError(listed(lines, f"The study {source}"))
    return study


def _unknown(path: tuple[int | str, ...]) -> str:
    key = str(path[-1])
    parts: dict[str, type[BaseModel]] = {"metrics": Metric, "down": Setting, "across": Setting, "published": Published}
    part = parts.get(str(path[0]), Study) if len(path) > 1 else Study
    where = "a study" if part is Study else f"what a study has in {path[0]}"
    known = [*part.model_fields, "extends"] if part is Study else part.model_fields
    return f"is not a key of {where}; {did_you_mean(key, known)}"


def _label_mistakes(study: Study) -> Iterable[str]:
    if not study.methods or not study.metrics:
        yield "methods and metrics must not be empty: they are the table's rows and columns."
    seen: dict[str, str] = {}
    for label in (*study.methods, *study.down, *study.across):
        plain = plain_label(label)
        if plain in seen or not plain:
            yield f"The labels {seen.get(plain, '')!r} and {label!r} must differ in letters or digits, to be chosen by."
        seen[plain] = label


def _option_mistakes(study: Study) -> Iterable[str]:
    for axis in ("down", "across"):
        for label, setting in getattr(study, axis).items():
            for method in setting.methods:
                if method not in study.methods:
                    known = did_you_mean(method, study.methods)
                    yield f"{axis}.{label}.methods.{method} is none of the study's methods; {known}"


def _published_mistakes(study: Study) -> Iterable[str]:
    if study.published is None:
        return
    blocks = study.published.rows if study.down else {"": study.published.rows}
    for block, rows in blocks.items():
        where = "published.rows" + (f".{block}" if study.down else "")
        if study.down and block not in study.down:
            yield f"{where} is no block of the table; {did_you_mean(block, study.down)}"
        if not isinstance(rows, dict):
            yield f"{where} is {rows!r}; it must have a row for each method."
            continue
        for method, row in rows.items():
            yield from _row_mistakes(study, f"{where}.{method}", method, row)


def _row_mistakes(study: Study, where: str, method: str, row: Any) -> Iterable[str]:
    columns = _columns(study)
    if method not in study.methods:
        yield f"{where} is none of the study's methods; {did_you_mean(method, study.methods)}"
    if not isinstance(row, list) or len(row) != len(columns):
        headings = ", ".join(" ".join(filter(None, column)) for column in columns)
        count = f"{len(row)} entries" if isinstance(row, list) else repr(row)
        yield f"{where} has {count}; it must have one for each column: {headings}."
        return
    for entry in row:
        try:
            _parsed(entry)
        except ValueError:
            yield f"{where} has {entry!r}; an entry is a number, '66.40 ± 3.13', or '–' where there is none."


def _columns(study: Study) -> list[tuple[str, str]]:
    """The table's columns, as (group, metric)."""
    return [(group, metric) for group in study.across or [""] for metric in study.metrics]


def _parsed(entry: Any) -> Quoted | None:
    text = str(entry).strip()
    if text in _DASHES:
        return None
    if not (found := _QUOTED.fullmatch(text)):
        raise ValueError(text)
    return Quoted(float(found[1]), None if found[2] is None else float(found[2]))
