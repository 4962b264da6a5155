"""An experiment's whole description: typed, checked early, YAML in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.registry import Registry
from raypfl.config.assignments import assign, parsed
from raypfl.config.components import build, checked_options, described, found, made, named, optimizer
from raypfl.config.limits import contradictions, outside_limits
from raypfl.config.sentences import joined, sentences
from raypfl.config.settings import CheckpointSettings, ModelSettings, RaySettings, TrackingSettings
from raypfl.config.yaml_text import read, write
from raypfl.data import PARTITIONS, Dirichlet, Partition
from raypfl.datasets import DATASETS, DataConfig
from raypfl.datasets.base import no_pool
from raypfl.evaluation.measures import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.federation.settings import CohortSettings, EngineSettings, FailureSettings
from raypfl.methods import METHODS, FedAvg, Method
from raypfl.models import MODELS
from raypfl.models.weights import is_file
from raypfl.objectives import METRICS, OBJECTIVES, Classification, Metric, Objective
from raypfl.optimizers import OPTIMIZERS, SGD, LocalOptimizer
from raypfl.training.augmentation import AUGMENTATIONS, Augmentation
from raypfl.training.settings import TrainingSettings

GIVEN_BY_ENGINE = ("input_shape", "num_classes")


def _data(value: Any) -> DataConfig:
    if isinstance(value, DataConfig):
        return value
    name, options = named(value, "data", DataConfig.name)
    found(DATASETS, name)
    if isinstance(pools := options.get("pools"), dict):
        options = {**options, "pools": {called: _pool(called, given) for called, given in pools.items()}}
    if "augmentation" in options:
        options = {**options, "augmentation": _augmentation(options["augmentation"])}
    return made(DataConfig, "data", {"name": name, **options}, "data")


def _augmentation(given: Any) -> tuple[Augmentation, ...]:
    if not isinstance(given, list | tuple):
        raise ValueError(f"data.augmentation is {given!r}; it must be a list, such as [crop, flip].")
    for one in given:
        if isinstance(one, dict) and "name" not in one:
            raise ValueError(f"data.augmentation has {one!r}, without a name; write it as {{name: crop, padding: 4}}.")
    return tuple(build(AUGMENTATIONS, Augmentation, "", one, "data.augmentation") for one in given)


def _pool(called: str, given: Any) -> Any:
    """A pool's options in the types that they are declared with; a share as it is."""
    if isinstance(given, dict):
        return checked_options(DataConfig, "a pool", given, f"data.pools.{called}", hidden=("augmentation",))
    if not isinstance(given, int | float):
        raise ValueError(no_pool(called, given))
    return given


def _model(value: Any) -> ModelSettings:
    given = _plain(value) if isinstance(value, ModelSettings) else value
    name, options = named(given, "model", ModelSettings.name)
    weights = options.pop("weights", None)
    if not isinstance(weights, str | None):
        raise ValueError(f"model.weights is {weights!r}; it must be a file, or the name of torchvision's weights.")
    if weights is not None and is_file(weights):
        weights = str(Path(weights).expanduser().absolute())  # other processes may have other working directories
    patterns = {key: _pattern(key, options.pop(key, None)) for key in ("frozen", "trained")}
    if None not in patterns.values():
        raise ValueError("model.frozen and model.trained are both set; say what is frozen, or what alone is trained.")
    options = checked_options(found(MODELS, name), name, options, "model", hidden=GIVEN_BY_ENGINE)
    return ModelSettings(name=name, weights=weights, **patterns, options=_plain(options))


def _pattern(key: str, given: Any) -> str | None:
    if not isinstance(given, str | None):
        raise ValueError(f"model.{key} is {given!r}; it must be names of the network's parts, with commas between.")
    return given


def _training(value: Any, validate: Callable[[Any], TrainingSettings]) -> TrainingSettings:
    given = value if isinstance(value, dict) else vars(value) if isinstance(value, TrainingSettings) else None
    if given is None or given.get("optimizer", "sgd") == "sgd":
        return validate(value)
    chosen = optimizer(given["optimizer"], "training.optimizer")
    if type(chosen) is SGD and chosen != SGD():
        raise ValueError("training.optimizer is sgd, whose options are training.momentum and training.nesterov.")
    settings = validate({key: one for key, one in given.items() if key != "optimizer"})
    return settings if type(chosen) is SGD else dataclasses.replace(settings, optimizer=chosen)


def _objective(value: Any) -> Objective | None:
    return None if value is None else build(OBJECTIVES, Objective, "", value)


def _metrics(given: Any) -> tuple[Metric, ...]:
    return tuple(build(METRICS, Metric, "", one, "evaluation.metrics") for one in given)


_partition = partial(build, PARTITIONS, Partition, "dirichlet")
_method = partial(build, METHODS, Method, "fedavg")


