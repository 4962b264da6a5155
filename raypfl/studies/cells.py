"""The cells of a study: one method in one setting with one seed, and the folder of its run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypfl.common.counting import numbered
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.data.datasets import DATASETS
from raypfl.evaluation.masking import with_masks
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.assignments import assign, flatten, parse_assignments
from raypfl.experiment.checks.effects import drop_idle, paths_set_in
from raypfl.experiment.checks.limits import aggregates
from raypfl.experiment.components import options_of
from raypfl.experiment.identity import code_digests, deciding_settings
from raypfl.studies.description import PLACEHOLDER, Study, Variation, is_source, merged, plain_label

Position = tuple[str, str, str]
"""Method, block and group of columns."""


@dataclass(frozen=True)
class StudyCell:
    """One run of a study.

    Attributes
    ----------
    method, down, across : labels of the method, block and group of columns; empty if the study has no such axis.
    experiment : the experiment that is run.
    trial : number of the trial of a search; None: it is a run of the table.
    """

    method: str
    down: str
    across: str
    experiment: Experiment
    trial: int | None = None

    @property
    def position(self) -> Position:
        """Method, block and group of columns, which are the same for all seeds."""
        return self.method, self.down, self.across

    @property
    def label(self) -> str:
        """Method, setting, trial and seed, as text for people."""
        return label_of_seeds([self])

    @property
    def folder(self) -> Path:
        """Folder of the run, named after all that decides the result, so that equal cells of studies share it."""
        values = self.experiment.to_dict()
        parts = (values["method"]["name"], values["data"]["name"], f"s{values['seed']}", identity(self.experiment))
        name = re.sub(r"[^\w.-]+", "_", "-".join(parts))
        return Path(self.experiment.output).absolute() / "cells" / name


def label_of_seeds(cells: Sequence[StudyCell]) -> str:
    """Return the label of cells that differ in their seed alone: ``"Ditto · Dir(0.1) · seeds 0 and 1"``."""
    first = cells[0]
    trial = "" if first.trial is None else f"trial {first.trial}"
    seeds = numbered("seed", [cell.experiment.seed for cell in cells])
    return " · ".join(filter(None, [*first.position, trial, seeds]))


def by_position(cells: Iterable[StudyCell]) -> dict[Position, list[StudyCell]]:
    """Return the cells by method, block and group of columns: those of all seeds together."""
    cells_by_position: dict[Position, list[StudyCell]] = {}
    for cell in cells:
        cells_by_position.setdefault(cell.position, []).append(cell)
    return cells_by_position


def identity(experiment: Experiment) -> str:
    """Return twelve hexadecimal digits, a hash of all settings that may change the result, and of the user's files."""
    settings = flatten(deciding_settings(experiment))
    # It changes no result, but was part of the name when it was off by default.
    settings["engine.cuda_graphs"] = False
    # Most settings that a later version adds are null by default. Without them, finished runs keep their names.
    not_null = {key: value for key, value in settings.items() if value is not None}
    files = {f"file of {module}": digest for module, digest in code_digests(not_null).items()}
    text = json.dumps(not_null | files, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def select(study: Study, only: Iterable[str]) -> Study:
    """Return the study with the labels in `only`; an axis of which `only` names no label keeps all of them.

    Case and punctuation are ignored: ``dir0.3`` is ``Dir(0.3)``. A label with commas may be divided at them.

    Raises
    ------
    ConfigError : for a word that is no label of the study.
    """
    axes: dict[str, dict[str, Any]] = {"methods": study.methods, "down": study.down, "across": study.across}
    label_by_word = {}
    for axis, labels in axes.items():
        for label in labels:
            label_by_word[plain_label(label)] = (axis, label)

    named: dict[str, set[str]] = {axis: set() for axis in axes}
    words = list(only)
    while words:
        # The command line is divided at commas, also those within labels.
        candidates = [plain_label("".join(words[:count])) for count in range(1, len(words) + 1)]
        count = next((count for count, word in enumerate(candidates, 1) if word in label_by_word), 0)
        if not count:
            hint = did_you_mean(words[0], [label for _, label in label_by_word.values()])
            raise ConfigError(
                f"--only names {words[0]!r}, which is neither a method nor a setting of {study.name}; {hint}"
            )
        axis, label = label_by_word[candidates[count - 1]]
        named[axis].add(label)
        words = words[count:]

    selected = {}
    for axis, labels in axes.items():
        selected_labels = named[axis] or labels
        selected[axis] = {label: part for label, part in labels.items() if label in selected_labels}
    return study.model_copy(update=selected)


def plan(study: Study, assignments: Sequence[str] = ()) -> list[StudyCell]:
    """Return the cells to run, all methods and settings of one seed before the next seed.

    Parameters
    ----------
    assignments : ``dotted.key=value``, as for a comparison; ``seeds=1`` sets the number of seeds, and
        ``datasets.cifar10=FOLDER`` the folder of a data set.

    Raises
    ------
    ConfigError : if one of the experiments or an assignment is wrong.
    """
    for text in assignments:
        if text.partition("=")[0].strip() in ("method", "methods"):
            raise ConfigError(f"{text!r} cannot be set in a study: it has its methods. Choose among them with --only.")

    study, assignments = _with_datasets(study, assignments)
    cells = []
    for down in study.down or ("",):
        for across in study.across or ("",):
            cells += _cells(study, down, across, assignments)
    for cell in cells:
        _require_metrics(study, cell)
    return sorted(cells, key=lambda cell: cell.experiment.seed)


def choices_with_values(study: Study, cells: Sequence[StudyCell]) -> list[str]:
    """Return the study's choices with the values in its cells, without choices about methods that are not run.

    Raises
    ------
    ConfigError : if a choice names an unknown setting.
    """
    values: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        method_values = values.setdefault(cell.method, {})
        for key, value in flatten(cell.experiment.to_dict()).items():
            method_values.setdefault(key, []).append(str(value))

    choices = []
    for choice in study.choices:
        if all(label in values for label, _ in PLACEHOLDER.findall(choice)):
            choices.append(PLACEHOLDER.sub(lambda match: _values_as_text(values, *match.groups()), choice))
    return choices


def _values_as_text(values: Mapping[str, Mapping[str, Sequence[str]]], label: str, key: str) -> str:
    if key not in values[label]:
        raise ConfigError(
            f"The study's choices name the setting {key} of {label}, which has no such setting; "
            f"{did_you_mean(key, values[label])}"
        )
    return " or ".join(dict.fromkeys(values[label][key]))


def _with_datasets(study: Study, assignments: Sequence[str]) -> tuple[Study, list[str]]:
    """Return the study with the data sets that assignments locate, and the other assignments."""
    other_assignments = [text for text in assignments if not text.strip().startswith("datasets.")]
    dataset_assignments = [text for text in assignments if text not in other_assignments]
    values = {"datasets": dict(study.datasets)}
    for path, value in parse_assignments(dataset_assignments):
        if path[1] not in study.dataset_names:
            hint = did_you_mean(path[1], study.dataset_names)
            raise ConfigError(f"datasets.{path[1]} is set, but no cell reads a data set of this name; {hint}")
        assign(values, path, value)
    return study.model_copy(update=values), other_assignments


def _relocated(data: Any, datasets: Mapping[str, Any]) -> Any:
    """Return an experiment's section `data`, in which these data sets are read from their own locations."""
    section: dict[str, Any] = {"name": data} if isinstance(data, str) else dict(data)
    if "pools" in section:
        pools = {}
        for name, pool in section["pools"].items():
            pools[name] = _relocated(pool, datasets) if is_source(pool) else pool
        section["pools"] = pools

    location = datasets.get(section.get("name", ""))
    if location is None:
        return section
    if not isinstance(location, Mapping):
        location = {"root": location}
    # A copy in another format has none of the options that only the replaced reader has.
    reader = DATASETS.get(location.get("name", section["name"]))
    unreadable = options_of(DATASETS.get(section["name"])).keys() - options_of(reader).keys()
    readable = {name: value for name, value in section.items() if name not in unreadable}
    return merged(readable, location)


def _cells(study: Study, down: str, across: str, assignments: Sequence[str]) -> list[StudyCell]:
    """Return the cells of all methods and seeds in one setting.

    Raises
    ------
    ConfigError : if one of the experiments is wrong; it names the block or the group of columns with the mistake.
    """
    try:
        methods = _methods(study, down, across, assignments)
    except ConfigError as error:
        raise ConfigError(f"{_where(study, down, across, assignments, str(error))}{error}") from None
    return [
        StudyCell(method, down, across, experiment) for method, planned in methods.items() for experiment in planned
    ]


def _where(study: Study, down: str, across: str, assignments: Sequence[str], mistake: str) -> str:
    """Return ``"In across.Dir(0.1): "`` if the mistake is in this variation; an empty text if it is in none."""
    for down_label, across_label in (("", ""), (down, ""), ("", across), (down, across)):
        try:
            _methods(study, down_label, across_label, assignments)
        except ConfigError as error:
            if str(error) == mistake:
                labels = {"down": down_label, "across": across_label}
                parts = [f"{axis}.{label}" for axis, label in labels.items() if label]
                return f"In {' and '.join(parts)}: " if parts else ""
    return ""


def _methods(study: Study, down: str, across: str, assignments: Sequence[str]) -> dict[str, list[Experiment]]:
    """Return the experiments of each method in one setting, one for each seed; an empty label changes nothing."""
    values: dict[str, Any] = {"name": study.name, "seeds": study.seeds, **study.experiment}
    methods = dict(study.methods)

    for variation in (study.down.get(down, Variation()), study.across.get(across, Variation())):
        values = merged(values, variation.experiment)
        if variation.experiment:
            # Settings of the whole study may have no effect in this variation.
            drop_idle(values, paths_set_in(variation.experiment))
        for label, change in variation.methods.items():
            if label in methods:
                methods[label] = merged(methods[label], change)
    if study.datasets and "data" in values:
        values = values | {"data": _relocated(values["data"], study.datasets)}

    planned = experiments(values | {"methods": list(methods.values())}, assignments)
    seeds = len(planned) // len(methods)
    return {label: planned[i * seeds : (i + 1) * seeds] for i, label in enumerate(methods)}


def _require_metrics(study: Study, cell: StudyCell) -> None:
    evaluation = cell.experiment.evaluation
    protocols = evaluation.protocols
    masks = evaluation.masks
    available = aggregates(cell.experiment.objective, cell.experiment.extra_metrics)

    for heading, metric in study.metrics.items():
        if not metric.is_of(cell.down):
            continue
        if metric.protocol not in with_masks(protocols, masks):
            raise ConfigError(
                f"The study's metric {heading} is of the protocol {metric.protocol!r}, but evaluation.protocols is "
                f"[{', '.join(protocols)}] with evaluation.masks=[{', '.join(masks)}]; add what it lacks."
            )
        if metric.choose == "validation" and "val" not in protocols:
            raise ConfigError(
                f"The study's metric {heading} is of the round that validation data choose; add val to "
                "evaluation.protocols, and set data.val_fraction."
            )
        if metric.cost in ("simulated_seconds", "kilojoules") and cell.experiment.devices.hardware is None:
            raise ConfigError(
                f"The study's metric {heading} counts {metric.cost}, but {cell.label} has no devices; set "
                "devices.hardware, as in devices.hardware=lognormal."
            )
        if metric.value is not None and metric.value not in available:
            raise ConfigError(
                f"The study's metric {heading} has the value {metric.value!r}, which is not a metric; "
                f"{did_you_mean(metric.value, available)}"
            )
