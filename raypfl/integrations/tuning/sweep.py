"""A sweep's description: which settings are searched, how, and for which metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from raypfl.common.errors import ConfigError, did_you_mean, one_message
from raypfl.common.files import make_folder, write
from raypfl.evaluation.masking import mask_of, unmasked_name
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.assignments import assign, parse_assignments
from raypfl.experiment.checks.effects import assign_all, require_effect
from raypfl.experiment.checks.file_kinds import refuse_other_kind
from raypfl.experiment.checks.validation import FilePart, validation_mistakes
from raypfl.experiment.comparison import setting_paths
from raypfl.experiment.identity import ONLY_ROUNDING, WITHOUT_EFFECT, is_in
from raypfl.experiment.recipes import settings_of
from raypfl.experiment.spaces import (
    KINDS,
    Space,
    assignments_of,
    configured,
    draws_of_point,
    spaces_of,
    values_by_setting,
)
from raypfl.experiment.yaml_text import read
from raypfl.experiment.yaml_text import write as as_yaml
from raypfl.runs.records import SWEEP

WITHOUT_TEST_DATA = ("val", "train")
"""Protocols that look at no test data."""

SEARCHERS = {"random": ("seed",), "optuna": ("seed",)}
"""Searchers by name, and the settings that they use."""

SCHEDULERS = {"none": (), "asha": ("grace", "factor"), "median": ("grace",), "pbt": ("interval",), "pb2": ("interval",)}
"""Schedulers by name, and the settings that they use."""


class Target(FilePart):
    """A metric that is optimised.

    Attributes
    ----------
    protocol, model : the rows of an evaluation; without a model, those of personal models where the method makes them.
    value : the aggregate in them: a metric, or ``weighted``, ``worst_decile`` or ``std`` of the primary one; None:
        the primary metric.
    mode : the better direction, ``max`` or ``min``; ``auto``: that of the metric.
    """

    protocol: str = "val"
    model: Literal["personal", "global"] | None = None
    value: str | None = None
    mode: Literal["auto", "max", "min"] = "auto"


class Searcher(FilePart):
    """What proposes configurations.

    Attributes
    ----------
    name : ``random``, which draws and goes through grids; ``optuna``; or a class of Ray Tune's or your own,
        ``module:Class``.
    seed : the seed of ``random`` and ``optuna``.
    options : further options of the class, by their names in Ray Tune.
    """

    name: str = "random"
    seed: int = Field(default=0, ge=0)
    options: dict[str, Any] = Field(default_factory=dict)


class Scheduler(FilePart):
    """What ends or changes trials before their last round.

    Attributes
    ----------
    name : ``none``; ``asha``, which stops trials that are behind; ``median``, which stops those below the median;
        ``pbt`` and ``pb2``, in which bad trials continue from the checkpoints of better ones, with changed settings; or
        a class of Ray Tune's or your own, ``module:Class``.
    grace : the number of rounds that every trial gets.
    factor : ASHA's reduction factor: one in `factor` trials continues at each rung.
    interval : the number of rounds between changes by PBT and PB2; None: ``evaluation.every``.
    options : further options of the class, by their names in Ray Tune, such as PBT's ``quantile_fraction``.
    """

    name: str = "none"
    grace: int = Field(default=1, ge=1)
    factor: float = Field(default=3, gt=1)
    interval: int | None = Field(default=None, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def copies(self) -> bool:
        """Whether trials continue from checkpoints of others."""
        return self.name in ("pbt", "pb2")


class Stop(FilePart):
    """What ends trials and the sweep early.

    Attributes
    ----------
    value : the value of the first metric at which a trial ends.
    seconds : the time after which the sweep ends, with the trials that still run.
    """

    value: float | None = None
    seconds: float | None = Field(default=None, gt=0)


class Sweep(FilePart):
    """A search over settings of an experiment.

    Attributes
    ----------
    name : the name of the sweep's folder.
    source : the origin of the search space, such as a paper's section.
    recipe : the experiment's recipe or file; empty: `experiment` is all of it.
    experiment : changes to the recipe, as in an experiment's file.
    search : the space of each setting (:func:`raypfl.experiment.spaces.spaces_of`).
    metric : the metric that is optimised; a list of several needs ``searcher: optuna`` and no scheduler.
    trials : the number of configurations that are drawn, or of passes through grids, which is 1 by default if there are
        only grids.
    seeds : the number of runs of each configuration, from ``seed`` on; their mean counts. Several need
        ``scheduler: none``.
    concurrent : the largest number of trials at a time; None: as many as there is room for.
    points : configurations to begin with, each with a value for every searched setting; they are among the trials.
    stop : conditions that end trials and the sweep early.
    tensorboard : whether Ray Tune writes TensorBoard's files.
    test_data : whether the metric may look at test data.
    """

    name: str
    source: str = ""
    recipe: str = ""
    experiment: dict[str, Any] = Field(default_factory=dict)
    search: dict[str, Any] = Field(min_length=1)
    metric: tuple[Target, ...] = (Target(),)
    searcher: Searcher = Searcher()
    scheduler: Scheduler = Scheduler()
    trials: int = Field(default=10, ge=1)
    seeds: int = Field(default=1, ge=1)
    concurrent: int | None = Field(default=None, ge=1)
    points: tuple[dict[str, Any], ...] = ()
    stop: Stop = Stop()
    tensorboard: bool = False
    test_data: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """Expand ``searcher: optuna``, ``scheduler: asha`` and a single metric; grids alone have one pass."""
        values = dict(values)
        for key in ("searcher", "scheduler"):
            if isinstance(values.get(key), str):
                values[key] = {"name": values[key]}
        if isinstance(values.get("metric"), Mapping | str):
            values["metric"] = (values["metric"],)

        search = values.get("search")
        points = values.get("points")
        if isinstance(search, Mapping) and all(_is_grid(space) for space in search.values()):
            values.setdefault("trials", 1 + (len(points) if isinstance(points, list | tuple) else 0))
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        mistakes = [*self._mistakes_of_search(), *self._mistakes_of_stops(), *self._without_effect()]
        if mistakes:
            raise ConfigError(one_message(mistakes, f"The sweep {self.name!r}"))
        for point in self.points:
            draws_of_point(self.spaces, point)
        return self

    def _mistakes_of_search(self) -> Iterator[str]:
        kinds = {space.kind for space in self.spaces}
        for key in self.search:
            if any(is_in(key, section) for section in (*WITHOUT_EFFECT, *ONLY_ROUNDING)):
                yield f"search has {key}, which changes no result beyond rounding; search another setting."

        searcher = self.searcher.name
        scheduler = self.scheduler.name
        if len(self.metric) > 1 and (searcher != "optuna" or scheduler != "none"):
            yield "metric has several objectives, which need searcher: optuna and scheduler: none."
        if "grid" in kinds and searcher != "random":
            yield f"search has a grid, which searcher: {searcher} does not go through; use choice, or searcher: random."
        if self.scheduler.copies and searcher != "random":
            yield f"scheduler is {scheduler}, which proposes configurations itself; use searcher: random."
        if scheduler == "pb2" and kinds != {"uniform"}:
            yield "scheduler is pb2, which changes numbers only; let every space of search be a uniform one."
        # Under other schedulers, equal trials may end differently.
        passes = 1 + len(self.points)
        if kinds == {"grid"} and self.trials > passes and scheduler in ("none", "asha", "median"):
            yield (
                f"search has grids only, so trials={self.trials} would repeat equal trials; write trials: {passes}, "
                "and seeds: N for several runs of each."
            )
        if len(self.points) > self.trials:
            yield f"points has {len(self.points)} configurations, but trials is {self.trials}; raise it."

    def _mistakes_of_stops(self) -> Iterator[str]:
        if self.seeds > 1 and self.scheduler.name != "none":
            scheduler = self.scheduler.name
            yield f"scheduler is {scheduler}, which needs each trial to be one run, but seeds is {self.seeds}."
        if self.seeds > 1 and self.stop.value is not None:
            yield f"stop.value ends a trial that is one run, but seeds is {self.seeds}; leave one of them out."

        protocols = [target.protocol for target in self.metric]
        on_test_data = [protocol for protocol in protocols if unmasked_name(protocol) not in WITHOUT_TEST_DATA]
        if on_test_data and not self.test_data:
            protocol = on_test_data[0]
            yield f"metric is on {protocol!r}, which looks at test data; choose protocol: val, or say test_data: true."

    def _without_effect(self) -> Iterator[str]:
        """Yield mistakes: searchers and schedulers that do not exist, and settings that these do not use."""
        for part, settings_of_part in ((self.searcher, SEARCHERS), (self.scheduler, SCHEDULERS)):
            section = type(part).__name__.lower()
            if part.name not in settings_of_part and ":" not in part.name:
                yield f"{section} is {part.name!r}, which does not exist; {did_you_mean(part.name, settings_of_part)}"
                continue

            used = ("name", "options", *settings_of_part.get(part.name, ()))
            for setting, field in type(part).model_fields.items():
                if setting not in used and getattr(part, setting) != field.default:
                    yield f"{section}.{setting} has no effect with {section}: {part.name}; leave it out."

    @cached_property
    def spaces(self) -> list[Space]:
        """The spaces of `search`."""
        return spaces_of(self.search)

    @property
    def _lowest(self) -> dict[str, Any]:
        """The draws of a first configuration."""
        return {space.name: space.values[0] if space.is_range else 0 for space in self.spaces}

    @property
    def folder(self) -> Path:
        """The folder with everything of the sweep, which has its name and is in the experiment's ``output``."""
        return Path(self.base.output).absolute() / self.name

    def configured(self, draws: Mapping[str, Any], seed: int = 0) -> Experiment:
        """Return the experiment of one configuration; `seed` counts the runs of a configuration."""
        experiment = configured(self.base, values_by_setting(self.spaces, draws))
        return experiment.replace(seed=experiment.seed + seed, name=self.name)

    def first(self) -> Experiment:
        """Return the experiment of a first configuration."""
        return self.configured(self._lowest)

    def examples(self) -> Iterator[Experiment]:
        """Yield experiments with all listed values, with the ends and an inner number of each range, and the points.

        A value that a setting refuses raises an error here, before anything runs. Between ends that are whole numbers,
        a range need not have whole numbers only.
        """
        for space in self.spaces:
            choice = {space.owner: space.when} if space.owner else {}
            draws = (*space.values, space.at(0.38)) if space.is_range else range(len(space.values))
            for draw in draws:
                yield self.configured({**self._lowest, **choice, space.name: draw})
        for point in self.points:
            yield self.configured(draws_of_point(self.spaces, point))

    def settings(self, draws: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the settings that a YAML file of the experiment has, with those of a configuration."""
        recipe = settings_of(self.recipe) if self.recipe else {}
        values = {**recipe, "name": self.name}
        if "method" in self.experiment or "method" in self.search:
            values.pop("methods", None)

        changes = setting_paths(self.experiment)
        if draws:
            changes += assignments_of(values_by_setting(self.spaces, draws))
        require_effect(assign_all(values, changes))
        return values

    @cached_property
    def described(self) -> Experiment:
        """The experiment without the search, as the sweep's file describes it."""
        runs = experiments(self.settings())
        if len(runs) != 1:
            raise ConfigError(
                f"The sweep {self.name!r} is over a comparison of {len(runs)} runs; give one method in experiment, "
                "or a choice of methods in search."
            )

        (experiment,) = runs
        return experiment

    @cached_property
    def base(self) -> Experiment:
        """The experiment without the search, evaluated on what the metrics need, with a checkpoint each time."""
        experiment = self.described
        evaluation = experiment.evaluation
        targets = [target.protocol for target in self.metric]
        protocols = dict.fromkeys([*evaluation.protocols, *map(unmasked_name, targets)])
        masks = dict.fromkeys([*evaluation.masks, *filter(None, map(mask_of, targets))])
        every = evaluation.every or experiment.rounds
        if self.scheduler.copies:
            every = self.scheduler.interval or every

        changes = [
            f"evaluation.protocols=[{','.join(protocols)}]",
            f"evaluation.masks=[{','.join(masks)}]",
            f"evaluation.every={every}",
            f"checkpoint.every={every}",
        ]
        # MLflow takes half a second to copy a model, which is in the trial's folder anyway.
        if "models_mb" not in self.settings().get("tracking", {}):
            changes.append("tracking.models_mb=0")
        return experiment.override(changes)

    def write(self, folder: Path) -> None:
        """Write the sweep's description into its folder."""
        make_folder(folder)
        write(folder / SWEEP, as_yaml(self.model_dump(mode="json")))


def load(source: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> Sweep:
    """Return the sweep of a file ending in ``.yaml`` or of a mapping.

    Parameters
    ----------
    assignments : changes ``dotted.key=value`` of the sweep itself (``trials=20``, ``scheduler.grace=4``), of its search
        (``search.training.lr={uniform: [0, 1]}``, ``search.training.lr.uniform=[0, 1]``, or ``null``, which drops it),
        else of its experiment (``rounds=10`` or ``experiment.rounds=10``).

    Raises
    ------
    ConfigError : for every mistake in it, and in the experiment without the search.
    """
    if isinstance(source, Mapping):
        values = dict(source)
    else:
        values = {"name": Path(source).stem, **read(Path(source))}
        refuse_other_kind(values, source, "sweep")
    settings_of_sweep = set(Sweep.model_fields) - {"experiment"}
    changed = []
    # A section without options is refused below, in a sentence.
    if not all(isinstance(values.get(section) or {}, Mapping) for section in ("experiment", "search")):
        assignments = ()
    for path, value in parse_assignments(assignments):
        if path[0] == "search" and len(path) > 1:
            values["search"] = _with_space(values.get("search") or {}, path[1:], value)
        elif path[0] in settings_of_sweep:
            assign(values, path, value)
        else:
            changed.append(".".join(path).removeprefix("experiment."))
            values["experiment"] = {**(values.get("experiment") or {}), changed[-1]: value}

    for key in changed:
        if key in (values.get("search") or {}):
            raise ConfigError(
                f"{key} is set, but the sweep searches it. Leave it out, or drop its space with search.{key}=null."
            )
    try:
        return Sweep(**values)
    except ValidationError as error:
        raise ConfigError(
            one_message(validation_mistakes(error, _unknown), f"The sweep {values.get('name', '')!r}")
        ) from None


def _is_grid(space: Any) -> bool:
    return isinstance(space, Mapping) and "grid" in space


def _with_space(search: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """Return a search with another space for one setting; None drops it."""
    if path[-1] in KINDS:
        value = {path[-1]: value}
        path = path[:-1]
    changed = {**search, ".".join(path): value}
    return {key: space for key, space in changed.items() if space is not None}


def _unknown(path: tuple[int | str, ...]) -> str:
    """Return the text that follows an unknown key in a message."""
    parts: dict[str, type[FilePart]] = {
        "metric": Target,
        "searcher": Searcher,
        "scheduler": Scheduler,
        "stop": Stop,
    }
    if len(path) == 1 and path[0] in Experiment.model_fields:
        return "is a setting of the experiment; write it under experiment."
    part = parts.get(str(path[0]), Sweep) if len(path) > 1 else Sweep
    return f"is not a setting of a sweep; {did_you_mean(str(path[-1]), part.model_fields)}"
