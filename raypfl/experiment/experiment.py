"""The description of an experiment: typed, checked before anything runs, read from YAML and written to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from raypfl.analysis import Analysis
from raypfl.analysis.base import name_of
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.user_code import framed
from raypfl.data import Dirichlet, Partition
from raypfl.data.datasets import DATASETS, DataConfig, DataSource
from raypfl.data.datasets.population import is_described
from raypfl.evaluation.measures import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.components import (
    GIVEN_BY_ENGINE,
    build,
    checked_options,
    describe,
    look_up,
    name_and_options,
    options_of,
)
from raypfl.experiment.effects import assign_all, drop_idle, paths_set_in, refused_settings, require_effect
from raypfl.experiment.hints import suggestion
from raypfl.experiment.limits import (
    cohort_mistakes,
    evaluation_mistakes,
    outside_limits,
    privacy_mistakes,
    ray_mistakes,
    training_mistakes,
)
from raypfl.experiment.settings import CheckpointSettings, ModelSettings, RaySettings, TrackingSettings
from raypfl.experiment.validation import Mistakes, boolean_mistakes, one_message, validation_mistakes
from raypfl.experiment.yaml_text import read, write
from raypfl.federation.settings import CohortSettings, EngineSettings, FailureSettings
from raypfl.learning.objectives import Classification, Metric, Objective
from raypfl.learning.optimizers import SGD, LocalOptimizer
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import FedAvg, Method
from raypfl.models import MODELS
from raypfl.models.weights import is_file


def _data(value: Any) -> DataConfig:
    if isinstance(value, dict):
        value = dict(value)
        if isinstance(pools := value.get("pools"), dict):
            value["pools"] = {name: _pool(name, given) for name, given in pools.items()}
    return value if isinstance(value, DataConfig) else _source(DataConfig, value, "data")


def _source(section: type[DataSource], value: Any, where: str) -> Any:
    """A data set, described by the fields of `section` and the options of its reader."""
    name, given = name_and_options(value, where, section.name)
    reader = look_up(DATASETS, name)
    try:
        config, *_ = options_of(reader) or [""]
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {name!r}, which is not a function, a Reader or a Population.") from None
    options, fields = _parted(section, reader, name, given, where, (config,))
    try:
        return section(name=name, options=options, **fields)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _pool(name: str, given: Any) -> Any:
    described = isinstance(given, dict) and "name" in given
    return _source(DataSource, given, f"data.pools.{name}") if described else given


def _model(value: Any) -> ModelSettings:
    given = _to_plain(value) if isinstance(value, ModelSettings) else value
    name, given = name_and_options(given, "model", ModelSettings.name)
    options, fields = _parted(ModelSettings, look_up(MODELS, name), name, given, "model", GIVEN_BY_ENGINE)
    if fields.get("frozen") is not None and fields.get("trained") is not None:
        raise ValueError("model.frozen and model.trained are both set; set what is frozen, or what alone is trained.")
    if (weights := fields.get("weights")) and is_file(weights):
        fields["weights"] = str(Path(weights).expanduser().absolute())  # processes have other working directories
    return ModelSettings(name=name, options=_to_plain(options), **fields)


def _parted(
    section: type, entry: Callable[..., Any], name: str, given: dict[str, Any], where: str, hidden: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is `given`, checked: options of a registered entry, and fields of the section that names it."""
    valid = checked_options(entry, name, given, where, hidden, shared=section)
    fields = {field.name for field in dataclasses.fields(section)}
    options = {key: value for key, value in valid.items() if key not in fields}
    return options, {key: value for key, value in valid.items() if key in fields}


def _training(value: Any, validate: Callable[[Any], TrainingSettings]) -> TrainingSettings:
    given = vars(value) if isinstance(value, TrainingSettings) else value
    if not isinstance(given, dict) or given.get("optimizer", "sgd") == "sgd":
        return validate(value)
    optimizer = build(LocalOptimizer, given["optimizer"], "training.optimizer")
    if type(optimizer) is SGD and optimizer != SGD():
        raise ValueError("training.optimizer is sgd, whose options are training.momentum and training.nesterov.")
    settings = validate({key: one for key, one in given.items() if key != "optimizer"})
    return settings if type(optimizer) is SGD else dataclasses.replace(settings, optimizer=optimizer)


def _evaluation(value: EvaluationSettings) -> EvaluationSettings:
    metrics = tuple(build(Metric, one, "evaluation.metrics") for one in value.metrics)
    return dataclasses.replace(value, metrics=metrics)


def _analyses(value: Any) -> tuple[Analysis, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"analyses is {value!r}; it must be a list of names, or of options with a name.")
    made = tuple(build(Analysis, one, "analyses") for one in value)
    if len({name_of(one) for one in made}) < len(made):
        raise ValueError("analyses names the same one twice, whose files would have the same names.")
    return made


def _objective(value: Any) -> Objective | None:
    return None if value is None else build(Objective, value)


