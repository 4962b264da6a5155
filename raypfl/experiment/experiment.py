"""The description of an experiment: typed, checked before anything runs, and read from and written to YAML."""

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
from raypfl.analysis.base import analysis_name
from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.user_code import explain_user_errors
from raypfl.data import Dirichlet, Partition
from raypfl.data.datasets import DATASETS, DataConfig, DataSource
from raypfl.data.datasets.population import is_described
from raypfl.devices import AvailabilityModel, Hardware
from raypfl.devices.settings import DeviceSettings
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.checks.effects import assign_all, drop_idle, paths_set_in, refused_settings, require_effect
from raypfl.experiment.checks.hints import suggestion
from raypfl.experiment.checks.limits import (
    asynchronous_mistakes,
    cohort_mistakes,
    device_mistakes,
    evaluation_mistakes,
    outside_limits,
    privacy_mistakes,
    ray_mistakes,
    selection_mistakes,
    training_mistakes,
)
from raypfl.experiment.checks.moved import NOW_OF_DEVICES, move_to_devices, moved_to_devices
from raypfl.experiment.checks.validation import Mistakes, boolean_mistakes, one_message, validation_mistakes
from raypfl.experiment.components import (
    GIVEN_BY_ENGINE,
    build,
    checked_options,
    describe,
    look_up,
    name_and_options,
    options_of,
)
from raypfl.experiment.settings import CheckpointSettings, ModelSettings, RaySettings, TrackingSettings
from raypfl.experiment.yaml_text import read, write
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.selection import Selection
from raypfl.federation.settings import CohortSettings, EngineSettings, FailureSettings
from raypfl.learning.objectives import Classification, Metric, Objective
from raypfl.learning.optimizers import SGD, LocalOptimizer
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import FedAvg, Method
from raypfl.models import MODELS
from raypfl.models.weights import is_file

_PLAIN_TYPES = (bool, int, float, str)


def _data(value: Any) -> DataConfig:
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
        # A reader's first parameter is the description itself.
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


def _model(value: Any) -> ModelSettings:
    plain = _to_plain(value) if isinstance(value, ModelSettings) else value
    name, settings = name_and_options(plain, "model", ModelSettings.name)
    entry = look_up(MODELS, name)
    options, fields = _options_and_fields(ModelSettings, entry, name, settings, "model", GIVEN_BY_ENGINE)

    if fields.get("frozen") is not None and fields.get("trained") is not None:
        raise ValueError("model.frozen and model.trained are both set; set what is frozen, or what alone is trained.")
    weights = fields.get("weights")
    if weights and is_file(weights):
        # Client actors have other working directories.
        fields["weights"] = str(Path(weights).expanduser().absolute())
    return ModelSettings(name=name, options=_to_plain(options), **fields)


