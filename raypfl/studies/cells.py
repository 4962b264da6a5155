"""A study's cells: one method in one setting from one seed, and the folder where its run is."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.config import Experiment, experiments
from raypfl.config.limits import aggregates
from raypfl.studies.description import Setting, Study, merged, plain_label

_SAME_BITS = ("name", "output", "ray", "checkpoint", "tracking")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes
    ----------
    method, down, across : labels; empty where the study has no such axis.
    experiment : what is run.
    """

    method: str
    down: str
    across: str
    experiment: Experiment

    @property
    def place(self) -> tuple[str, str, str]:
        """Its method, block and group of columns, without its seed."""
        return self.method, self.down, self.across

    @property
    def label(self) -> str:
        """Method, setting and seed, to a person."""
        return " · ".join([*filter(None, self.place), f"seed {self.experiment.seed}"])

    @property
    def folder(self) -> Path:
        """Of its run, named after what decides the result, so that studies with the same cell share it."""
        values = self.experiment.to_dict()
        parts = (values["method"]["name"], values["data"]["name"], f"s{values['seed']}", identity(self.experiment))
        name = "-".join(parts)
        return Path(self.experiment.output).absolute() / "cells" / re.sub(r"[^\w.-]+", "_", name)


@dataclass(frozen=True)
class Choice:
    """Which methods, blocks and groups of columns are run."""

    methods: tuple[str, ...]
    down: tuple[str, ...]
    across: tuple[str, ...]


def identity(experiment: Experiment) -> str:
    """Twelve hexadecimal digits of everything in a description that may change its result."""
    values = {key: value for key, value in experiment.to_dict().items() if key not in _SAME_BITS}
    data, engine = dict(values["data"]), dict(values["engine"])
    for section, keys in ((data, ("cache", "download")), (engine, ("backend",))):
        for key in keys:
            del section[key]
    if data["root"]:
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    text = json.dumps(values | {"data": data, "engine": engine}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def choose(study: Study, words: Iterable[str] = ()) -> Choice:
    """What `words` name: of each axis the labels that are named or, where none is, all.

    Case and punctuation do not count: ``dir0.3`` is ``Dir(0.3)``.

    Raises
    ------
    ConfigError : for a word that is no label of the study.
    """
    axes = {"methods": list(study.methods), "down": list(study.down), "across": list(study.across)}
    known = {plain_label(label): (axis, label) for axis, labels in axes.items() for label in labels}
    named: dict[str, set[str]] = {axis: set() for axis in axes}
    for word in words:
        if plain_label(word) not in known:
            hint = did_you_mean(plain_label(word), known)
            raise ConfigError(f"--only names {word!r}, which is no method and no setting of {study.name}; {hint}")
        axis, label = known[plain_label(word)]
        named[axis].add(label)
    return Choice(*(tuple(one for one in labels if one in (named[axis] or labels)) for axis, labels in axes.items()))


def plan(study: Study, choice: Choice, assignments: Sequence[str] = ()) -> list[Cell]:
    """The cells to run, all methods and settings of one seed before the next.

    Parameters
    ----------
    assignments : ``dotted.key=value``, as for a comparison; ``seeds=1`` is how many there are.

    Raises
    ------
    ConfigError : for anything wrong with the study's experiments or with `assignments`.
    """
    for text in assignments:
        if text.partition("=")[0].strip() in ("method", "methods"):
            raise ConfigError(f"{text!r} cannot be set in a study: it has its methods. Choose among them with --only.")
    cells = []
    for down in choice.down or ("",):
        for across in choice.across or ("",):
            cells += _row(study, choice.methods, (down, across), assignments)
    for cell in cells:
        _require_metrics(study, cell)
    return sorted(cells, key=lambda cell: cell.experiment.seed)


def _row(study: Study, methods: Sequence[str], place: tuple[str, str], assignments: Sequence[str]) -> list[Cell]:
    """The cells of all methods and seeds in one setting."""
    down, across = place
    settings = [study.down.get(down, Setting()), study.across.get(across, Setting())]
    values: dict[str, Any] = {"name": study.name, "seeds": study.seeds, **study.experiment}
    for setting in settings:
        values = merged(values, setting.experiment)
    values["methods"] = []
    for label in methods:
        method = study.methods[label]
        for setting in settings:
            method = merged(method, setting.methods.get(label, {})) if label in setting.methods else method
        values["methods"].append(method)
    planned = experiments(values, assignments)
    seeds = len(planned) // len(methods)
    return [Cell(methods[i // seeds], down, across, experiment) for i, experiment in enumerate(planned)]


def _require_metrics(study: Study, cell: Cell) -> None:
    tested = cell.experiment.evaluation.protocols
    for heading, metric in study.metrics.items():
        if metric.protocol not in tested:
            raise ConfigError(
                f"The study's metric {heading} is of the protocol {metric.protocol!r}, but evaluation.protocols is "
                f"[{', '.join(tested)}]; add it."
            )
        known = aggregates(cell.experiment.objective, cell.experiment.evaluation.metrics)
        if metric.value is not None and metric.value not in known:
            raise ConfigError(
                f"The study's metric {heading} has the value {metric.value!r}, which is no metric; "
                f"{did_you_mean(metric.value, known)}"
            )