class Experiment(BaseModel):
    """Everything that decides a run's result, and how it is executed.

    Every part can be given as a YAML file gives it (``method="ditto"``, ``training={"lr": 0.05}``) or as an object
    (``method=Ditto(lam=1.0)``). An experiment never changes; `override` and `replace` give new ones.

    Attributes
    ----------
    name : name of the run's folder.
    seed : seed of every random draw: partition, initial weights, cohorts, batches.
    rounds : number of rounds.
    partition : division of the samples over the clients.
    objective : loss and metrics; None: chosen by the type of the data's targets.
    method : the federated method.
    analyses : analyses that observe the training without changing it; a list of names, or of mappings with `name` and
        options.
    output : folder that holds the runs' folders.

    Raises
    ------
    ConfigError : with a sentence and the dotted path for each setting that is unknown, of the wrong type, out of range
        or contrary to another one.

    Examples
    --------
    >>> Experiment(method="ditto", rounds=10).override(["method.lam=1", "training.lr=0.05"]).method.lam
    1.0
    """

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always")

    name: str = "experiment"
    seed: int = 0
    rounds: int = 30
    data: Annotated[DataConfig, PlainValidator(_data)] = DataConfig()
    partition: Annotated[Partition, PlainValidator(partial(build, Partition))] = Dirichlet()
    model: Annotated[ModelSettings, PlainValidator(_model)] = ModelSettings()
    objective: Annotated[Objective | None, PlainValidator(_objective)] = None
    method: Annotated[Method, PlainValidator(partial(build, Method))] = FedAvg()
    cohort: CohortSettings = CohortSettings()
    training: Annotated[TrainingSettings, WrapValidator(_training)] = TrainingSettings()
    evaluation: Annotated[EvaluationSettings, AfterValidator(_evaluation)] = EvaluationSettings()
    analyses: Annotated[tuple[Analysis, ...], PlainValidator(_analyses)] = ()
    engine: EngineSettings = EngineSettings()
    ray: RaySettings = RaySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    failures: FailureSettings = FailureSettings()
    privacy: PrivacySettings = PrivacySettings()
    output: str = "runs"

    @property
    def measures(self) -> Measures:
        """The metrics of its models; those of classification where the data will decide the objective."""
        return Measures(self.objective or Classification(), self.evaluation.metrics)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Experiment:
        """From a YAML file (a Path, or one line that ends in ``.yaml`` or ``.yml``) or from YAML text."""
        return cls(**read(source))

    @classmethod
    def from_record(cls, source: str | Path) -> Experiment:
        """What a run recorded, as `from_yaml`, but without settings that have no effect, which once were accepted."""
        values = read(source)
        drop_idle(values)
        return cls(**values)

    def to_yaml(self) -> str:
        """YAML text of all settings, defaults included, from which `from_yaml` makes an equal experiment."""
        return write(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts and lists of numbers and texts, as in YAML."""
        return {name: _to_plain(value) for name, value in self}

    def override(self, assignments: Iterable[str]) -> Experiment:
        """A changed copy, by ``dotted.key=value`` assignments, whose values are YAML.

        ``method=ditto`` starts from that method's defaults, wherever in the list it is. Settings to which a change
        leaves no effect get their defaults again: ``training.steps=20`` drops ``training.epochs``.
        """
        values = self.to_dict()
        require_effect(assign_all(values, parse_assignments(assignments)))
        return Experiment(**values)

    def replace(self, **changes: Any) -> Experiment:
        """A copy with other fields, e.g. ``replace(seed=1, method=Ditto(lam=1.0))``."""
        return Experiment(**dict(self) | changes)

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, validate: Any) -> Any:
        try:
            with framed():
                experiment = validate(values)
        except ValidationError as error:
            raise ConfigError(one_message(validation_mistakes(error, _unknown), "The experiment")) from None
        given = paths_set_in(values) if isinstance(values, dict) else ()
        if lines := [*experiment._contradictions(), *refused_settings(experiment.to_dict(), given).values()]:
            raise ConfigError(one_message(lines, "The experiment"))
        return experiment

    @field_validator("ray", mode="before")
    @classmethod
    def _without_clients_per_actor(cls, value: Any) -> Any:
        """Runs from before it became ``engine.group_size`` have it, mostly null, in their descriptions."""
        if not isinstance(value, dict) or "clients_per_actor" not in value:
            return value
        if value["clients_per_actor"] is not None:
            raise ValueError("ray.clients_per_actor has become engine.group_size; set that instead.")
        return {name: one for name, one in value.items() if name != "clients_per_actor"}

    @field_validator("*", mode="before")
    @classmethod
    def _without_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        given = vars(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
        if lines := boolean_mistakes(cls.model_fields[name].annotation, given, name):
            raise Mistakes(lines)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        if lines := outside_limits(str(info.field_name), value):
            raise Mistakes(lines)
        return value

    def _contradictions(self) -> list[str]:
        clients = None if is_described(self.data) else getattr(self.partition, "clients", None)
        return [
            *cohort_mistakes(self.cohort, clients),
            *training_mistakes(self.training, self.rounds),
            *ray_mistakes(self.ray),
            *evaluation_mistakes(self.evaluation, self.objective),
            *privacy_mistakes(self.privacy, self.failures),
        ]


def _unknown(path: tuple[int | str, ...]) -> str:
    *sections, key = [str(part) for part in path]
    if sections:
        hint = suggestion(key, sections[0]) or did_you_mean(key, _keys(sections[0]))
        return f"is not a setting of {sections[0]}; {hint}"
    hint = suggestion(key) or did_you_mean(key, Experiment.model_fields)
    return f"is not a setting of an experiment; {hint}"


def _keys(section: str) -> list[str]:
    kind = Experiment.model_fields[section].annotation
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _to_plain(value: Any) -> Any:
    if isinstance(value, DataSource):
        shared = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _to_plain({"name": value.name, **shared.pop("options"), **shared})
    if isinstance(value, ModelSettings):
        given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        options = given.pop("options")
        return _to_plain(given | options)
    if component := describe(value):
        return _to_plain(component)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _to_plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(one) for one in value]
    for kind in (bool, int, float, str):  # also of NumPy's and enum's subclasses, which Ray Tune samples
        if isinstance(value, kind):
            return kind(value)
    return value