def _options_and_fields(
    section: type, entry: Callable[..., Any], name: str, settings: dict[str, Any], where: str, hidden: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check settings, and part the options of a registered entry from the fields of the section that names it."""
    valid = checked_options(entry, name, settings, where, hidden, shared=section)
    field_names = {field.name for field in dataclasses.fields(section)}
    options = {key: value for key, value in valid.items() if key not in field_names}
    fields = {key: value for key, value in valid.items() if key in field_names}
    return options, fields


def _training(value: Any, validate: Callable[[Any], TrainingSettings]) -> TrainingSettings:
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


def _evaluation(value: EvaluationSettings) -> EvaluationSettings:
    metrics = tuple(build(Metric, metric, "evaluation.metrics") for metric in value.metrics)
    return dataclasses.replace(value, metrics=metrics)


def _analyses(value: Any) -> tuple[Analysis, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"analyses is {value!r}; it must be a list of names, or of mappings with 'name' and options.")
    analyses = tuple(build(Analysis, analysis, "analyses") for analysis in value)
    names = {analysis_name(analysis) for analysis in analyses}
    if len(names) < len(analyses):
        raise ValueError("analyses names the same analysis twice, whose files would have the same names.")
    return analyses


def _objective(value: Any) -> Objective | None:
    return None if value is None else build(Objective, value)


_COHORT = partial(_with_components, section="cohort", bases={"selection": Selection})
_DEVICES = partial(_with_components, section="devices", bases={"hardware": Hardware, "availability": AvailabilityModel})


class Experiment(BaseModel):
    """Everything that decides a run's result, and how it is executed.

    Every part can be given as in YAML (``method="ditto"``, ``training={"lr": 0.05}``) or as an object
    (``method=Ditto(lam=1.0)``). An experiment never changes; `override` and `replace` return new ones.

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
    ConfigError : with a sentence and the dotted path for each setting that is unknown, has the wrong type, is out of
        range or contradicts another one.

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
    cohort: Annotated[CohortSettings, WrapValidator(_COHORT)] = CohortSettings()
    devices: Annotated[DeviceSettings, WrapValidator(_DEVICES)] = DeviceSettings()
    asynchronous: AsynchronousSettings = AsynchronousSettings()
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
        """The metrics of the models; those of classification if the data decide on the objective."""
        return Measures(self.objective or Classification(), self.evaluation.metrics)

    @classmethod
    def from_yaml(cls, source: str | Path) -> Experiment:
        """Read an experiment from a YAML file (a Path, or a line ending in ``.yaml`` or ``.yml``) or from YAML text."""
        return cls(**read(source))

    @classmethod
    def from_record(cls, source: str | Path) -> Experiment:
        """Read the experiment that a run recorded, without settings that have no effect: old versions accepted them."""
        values = read(source, is_record=True)
        move_to_devices(values)
        drop_idle(values)
        return cls(**values)

    def to_yaml(self) -> str:
        """Write all settings, defaults included, as YAML text; `from_yaml` reads an equal experiment from it."""
        return write(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of numbers and texts, as in YAML."""
        return {name: _to_plain(value) for name, value in self}

    def override(self, assignments: Iterable[str]) -> Experiment:
        """Return a copy changed by ``dotted.key=value`` assignments, whose values are YAML.

        ``method=ditto`` starts from that method's defaults, wherever it stands in the list. A setting that loses its
        effect by a change returns to its default: ``training.steps=20`` drops ``training.epochs``.
        """
        values = self.to_dict()
        require_effect(assign_all(values, parse_assignments(assignments)))
        return Experiment(**values)

    def replace(self, **changes: Any) -> Experiment:
        """Return a copy with other fields, as in ``replace(seed=1, method=Ditto(lam=1.0))``."""
        return Experiment(**dict(self) | changes)

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, validate: Any) -> Any:
        try:
            with explain_user_errors():
                experiment = validate(values)
        except ValidationError as error:
            raise ConfigError(one_message(validation_mistakes(error, _unknown), "The experiment")) from None

        set_paths = paths_set_in(values) if isinstance(values, dict) else ()
        refused = refused_settings(experiment.to_dict(), set_paths)
        lines = [*experiment._contradictions(), *refused.values()]
        if lines:
            raise ConfigError(one_message(lines, "The experiment"))
        return experiment

    @field_validator("ray", mode="before")
    @classmethod
    def _without_clients_per_actor(cls, value: Any) -> Any:
        """Drop a setting that old runs record, mostly as null: it became ``engine.group_size``."""
        if not isinstance(value, dict) or "clients_per_actor" not in value:
            return value
        if value["clients_per_actor"] is not None:
            raise ValueError("ray.clients_per_actor has become engine.group_size; set that instead.")
        return {name: setting for name, setting in value.items() if name != "clients_per_actor"}

    @field_validator("cohort", mode="before")
    @classmethod
    def _without_devices(cls, value: Any) -> Any:
        """Refuse settings that are now elsewhere; old runs record them, mostly at their defaults."""
        if not isinstance(value, dict):
            return value
        lines = moved_to_devices(value)
        if lines:
            raise Mistakes(lines)
        return {name: setting for name, setting in value.items() if name not in NOW_OF_DEVICES}

    @field_validator("*", mode="before")
    @classmethod
    def _without_booleans_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
        plain = vars(value) if is_instance else value
        lines = boolean_mistakes(cls.model_fields[name].annotation, plain, name)
        if lines:
            raise Mistakes(lines)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _within_limits(cls, value: Any, info: ValidationInfo) -> Any:
        lines = outside_limits(str(info.field_name), value)
        if lines:
            raise Mistakes(lines)
        return value

    def _contradictions(self) -> list[str]:
        clients = None if is_described(self.data) else getattr(self.partition, "clients", None)
        return [
            *cohort_mistakes(self.cohort, clients),
            *selection_mistakes(self.cohort, self.devices, self.privacy),
            *device_mistakes(self.devices),
            *asynchronous_mistakes(self.asynchronous, self.devices, self.privacy, bool(self.analyses)),
            *training_mistakes(self.training, self.rounds, self.ray),
            *ray_mistakes(self.ray, self.engine),
            *evaluation_mistakes(self.evaluation, self.objective),
            *privacy_mistakes(self.privacy, self.failures),
        ]


def _unknown(path: tuple[int | str, ...]) -> str:
    """Return the text that follows an unknown key in a message."""
    *sections, key = [str(part) for part in path]
    if sections:
        prefix = f"{sections[0]}." if len(sections) == 1 else ""
        hint = suggestion(key, sections[0]) or did_you_mean(key, _keys(sections[0]), prefix)
        return f"is not a setting of {sections[0]}; {hint}"
    if key in ("methods", "seeds"):
        return (
            "is of a comparison, in a file or a command. In Python, run an experiment for each, such as "
            "experiment.override(['method=ditto', 'seed=1']), and give the results to raypfl.compare."
        )
    hint = suggestion(key) or did_you_mean(key, Experiment.model_fields)
    return f"is not a setting of an experiment; {hint}"


def _keys(section: str) -> list[str]:
    section_class = Experiment.model_fields[section].annotation
    if not dataclasses.is_dataclass(section_class):
        return []
    return [field.name for field in dataclasses.fields(section_class)]


def _to_plain(value: Any) -> Any:
    """Turn settings and components into nested dicts and lists of numbers and texts."""
    if value is None or type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, DataSource):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        options = fields.pop("options")
        return _to_plain({"name": value.name, **options, **fields})
    if isinstance(value, ModelSettings):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        options = fields.pop("options")
        return _to_plain(fields | options)

    component = describe(value)
    if component:
        return _to_plain(component)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(part) for part in value]

    # Also for the subclasses of NumPy and enum, which Ray Tune samples.
    for plain_type in _PLAIN_TYPES:
        if isinstance(value, plain_type):
            return plain_type(value)
    return value
