"""The parts of an experiment: built from what a description says of them, and turned back into it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from raypfl.analysis import Analysis
from raypfl.analysis.base import analysis_name
from raypfl.common.errors import ConfigError
from raypfl.data.datasets import DATASETS, DataConfig, DataSource
from raypfl.devices import AvailabilityModel, Hardware
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.components import (
    GIVEN_BY_ENGINE,
    build,
    checked_options,
    describe,
    look_up,
    name_and_options,
    options_of,
)
from raypfl.experiment.settings import ModelSettings
from raypfl.federation.selection import Selection
from raypfl.learning.objectives import Metric
from raypfl.learning.optimizers import SGD, LocalOptimizer
from raypfl.learning.settings import TrainingSettings
from raypfl.models import MODELS
from raypfl.models.weights import is_file

_PLAIN_TYPES = (bool, int, float, str)


def data_config(value: Any) -> DataConfig:
    """Build the description of the data."""
    if isinstance(value, DataConfig):
        return value
    if isinstance(value, dict):
        value = dict(value)
        pools = value.get("pools")
        if isinstance(pools, dict):
            value["pools"] = {name: _pool(name, pool) for name, pool in pools.items()}
    return _source(DataConfig, value, "data")


def _source(section: type[DataSource], value: Any, where: str) -> Any:
    """Build a data set from the fields of `section` and the options of its reader."""
    name, settings = name_and_options(value, where, section.name)
    reader = look_up(DATASETS, name)
    try:
        # The first parameter of a reader is the data's description, not an option.
        config, *_ = options_of(reader) or [""]
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {name!r}, which is not a function, a Reader or a Population.") from None

    options, fields = _options_and_fields(section, reader, name, settings, where, (config,))
    try:
        return section(name=name, options=options, **fields)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _pool(name: str, pool: Any) -> Any:
    is_data_set = isinstance(pool, dict) and "name" in pool
    return _source(DataSource, pool, f"data.pools.{name}") if is_data_set else pool


def model_settings(value: Any) -> ModelSettings:
    """Build the settings of the network."""
    plain = to_plain(value) if isinstance(value, ModelSettings) else value
    name, settings = name_and_options(plain, "model", ModelSettings.name)
    entry = look_up(MODELS, name)
    options, fields = _options_and_fields(ModelSettings, entry, name, settings, "model", GIVEN_BY_ENGINE)

    for network in options.get("networks", ()) if name == "heterogeneous" else ():
        of_network = model_settings(network)
        if of_network != ModelSettings(name=of_network.name, options=of_network.options):
            raise ValueError(f"model.networks has {network!r}; its networks have no settings but their own options.")

    if fields.get("frozen") is not None and fields.get("trained") is not None:
        raise ValueError("model.frozen and model.trained are both set; set only one of them.")
    weights = fields.get("weights")
    if weights and is_file(weights):
        # Client actors have other working directories.
        fields["weights"] = str(Path(weights).expanduser().absolute())
    return ModelSettings(name=name, options=to_plain(options), **fields)


def _options_and_fields(
    section: type, entry: Callable[..., Any], name: str, settings: dict[str, Any], where: str, hidden: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check settings, and part the options of a registered entry from the fields of the section that names it."""
    valid = checked_options(entry, name, settings, where, hidden, shared=section)
    field_names = {field.name for field in dataclasses.fields(section)}
    options = {key: value for key, value in valid.items() if key not in field_names}
    fields = {key: value for key, value in valid.items() if key in field_names}
    return options, fields


def training_settings(value: Any, validate: Callable[[Any], TrainingSettings]) -> TrainingSettings:
    """Build the settings of local training, with an optimizer."""
    plain = vars(value) if isinstance(value, TrainingSettings) else value
    if not isinstance(plain, dict) or plain.get("optimizer", "sgd") == "sgd":
        return validate(value)

    optimizer = build(LocalOptimizer, plain["optimizer"], "training.optimizer")
    if type(optimizer) is SGD and optimizer != SGD():
        raise ValueError("training.optimizer is sgd, whose options are training.momentum and training.nesterov.")
    settings = validate({key: setting for key, setting in plain.items() if key != "optimizer"})
    if type(optimizer) is SGD:
        return settings
    return dataclasses.replace(settings, optimizer=optimizer)


def _with_components(value: Any, validate: Callable[[Any], Any], section: str, bases: dict[str, type]) -> Any:
    """Build a section of settings of which some, by their names in `bases`, are components."""
    plain = vars(value) if dataclasses.is_dataclass(value) else value
    if not isinstance(plain, dict):
        return validate(value)

    parts = {}
    for name, base in bases.items():
        if plain.get(name) is not None:
            parts[name] = build(base, plain[name], f"{section}.{name}")
    settings = validate({key: setting for key, setting in plain.items() if key not in parts})
    return dataclasses.replace(settings, **parts)


def evaluation_settings(value: EvaluationSettings) -> EvaluationSettings:
    """Build the metrics of an evaluation."""
    metrics = tuple(build(Metric, metric, "evaluation.metrics") for metric in value.metrics)
    return dataclasses.replace(value, metrics=metrics)


def analyses_of(value: Any) -> tuple[Analysis, ...]:
    """Build a list of analyses."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"analyses is {value!r}; it must be a list of names, or of mappings with 'name' and options.")
    analyses = tuple(build(Analysis, analysis, "analyses") for analysis in value)
    names = {analysis_name(analysis) for analysis in analyses}
    if len(names) < len(analyses):
        raise ValueError("analyses names the same analysis twice, whose files would have the same names.")
    return analyses


def optional(base: type, value: Any) -> Any:
    """Build a component that may be left out."""
    return None if value is None else build(base, value)


cohort_settings = partial(_with_components, section="cohort", bases={"selection": Selection})
device_settings = partial(
    _with_components, section="devices", bases={"hardware": Hardware, "availability": AvailabilityModel}
)


def as_assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return settings given by keyword as assignments: ``{"rounds": 5}`` is ``["rounds=5"]``."""
    assignments = []
    for key, value in settings.items():
        try:
            assignments.append(f"{key}={json.dumps(to_plain(value))}")
        except TypeError:
            raise ConfigError(
                f"{key} is {value!r}; a setting is a number, text, a list or a mapping of these."
            ) from None
    return assignments


def to_plain(value: Any) -> Any:
    """Turn settings and components into nested dicts and lists of numbers and texts."""
    if value is None or type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, DataSource | ModelSettings):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        options = fields.pop("options")
        if isinstance(value, DataSource):
            return to_plain({"name": value.name, **options, **fields})
        return to_plain(fields | options)

    component = describe(value)
    if component:
        return to_plain(component)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(part) for part in value]

    # Ray Tune samples subclasses of these types: NumPy's numbers, and enums.
    for plain_type in _PLAIN_TYPES:
        if isinstance(value, plain_type):
            return plain_type(value)
    return value
