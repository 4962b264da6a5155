"""The setting of runs in one line: data, partition and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from raypfl.common.counting import counted
from raypfl.data.datasets.population import is_described
from raypfl.data.datasets.settings import DataConfig
from raypfl.engine.events import RunStarted
from raypfl.experiment import Experiment
from raypfl.experiment.components import options_of
from raypfl.experiment.settings import ModelSettings
from raypfl.models import MODELS
from raypfl.runs.result import RunResult

_OF_ANY_FOLDER = ("arrays", "csv", "image_folder", "npy", "parquet", "table", "text", "text_table")
"""Names of data sets that say how files are read, but not which: their folder does."""

_MODEL_DEFAULTS = {field.name: field.default for field in fields(ModelSettings) if field.name != "name"}


def setting_text(runs: Sequence[RunResult | RunStarted]) -> str:
    """Return the line of runs on the same data and partition, with what their models have in common.

    Options at their default are left out, except for the partition's first one, such as alpha.
    """
    networks = [_network(run.experiment) for run in runs]
    common = {}
    for key, value in networks[0].items():
        if all(network.get(key) == value for network in networks):
            common[key] = value

    parts = [data_text(runs[0])]
    if "name" in common:
        parts.append(component_text(common))
    return " · ".join([*parts, *_on_messages([run.experiment for run in runs])])


def data_text(run: RunResult | RunStarted) -> str:
    """Return data and partition in one line; of a population, which has no partition, the number of clients."""
    experiment = run.experiment
    values = applicable_settings(experiment)
    parts = [_data_name(experiment.data)]

    partition = values.get("partition")
    if partition is None:
        if "num_clients" in run.metadata:
            parts.append(counted(run.metadata["num_clients"], "client"))
        return " · ".join(parts)

    clients = partition.pop("clients", None)
    if clients:
        parts.append(counted(clients, "client"))

    defaults = {field.name: field.default for field in fields(experiment.partition)}
    # Its name and its first option, such as alpha.
    always = list(partition)[:2]
    shown = {key: value for key, value in partition.items() if key in always or value != defaults[key]}
    return " · ".join([*parts, component_text(shown)])


def _data_name(data: DataConfig) -> str:
    """Return ``cifar10``, or ``table(people)`` where the folder says which table."""
    if data.root is None or data.name not in _OF_ANY_FOLDER:
        return data.name
    return f"{data.name}({Path(data.root).expanduser().absolute().name})"


def applicable_settings(experiment: Experiment) -> dict[str, Any]:
    """Return all settings, without the partition if the data is a population, which has none."""
    values = experiment.to_dict()
    if is_described(experiment.data):
        del values["partition"]
    return values


def implied_settings(experiment: Experiment) -> set[str]:
    """Return the settings that need not be shown, since the others imply them; a section stands for all in it."""
    implied = {f"model.{name}" for name in options_at_default(experiment.model)}
    if experiment.model.pretrain is not None:
        # The pretrained file.
        implied.add("model.weights")
    if is_described(experiment.data):
        implied.add("partition")
    return implied


def options_at_default(model: ModelSettings) -> set[str]:
    """Return the options of a network that are given, but as they would be anyway."""
    at_default = set()
    for name, option in options_of(MODELS.get(model.name)).items():
        default = option.default
        if isinstance(default, tuple):
            default = list(default)  # as a description has it
        if name in model.options and model.options[name] == default:
            at_default.add(name)
    return at_default


def _on_messages(experiments: Sequence[Experiment]) -> list[str]:
    """Return the attack, the rule of aggregation and the compression, each if all experiments have it."""
    descriptions = [experiment.to_dict() for experiment in experiments]
    texts = []
    for section in ("attack", "aggregation", "compression"):
        components = [description[section] for description in descriptions]
        if components[0] is not None and all(component == components[0] for component in components):
            texts.append(component_text(components[0]))
    return texts


def _network(experiment: Experiment) -> dict[str, Any]:
    """Return the model's name, and its settings that are not at their default."""
    implied = implied_settings(experiment)
    network = {}
    for key, value in experiment.to_dict()["model"].items():
        if value != _MODEL_DEFAULTS.get(key) and f"model.{key}" not in implied:
            network[key] = value

    if "weights" in network:
        network["weights"] = Path(network["weights"]).name
    return network


def component_text(component: Mapping[str, Any]) -> str:
    """Return ``mlp(hidden=[16])``; a mapping without a name, such as a class of devices, has only the brackets."""
    options = []
    for key, value in component.items():
        if key != "name" and value is not None:
            options.append(f"{key}={value_text(value)}")
    name = component.get("name", "")
    return f"{name}({', '.join(options)})" if options else name


def value_text(value: Any) -> str:
    """Return the value as it is printed: ``null``, ``true``, ``[mlp(hidden=[16]), cnn]``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return component_text(value)
    return str(value)
