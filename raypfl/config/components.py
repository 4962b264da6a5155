"""From a name and options to a method or a partition, and back; and the options of anything that is registered."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from raypfl.common.errors import ConfigError, did_you_mean
from raypfl.common.registry import Registry
from raypfl.config.sentences import sentences
from raypfl.optimizers import OPTIMIZERS, LocalOptimizer

Option = inspect.Parameter


def options_of(entry: Callable[..., Any], hidden: tuple[str, ...] = ()) -> dict[str, Option]:
    """Keyword parameters of a registered class or function, without the `hidden` ones, which the engine gives."""
    named = (Option.POSITIONAL_OR_KEYWORD, Option.KEYWORD_ONLY)
    parameters = inspect.signature(entry).parameters
    return {name: option for name, option in parameters.items() if option.kind in named and name not in hidden}


def checked_options(
    entry: Callable[..., Any], called: str, options: dict[str, Any], where: str, hidden: tuple[str, ...] = ()
) -> dict[str, Any]:
    """`options`, converted to the types that `entry` declares.

    Raises
    ------
    ValueError : with a sentence a line for every option that is unknown, missing or of the wrong type.
    """
    known = options_of(entry, hidden)
    options = _with_optimizers(entry, options, where)
    try:
        valid = _options_model(entry, known)(**options)
    except ValidationError as error:
        lines = sentences(error, lambda path: unknown(str(path[-1]), called, known, entry), (where,))
        raise ValueError("\n".join(lines)) from None
    return {name: getattr(valid, name) for name in options}


def named(value: Any, where: str, default: str) -> tuple[str, dict[str, Any]]:
    """Name and options in ``"ditto"``, in ``{"name": "ditto", "lam": 0.75}``, or in options without a name."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and isinstance(value.get("name", default), str):
        return value.get("name", default), {key: option for key, option in value.items() if key != "name"}
    raise ValueError(f"{where} is {value!r}; it must be a name, or options as 'key: value' with a name among them.")


def build(registry: Registry, base: type, default: str, value: Any, where: str = "") -> Any:
    """An instance of `base` from a name, from options with a name or for the `default`, or given as it is.

    Parameters
    ----------
    where : the setting, for messages; empty: the registry's kind.

    Raises
    ------
    ValueError : with a sentence a line for everything that is wrong with it.
    """
    if isinstance(value, base):
        return value
    where = where or registry.kind
    name, options = named(value, where, default)
    entry = found(registry, name)
    if not (isinstance(entry, type) and issubclass(entry, base)):
        raise ValueError(f"{where} is {name!r}, which is not a subclass of {base.__name__}.")
    return made(entry, name, options, where)


def made(entry: Callable[..., Any], called: str, options: dict[str, Any], where: str) -> Any:
    """What `entry` gives for `options`, once they are checked; raises as `build` does."""
    options = checked_options(entry, called, options, where)
    try:
        return entry(**options)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{where} {called!r} refuses its options: {error}") from None


def found(registry: Registry, name: str) -> Callable[..., Any]:
    """The registered entry; if there is none, a ValueError, so that it is told together with all else that is wrong."""
    try:
        return registry.get(name)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def described(registry: Registry, instance: Any) -> dict[str, Any]:
    """Name and options from which `build` makes an equal instance."""
    options = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance) if field.init}
    return {"name": registry.name_of(type(instance)), **options}


def unknown(option: str, called: str, known: Iterable[str], *entries: Callable[..., Any]) -> str:
    """What to say after the name of an option that none of `entries` has, of all that are `known`."""
    for entry in entries:
        value = getattr(entry, option, None)
        if isinstance(value, (bool, int, float, str)):
            kind = f"{type(value).__name__} = {value!r}"
            has = f"{entry.__name__} has {option}, but without a type"
            return f"is no option yet: {has}; write `{option}: {kind}` in the class."
    return f"is not an option of {called}" + (f"; {did_you_mean(option, known)}" if known else ", which has none.")


def optimizer(value: Any, where: str) -> LocalOptimizer:
    """A local optimizer, as `build` makes it."""
    return build(OPTIMIZERS, LocalOptimizer, "sgd", value, where)


def _with_optimizers(entry: Callable[..., Any], options: dict[str, Any], where: str) -> dict[str, Any]:
    """`options`, in which those that are declared as local optimizers are made of names and options."""
    declared = {name for name, hint in _hints(entry).items() if LocalOptimizer in (hint, *get_args(hint))}
    given = {name: value for name, value in options.items() if name in declared and isinstance(value, str | dict)}
    return {**options, **{name: optimizer(value, f"{where}.{name}") for name, value in given.items()}}


def _options_model(entry: Callable[..., Any], known: dict[str, Option]) -> type[BaseModel]:
    hints = _hints(entry)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if option.default is Option.empty else option.default)
        for name, option in known.items()
    }
    takes_any = any(option.kind is Option.VAR_KEYWORD for option in inspect.signature(entry).parameters.values())
    config = ConfigDict(extra="allow" if takes_any else "forbid", arbitrary_types_allowed=True, protected_namespaces=())
    return create_model("Options", __config__=config, **fields)


def _hints(entry: Callable[..., Any]) -> dict[str, Any]:
    annotated = entry
    if isinstance(entry, type) and not dataclasses.is_dataclass(entry):
        annotated = inspect.getattr_static(entry, "__init__")
    try:
        return get_type_hints(annotated)
    except NameError:  # a name imported for the type checker alone: the option goes in unchecked
        return {}
