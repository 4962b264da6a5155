"""The description of an experiment: typed, checked before anything runs, and read from and written to YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from torch import Tensor

from raypfl.analysis import Analysis
from raypfl.clients.compression import Compressor
from raypfl.common.errors import ConfigError, MethodError, did_you_mean, one_message
from raypfl.common.user_code import explain_user_errors, where_defined
from raypfl.data import ClientData, Dirichlet, Partition, load_federated
from raypfl.data.datasets import DataConfig
from raypfl.data.datasets.population import is_described
from raypfl.devices.settings import DeviceSettings
from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.settings import EvaluationSettings
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.checks import effects
from raypfl.experiment.checks.hints import nearest, suggestion
from raypfl.experiment.checks.limits import (
    architecture_mistakes,
    asynchronous_mistakes,
    cohort_mistakes,
    compression_mistakes,
    device_mistakes,
    evaluation_mistakes,
    outside_limits,
    privacy_mistakes,
    ray_mistakes,
    robustness_mistakes,
    selection_mistakes,
    training_mistakes,
)
from raypfl.experiment.checks.validation import FilePart, Mistakes, validation_mistakes
from raypfl.experiment.components import build
from raypfl.experiment.parts import (
    analyses_of,
    as_assignments,
    cohort_settings,
    data_config,
    device_settings,
    evaluation_settings,
    model_settings,
    optional,
    to_plain,
    training_settings,
)
from raypfl.experiment.settings import CheckpointSettings, ModelSettings, RaySettings, TrackingSettings
from raypfl.experiment.yaml_text import read, write
from raypfl.federation.asynchronous.settings import AsynchronousSettings
from raypfl.federation.robustness import Aggregation, Attack
from raypfl.federation.settings import CohortSettings, EngineSettings, FailureSettings
from raypfl.learning.objectives import Classification, Metric, Objective
from raypfl.learning.privacy import PrivacySettings
from raypfl.learning.settings import TrainingSettings
from raypfl.methods import FedAvg, Method
from raypfl.storage.tree import flatten


class Experiment(FilePart):
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
    attack : what malicious clients do; None: all clients are honest. Evaluations are of the honest clients.
    aggregation : a robust rule in place of the mean of clients' messages; None: the mean.
    compression : how clients compress the updates that they send; None: not at all.
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

    model_config = ConfigDict(revalidate_instances="always")

    name: str = "experiment"
    seed: int = 0
    rounds: int = 30
    data: Annotated[DataConfig, PlainValidator(data_config)] = DataConfig()
    partition: Annotated[Partition, PlainValidator(partial(build, Partition))] = Dirichlet()
    model: Annotated[ModelSettings, PlainValidator(model_settings)] = ModelSettings()
    objective: Annotated[Objective | None, PlainValidator(partial(optional, Objective))] = None
    method: Annotated[Method, PlainValidator(partial(build, Method))] = FedAvg()
    cohort: Annotated[CohortSettings, WrapValidator(cohort_settings)] = CohortSettings()
    devices: Annotated[DeviceSettings, WrapValidator(device_settings)] = DeviceSettings()
    asynchronous: AsynchronousSettings = AsynchronousSettings()
    training: Annotated[TrainingSettings, WrapValidator(training_settings)] = TrainingSettings()
    evaluation: Annotated[EvaluationSettings, AfterValidator(evaluation_settings)] = EvaluationSettings()
    attack: Annotated[Attack | None, PlainValidator(partial(optional, Attack))] = None
    aggregation: Annotated[Aggregation | None, PlainValidator(partial(optional, Aggregation))] = None
    compression: Annotated[Compressor | None, PlainValidator(partial(optional, Compressor))] = None
    analyses: Annotated[tuple[Analysis, ...], PlainValidator(analyses_of)] = ()
    engine: EngineSettings = EngineSettings()
    ray: RaySettings = RaySettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    failures: FailureSettings = FailureSettings()
    privacy: PrivacySettings = PrivacySettings()
    output: str = "runs"

    @property
    def extra_metrics(self) -> tuple[Metric, ...]:
        """The metrics beside those of the objective: the user's, and those of an attack."""
        return (*self.evaluation.metrics, *(() if self.attack is None else self.attack.metrics))

    @property
    def measures(self) -> Measures:
        """The metrics of the models; those of classification if the data decide on the objective."""
        return Measures(self.objective or Classification(), self.extra_metrics)

    def load_data(self) -> ClientData:
        """Open the data, divided over the clients by the partition, as :func:`raypfl.data.load_federated` does."""
        return load_federated(self.data, self.partition, seed=self.seed)

    def global_model(self, server: dict[str, Any]) -> Tensor | None:
        """Return the method's global model ``[P+B]`` at a state of the server, or None without one.

        Where clients have different architectures, what the server averages is a part of each of them, and no model.

        Raises
        ------
        MethodError : if the method changes the server's state in place, with which rounds would go on.
        """
        if self.model.is_heterogeneous:
            return None
        _, tensors = flatten(server)
        versions = {name: tensor._version for name, tensor in tensors.items()}
        model = self.method.global_model(server)
        for name, tensor in tensors.items():
            if tensor._version != versions[name]:
                raise MethodError(
                    f"{where_defined(self.method.global_model)} changed the server's {name!r} in place, but an "
                    "evaluation changes nothing; work on a copy, such as its clone()."
                )
        return model

    @classmethod
    def from_yaml(cls, source: str | Path) -> Experiment:
        """Read an experiment from a YAML file (a Path, or a line ending in ``.yaml`` or ``.yml``) or from YAML text."""
        return cls(**read(source))

    @classmethod
    def from_record(cls, source: str | Path) -> Experiment:
        """Read the experiment that a run recorded, faster than `from_yaml`."""
        values = read(source, is_record=True)
        effects.drop_once_accepted(values)
        return cls(**values)

    def to_yaml(self) -> str:
        """Write all settings, defaults included, as YAML text; `from_yaml` reads an equal experiment from it."""
        return write(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts and lists of numbers and texts, as in YAML."""
        return {name: to_plain(value) for name, value in self}

    def override(self, assignments: Iterable[str] = (), **settings: Any) -> Experiment:
        """Return a copy changed by ``dotted.key=value`` assignments, whose values are YAML.

        Settings without a section can be given by keyword: ``override(rounds=5)`` is ``override(["rounds=5"])``.
        ``method=ditto`` starts from that method's defaults, wherever it stands in the list. A setting that loses its
        effect by a change returns to its default: ``training.steps=20`` drops ``training.epochs``.
        """
        values = self.to_dict()
        pairs = parse_assignments(assignments) + parse_assignments(as_assignments(settings))
        effects.require_effect(effects.assign_all(values, pairs))
        return Experiment(**values)

    def replace(self, **changes: Any) -> Experiment:
        """Return a copy with other fields, as in ``replace(seed=1, method=Ditto(lam=1.0))``."""
        return Experiment(**dict(self) | changes)

    @model_validator(mode="wrap")
    @classmethod
    def _in_sentences(cls, values: Any, validate: Any) -> Any:
        values = _with_paths_as_text(values)
        try:
            with explain_user_errors():
                experiment = validate(values)
        except ValidationError as error:
            raise ConfigError(one_message(validation_mistakes(error, _unknown), "The experiment")) from None

        set_paths = effects.paths_set_in(values) if isinstance(values, dict) else ()
        refused = effects.refused_settings(experiment.to_dict(), set_paths)
        lines = [*experiment._contradictions(), *refused.values()]
        if lines:
            raise ConfigError(one_message(lines, "The experiment"))
        return experiment

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
            *architecture_mistakes(self.model, bool(self.analyses)),
            *training_mistakes(self.training, self.rounds, self.ray),
            *ray_mistakes(self.ray),
            *evaluation_mistakes(self.evaluation, self.objective),
            *privacy_mistakes(self.privacy, self.failures),
            *robustness_mistakes(self.attack, self.aggregation, self.asynchronous, self.privacy),
            *compression_mistakes(self.compression, self.privacy),
        ]


def _with_paths_as_text(value: Any) -> Any:
    """Return settings with text, as in a file, in place of each path."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, dict):
        return {key: _with_paths_as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_paths_as_text(item) for item in value]
    return value


def _unknown(path: tuple[int | str, ...]) -> str:
    """Return the text that follows an unknown key in a message."""
    *sections, key = [str(part) for part in path]
    if sections:
        prefix = f"{sections[0]}." if len(sections) == 1 else ""
        hint = suggestion(key, sections[0]) or did_you_mean(key, _keys(sections[0]), prefix)
        return f"is not a setting of {sections[0]}; {hint}"
    if key in ("methods", "seeds"):
        return (
            "belongs to a comparison, in a file or a command. In Python, run an experiment for each, such as "
            "experiment.override(['method=ditto', 'seed=1']), and give the results to raypfl.compare."
        )
    section, dot, name = key.partition(".")
    if dot:
        # Commands write it in one word.
        return f"is not a setting of an experiment; write it in its section, as in {section}={{'{name}': ...}}."
    fields = Experiment.model_fields
    hint = suggestion(key) or nearest(key, fields) or did_you_mean(key, fields)
    return f"is not a setting of an experiment; {hint}"


def _keys(section: str) -> list[str]:
    section_class = Experiment.model_fields[section].annotation
    if not dataclasses.is_dataclass(section_class):
        return []
    return [field.name for field in dataclasses.fields(section_class)]