class Experiment(BaseModel):
    """Everything that decides a run's result, and how it is executed.

    Every part can be given as a YAML file gives it (``method="ditto"``, ``training={"lr": 0.05}``) or as an object
    (``method=Ditto(lam=1.0)``). An experiment never changes; `override` and `replace` give new ones.

    Raises
    ------
    ConfigError : listing, with its dotted path, everything that is unknown, of a wrong type, out of range, or contrary
        to something else.

    Examples
    --------
    >>> Experiment(method="ditto", rounds=10).override(["method.lam=1", "training.lr=0.05"]).method.lam
    1.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")

    name: str = "experiment"
    seed: int = 0
    rounds: int = 30
    data: Annotated[DataConfig, PlainValidator(_data)] = Field(default_factory=DataConfig)
    partition: Annotated[Partition, PlainValidator(_partition)] = Field(default_factory=Dirichlet)
    model: Annotated[ModelSettings, PlainValidator(_model)] = Field(default_factory=ModelSettings)
    objective: Annotated[Objective | None, PlainValidator(_objective)] = None
    method: Annotated[Method, PlainValidator(_method)] = Field(default_factory=FedAvg)
    cohort: CohortSettings = Field(default_factory=CohortSettings)
    training: Annotated[TrainingSettings, WrapValidator(_training)] = Field(default_factory=TrainingSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    ray: RaySettings = Field(default_factory=RaySettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    tracking: TrackingSettings = Field(default_factory=TrackingSettings)
    failures: FailureSettings = Field(default_factory=FailureSettings)
    output: str = "runs"

    @property
    def measures(self) -> Measures:
        """By which metrics models are judged; of an experiment that leaves its objective to the data: of one class."""
        return Measures(self.objective or Classification(), self.evaluation.metrics)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Experiment:
        """From YAML text, or from a file (a Path, or a line ending in ``.yaml`` or ``.yml``)."""
        return cls(**read(source))

    def to_yaml(self) -> str:
        """YAML text with every setting spelled out; `from_yaml` gives an equal experiment."""
        return write(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dicts, lists, numbers and texts, as in YAML."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    def override(self, assignments: Iterable[str]) -> Experiment:
        """With ``dotted.key=value`` assignments, whose values are YAML.

        ``method=ditto`` starts from that method's defaults, wherever in the list it stands.
        """
        values = self.to_dict()
        for path, value in parsed(assignments):
            assign(values, path, value)
        return Experiment(**values)

    def replace(self, **changes: Any) -> Experiment:
        """With other fields, e.g. ``replace(seed=1, method=Ditto(lam=1.0))``."""
        return Experiment(**{name: getattr(self, name) for name in type(self).model_fields} | changes)

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, validate: Any) -> Any:
        try:
            experiment = validate(values)
        except ValidationError as error:
            raise ConfigError(joined(sentences(error, _unknown), "The experiment")) from None
        if lines := contradictions(experiment):
            raise ConfigError(joined(lines, "The experiment"))
        return experiment

    @field_validator("evaluation", mode="after")
    @classmethod
    def _with_metrics(cls, value: EvaluationSettings) -> EvaluationSettings:
        return dataclasses.replace(value, metrics=_metrics(value.metrics))

    @field_validator("*", mode="after")
    @classmethod
    def _within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        if lines := outside_limits(str(info.field_name), value):
            raise ValueError("\n".join(lines))
        return value


def _unknown(path: tuple[int | str, ...]) -> str:
    *sections, key = [str(part) for part in path]
    if sections:
        return f"is not a setting of {sections[0]}; {did_you_mean(key, _settings(sections[0]))}"
    at_home = [f"{section}.{key}" for section in Experiment.model_fields if key in _settings(section)]
    hint = f"did you mean {' or '.join(map(repr, at_home))}?" if at_home else did_you_mean(key, Experiment.model_fields)
    return f"is not a setting of an experiment; {hint}"


def _settings(section: str) -> list[str]:
    kind = Experiment.model_fields[section].annotation
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


_COMPONENTS: tuple[tuple[Registry, type], ...] = (
    (METHODS, Method),
    (PARTITIONS, Partition),
    (AUGMENTATIONS, Augmentation),
    (OPTIMIZERS, LocalOptimizer),
    (OBJECTIVES, Objective),
    (METRICS, Metric),
)


def _plain(value: Any) -> Any:
    for registry, base in _COMPONENTS:
        if isinstance(value, base):
            return _plain(described(registry, value))
    if isinstance(value, ModelSettings):
        fixed = {"weights": value.weights, "frozen": value.frozen, "trained": value.trained}
        return _plain({"name": value.name, **fixed, **value.options})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    for kind in (bool, int, float, str):  # numpy's and enum's subclasses, as Ray Tune samples them, become these
        if isinstance(value, kind):
            return kind(value)
    return value
