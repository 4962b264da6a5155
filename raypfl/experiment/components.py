"""Registered components (methods, partitions, ...): built from a name and options, and turned back into them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import FunctionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, ValidationError, create_model

from raypfl.analysis import ANALYSES, Analysis
from raypfl.clients.compression import COMPRESSORS, Compressor
from raypfl.common.component import abstract_functions
from raypfl.common.errors import ConfigError, did_you_mean, listed
from raypfl.common.registry import Registry
from raypfl.data import PARTITIONS, Partition
from raypfl.devices import AVAILABILITY_MODELS, HARDWARE, AvailabilityModel, Hardware
from raypfl.experiment.checks.hints import components_with, suggestion
from raypfl.experiment.checks.validation import Mistakes, boolean_mistakes, validation_mistakes
from raypfl.federation.robustness import AGGREGATIONS, ATTACKS, Aggregation, Attack
from raypfl.federation.selection import SELECTIONS, Selection
from raypfl.learning.augmentation import AUGMENTATIONS, Augmentation
from raypfl.learning.objectives import METRICS, OBJECTIVES, Metric, Objective
from raypfl.learning.optimizers import OPTIMIZERS, LocalOptimizer
from raypfl.methods import METHODS, Method

GIVEN_BY_ENGINE = ("input_shape", "num_classes", "num_tokens")
"""Parameters of a model that are not options: the data decide them."""

Option = inspect.Parameter

_REGISTRIES: dict[type, Registry] = {
    Method: METHODS,
    Partition: PARTITIONS,
    Augmentation: AUGMENTATIONS,
    LocalOptimizer: OPTIMIZERS,
    Objective: OBJECTIVES,
    Metric: METRICS,
    Analysis: ANALYSES,
    Hardware: HARDWARE,
    AvailabilityModel: AVAILABILITY_MODELS,
    Selection: SELECTIONS,
    Attack: ATTACKS,
    Aggregation: AGGREGATIONS,
    Compressor: COMPRESSORS,
}
_DEFAULTS = {Method: "fedavg", Partition: "dirichlet", LocalOptimizer: "sgd"}


def build(base: type, value: Any, where: str = "") -> Any:
    """Build an instance of `base` from an instance, a class, a name, or options with a name.

    Parameters
    ----------
    value : options without a name belong to the default component of `base`.
    where : the setting as messages name it; empty: what the registry calls its entries.

    Raises
    ------
    ValueError : with a sentence; `Mistakes` for several.
    """
    if isinstance(value, base):
        return value

    registry = _REGISTRIES[base]
    where = where or registry.kind
    if isinstance(value, type) and issubclass(value, base):
        return instantiate(value, value.__name__, {}, where)

    name, options = name_and_options(value, where, _DEFAULTS.get(base), registry)
    entry = look_up(registry, name)
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise ValueError(f"{where} is {name!r}, which is not a subclass of {base.__name__}.")
    return instantiate(entry, name, options, where)


def describe(value: Any) -> dict[str, Any] | None:
    """Return the name and options from which `build` makes an equal instance; None if `value` is not a component."""
    registry = next((registry for base, registry in _REGISTRIES.items() if isinstance(value, base)), None)
    if registry is None:
        return None
    options = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {"name": registry.name_of(type(value)), **options}


def name_and_options(
    value: Any, where: str, default: str | None, names: Iterable[str] = ()
) -> tuple[str, dict[str, Any]]:
    """Split ``"ditto"``, ``{"name": "ditto", "lam": 0.75}``, or options without a name, into name and options.

    `names` : those that a message lists if there are options, but neither a name nor a `default`, and none has these.
    """
    if isinstance(value, str):
        return value, {}

    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        name = value.get("name", default)
        if isinstance(name, str):
            return name, {key: option for key, option in value.items() if key != "name"}
        if name is None and names:
            fitting = components_with(where, *value) or tuple(names)
            raise ValueError(
                f"{where} has options ({', '.join(value)}), but no name; add one of these, as in {where}={fitting[0]}: "
                f"{listed(fitting)}."
            )

    hint = ""
    named = value.get("name") if isinstance(value, dict) else value
    if not isinstance(named, type(None) | bool | int | float | str | bytes | list | tuple | dict):
        named = named if isinstance(named, type | FunctionType) else type(named)
        hint = f" Name a class or function of your own by its module: '{named.__module__}:{named.__qualname__}'."
    raise ValueError(
        f"{where} is {value!r}; it must be a name, or options as 'key: value' with a name among them.{hint}"
    )


def look_up(registry: Registry, name: str) -> Callable[..., Any]:
    """Return the registered entry; if there is none, raise a ValueError, which pydantic reports with other mistakes."""
    try:
        return registry.get(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def instantiate(entry: Callable[..., Any], name: str, options: dict[str, Any], where: str) -> Any:
    """Check `options` and call `entry` with them; raises as `build` does."""
    options = checked_options(entry, name, options, where)
    missing = abstract_functions(entry)
    if missing:
        raise ValueError(f"{where} is {name!r}, which is not complete: define {missing}.")
    try:
        return entry(**options)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{where} {name!r} refuses its options: {error}") from None


def options_of(entry: Callable[..., Any], hidden: Iterable[str] = ()) -> dict[str, Option]:
    """Return the keyword parameters of a class or function, without the `hidden` ones."""
    by_keyword = (Option.POSITIONAL_OR_KEYWORD, Option.KEYWORD_ONLY)
    parameters = inspect.signature(entry).parameters
    return {name: option for name, option in parameters.items() if option.kind in by_keyword and name not in hidden}


def checked_options(
    entry: Callable[..., Any],
    name: str,
    options: dict[str, Any],
    where: str,
    hidden: Iterable[str] = (),
    shared: type | None = None,
) -> dict[str, Any]:
    """Convert `options` to the types that `entry` declares.

    Parameters
    ----------
    shared : dataclass with the options that all entries have.

    Raises
    ------
    ValueError : `Mistakes`, with a sentence for every option that is unknown, missing or of the wrong type.
    """
    try:
        known, model = _options_model(entry, where, tuple(hidden), shared)
    except (TypeError, ValueError):
        raise ValueError(f"{where} is {name!r}, which is not a class or function with options.") from None

    lines = []
    for key, value in options.items():
        if key in model.model_fields:
            lines += boolean_mistakes(model.model_fields[key].annotation, value, f"{where}.{key}")
    if lines:
        raise Mistakes(lines)

    try:
        valid = model(**options)
    except ValidationError as error:
        lines = validation_mistakes(
            error, lambda path: unknown_option(str(path[-1]), name, known, entry, where=where), (where,)
        )
        raise Mistakes(lines) from None
    return {key: getattr(valid, key) for key in options}


@lru_cache(maxsize=512)  # a study builds some hundreds of experiments
def _options_model(
    entry: Callable[..., Any], where: str, hidden: tuple[str, ...], shared: type | None
) -> tuple[dict[str, Option], type[BaseModel]]:
    """Return the options of an entry, and a pydantic model that checks and converts them."""
    known = options_of(entry, hidden)
    hints = _hints(entry)
    if shared:
        known = {**known, **options_of(shared, ("name", "options"))}
        hints = {**hints, **_hints(shared)}

    fields: dict[str, Any] = {}
    for key, option in known.items():
        default = ... if option.default is Option.empty else option.default
        fields[key] = (_with_builders(hints.get(key, Any), f"{where}.{key}"), default)

    takes_any = any(option.kind is Option.VAR_KEYWORD for option in inspect.signature(entry).parameters.values())
    config = ConfigDict(extra="allow" if takes_any else "forbid", arbitrary_types_allowed=True, protected_namespaces=())
    return known, create_model("Options", __config__=config, **fields)


def unknown_option(
    option: str, name: str, known: Iterable[str], *entries: Callable[..., Any], where: str = "method"
) -> str:
    """Return the text that follows an unknown option in a message.

    Parameters
    ----------
    name : how the message calls the `entries`, none of which has the option.
    known : the options that they have.
    """
    for entry in entries:
        value = getattr(entry, option, None)
        if isinstance(value, (bool, int, float, str)):
            declaration = f"{option}: {type(value).__name__} = {value!r}"
            problem = f"{entry.__name__} has {option}, but without a type"
            return f"is not an option yet: {problem}; write `{declaration}` in the class."

    hint = suggestion(option, where)
    if not hint and known:
        hint = did_you_mean(option, known, f"{where}.")
    elif known and not hint.startswith("did you mean"):
        # Other components have it, but a user may need to know what this one has.
        hint += f" Those of {name}: {listed(sorted(known))}."
    if hint:
        return f"is not an option of {name}; {hint}"
    return f"is not an option of {name}, which has none."


def _with_builders(hint: Any, where: str) -> Any:
    """Return the type of an option, extended to accept names and options in place of components."""
    if hint in _REGISTRIES:
        return Annotated[hint, PlainValidator(partial(build, hint, where=where))]
    if get_origin(hint) is tuple and get_args(hint)[0] in _REGISTRIES:
        return tuple[_with_builders(get_args(hint)[0], where), ...]  # type: ignore[misc]
    if LocalOptimizer in get_args(hint):
        return Annotated[hint, BeforeValidator(partial(_optimizer, where=where))]
    return hint


def _optimizer(value: Any, where: str) -> Any:
    return build(LocalOptimizer, value, where) if isinstance(value, str | dict) else value


def _hints(entry: Callable[..., Any]) -> dict[str, Any]:
    annotated = entry
    if isinstance(entry, type) and not dataclasses.is_dataclass(entry):
        annotated = inspect.getattr_static(entry, "__init__")
    try:
        return get_type_hints(annotated)
    except NameError:
        # A name is imported for the type checker only: the options are not checked.
        return {}
