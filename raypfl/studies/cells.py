"""The cells of a study: one method in one setting with one seed, and the folder of its run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.evaluation.masking import with_masks
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.assignments import assign, flatten, parse_assignments
from raypfl.experiment.checks.effects import drop_idle, paths_set_in
from raypfl.experiment.checks.limits import aggregates
from raypfl.experiment.identity import deciding_settings
from raypfl.studies.description import Study, Variation, is_source, merged, plain_label

_STATED = re.compile(r"\{([^{}]+) ([\w.]+)\}")
"""In a choice: the value of a setting in a method's cells."""


@dataclass(frozen=True)
class StudyCell:
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
    def position(self) -> tuple[str, str, str]:
        """Method, block and group of columns, which the cells of all seeds have in common."""
        return self.method, self.down, self.across

    @property
    def label(self) -> str:
        """Method, setting and seed, as shown to a person."""
        return " · ".join([*filter(None, self.position), f"seed {self.experiment.seed}"])

    @property
    def folder(self) -> Path:
        """Folder of its run, named after everything that decides the result: equal cells of other studies share it."""
        values = self.experiment.to_dict()
        parts = (values["method"]["name"], values["data"]["name"], f"s{values['seed']}", identity(self.experiment))
        return Path(self.experiment.output).absolute() / "cells" / re.sub(r"[^\w.-]+", "_", "-".join(parts))


def identity(experiment: Experiment) -> str:
    """Twelve hexadecimal digits, a hash of everything in a description that may change its result."""
    text = json.dumps(deciding_settings(experiment), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def select(study: Study, only: Iterable[str]) -> Study:
    """The study with the labels in `only`; of an axis of which it names none, all labels.

    Case and punctuation do not count: ``dir0.3`` is ``Dir(0.3)``.

    Raises
    ------
    ConfigError : for a word that is no label of the study.
    """
    axes: dict[str, dict[str, Any]] = {"methods": study.methods, "down": study.down, "across": study.across}
    known = {plain_label(label): (axis, label) for axis, labels in axes.items() for label in labels}
    named: dict[str, set[str]] = {axis: set() for axis in axes}
    for word in only:
        if plain_label(word) not in known:
            hint = did_you_mean(plain_label(word), known)
            raise ConfigError(f"--only names {word!r}, which is no method and no setting of {study.name}; {hint}")
        axis, label = known[plain_label(word)]
        named[axis].add(label)
    chosen = {
        axis: {label: part for label, part in labels.items() if label in (named[axis] or labels)}
        for axis, labels in axes.items()
    }
    return study.model_copy(update=chosen)


def plan(study: Study, assignments: Sequence[str] = ()) -> list[StudyCell]:
    """The cells to run, all methods and settings of one seed before the next seed.

    Parameters
    ----------
    assignments : ``dotted.key=value``, as for a comparison; ``seeds=1`` is how many there are, and
        ``datasets.cifar10=FOLDER`` where a data set lies.

    Raises
    ------
    ConfigError : if one of the experiments or an assignment is wrong.
    """
    for text in assignments:
        if text.partition("=")[0].strip() in ("method", "methods"):
            raise ConfigError(f"{text!r} cannot be set in a study: it has its methods. Choose among them with --only.")
    study, assignments = _with_datasets(study, assignments)
    cells = [
        cell
        for down in study.down or ("",)
        for across in study.across or ("",)
        for cell in _cells(study, down, across, assignments)
    ]
    for cell in cells:
        _require_metrics(study, cell)
    return sorted(cells, key=lambda cell: cell.experiment.seed)


def choices_with_values(study: Study, cells: Sequence[StudyCell]) -> list[str]:
    """The study's choices with the values that its cells have; without those on methods that are not run.

    Raises
    ------
    ConfigError : if a choice names a method or a setting that there is not.
    """
    values: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        of_method = values.setdefault(cell.method, {})
        for key, value in flatten(cell.experiment.to_dict()).items():
            of_method.setdefault(key, []).append(str(value))

    return [
        _STATED.sub(lambda match: _stated(values, *match.groups()), choice)
        for choice in study.choices
        if all(label in values for label, _ in _STATED.findall(choice))
    ]


def _stated(values: Mapping[str, Mapping[str, Sequence[str]]], label: str, key: str) -> str:
    if key not in values[label]:
        raise ConfigError(
            f"The study's choices name the setting {key} of {label}, which has none of this name; "
            f"{did_you_mean(key, values[label])}"
        )
    return " or ".join(dict.fromkeys(values[label][key]))


def _with_datasets(study: Study, assignments: Sequence[str]) -> tuple[Study, list[str]]:
    """The study with the data sets that assignments name, and the other assignments."""
    others = [text for text in assignments if not text.strip().startswith("datasets.")]
    values = {"datasets": dict(study.datasets)}
    for path, value in parse_assignments(text for text in assignments if text not in others):
        if path[1] not in study.dataset_names:
            hint = did_you_mean(path[1], study.dataset_names)
            raise ConfigError(f"datasets.{path[1]} is set, but no cell reads a data set of this name; {hint}")
        assign(values, path, value)
    return study.model_copy(update=values), others


def _relocated(data: Any, datasets: Mapping[str, Any]) -> Any:
    """The description `data` of an experiment, in which data sets of these names are read from where they lie."""
    described: dict[str, Any] = {"name": data} if isinstance(data, str) else dict(data)
    if "pools" in described:
        described["pools"] = {
            name: _relocated(pool, datasets) if is_source(pool) else pool for name, pool in described["pools"].items()
        }
    place = datasets.get(described.get("name", ""))
    if place is None:
        return described
    return merged(described, place if isinstance(place, Mapping) else {"root": place})


def _cells(study: Study, down: str, across: str, assignments: Sequence[str]) -> list[StudyCell]:
    """The cells of all methods and seeds in one setting."""
    values: dict[str, Any] = {"name": study.name, "seeds": study.seeds, **study.experiment}
    described = dict(study.methods)
    settings = study.down.get(down, Variation()), study.across.get(across, Variation())
    for setting in settings:
        values = merged(values, setting.experiment)
        if setting.experiment:  # what the study gives all settings may have no effect in this one
            drop_idle(values, paths_set_in(setting.experiment))
        described |= {
            label: merged(described[label], change) for label, change in setting.methods.items() if label in described
        }
    if study.datasets and "data" in values:
        values = values | {"data": _relocated(values["data"], study.datasets)}
    planned = experiments(values | {"methods": list(described.values())}, assignments)
    seeds = len(planned) // len(described)
    return [StudyCell([*described][i // seeds], down, across, experiment) for i, experiment in enumerate(planned)]


def _require_metrics(study: Study, cell: StudyCell) -> None:
    experiment = cell.experiment
    protocols, masks = experiment.evaluation.protocols, experiment.evaluation.masks
    known = aggregates(experiment.objective, experiment.evaluation.metrics)
    for heading, metric in study.metrics.items():
        if metric.down is not None and cell.down not in metric.down:
            continue
        if metric.protocol not in with_masks(protocols, masks):
            raise ConfigError(
                f"The study's metric {heading} is of the protocol {metric.protocol!r}, but evaluation.protocols is "
                f"[{', '.join(protocols)}] with evaluation.masks=[{', '.join(masks)}]; add what it lacks."
            )
        if metric.value is not None and metric.value not in known:
            raise ConfigError(
                f"The study's metric {heading} has the value {metric.value!r}, which is no metric; "
                f"{did_you_mean(metric.value, known)}"
            )
