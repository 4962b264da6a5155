"""Settings that are given but have no effect: refused where they were set, dropped where they were inherited.

A setting's declaration names the condition under which it has an effect (:mod:`raypfl.common.conditions`). The setting
is *idle* where that does not hold. A description may have idle settings at their defaults, as a complete one does. It
is refused if

- an idle setting differs from its default, or
- an idle setting is given, and the one that it depends on is not: ``privacy: {clip: 1}`` without ``noise``.

What an assignment makes idle is not the assignment's fault: ``training.steps=20`` drops a recipe's ``training.epochs``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from raypfl.common.conditions import Condition
from raypfl.common.declared import declared
from raypfl.common.errors import ConfigError
from raypfl.common.registry import Registry
from raypfl.data import Partition
from raypfl.experiment.assignments import assign
from raypfl.experiment.sections import COMPONENTS, SECTIONS
from raypfl.experiment.unread_options import unread_options
from raypfl.experiment.validation import one_message
from raypfl.methods import Method

SettingPath = tuple[str, ...]


class IdleSetting(NamedTuple):
    """A setting without effect.

    Attributes
    ----------
    is_default : whether it has its default.
    depends_on : the setting on which that depends; empty: none could give it an effect.
    sentence : says so, and how to mend it.
    """

    path: SettingPath
    is_default: bool
    depends_on: SettingPath
    sentence: str


def refused_settings(values: Mapping[str, Any], given: Collection[SettingPath] = ()) -> dict[SettingPath, str]:
    """A sentence for each idle setting that is refused, by its path.

    Parameters
    ----------
    values : a description in plain values, as YAML has it.
    given : the paths that were set on purpose, see :func:`paths_set_in`.
    """
    sentences = {}
    for setting in _idle(values):
        is_alone = _is_in(setting.path, given) and not _is_in(setting.depends_on, given)
        if is_alone or not setting.is_default:
            sentences[setting.path] = setting.sentence
    return sentences


def paths_set_in(values: Mapping[str, Any]) -> set[SettingPath]:
    """The paths that a description sets in plain values."""
    paths: set[SettingPath] = set()
    for section, inside in values.items():
        if isinstance(inside, Mapping):
            paths |= {(section, str(key)) for key in inside}
        else:
            paths.add((section,))
    return paths


def assign_all(values: dict[str, Any], assignments: Iterable[tuple[list[str], Any]]) -> dict[SettingPath, str]:
    """Assign to a description, in place, and drop the inherited settings to which that leaves no effect.

    Returns
    -------
    A sentence for each assigned setting that has no effect, by its path.
    """
    pairs = list(assignments)
    idle_before = {setting.path for setting in _idle(values)}
    for path, value in pairs:
        assign(values, path, value)
    given = {tuple(path) for path, _ in pairs}
    drop_idle(values, given | idle_before)
    return {path: sentence for path, sentence in refused_settings(values, given).items() if _is_in(path, given)}


def require_effect(sentences: Mapping[SettingPath, str]) -> None:
    """Raise a ConfigError with these sentences, if there are some."""
    if sentences:
        raise ConfigError(one_message(list(sentences.values()), "The experiment"))


def drop_idle(values: dict[str, Any], given: Collection[SettingPath] = ()) -> None:
    """Drop the idle settings of a description, in place, except those that were `given` on purpose."""
    for setting in list(_idle(values)):
        if not _is_in(setting.path, given):
            inside = values
            for key in setting.path[:-1]:
                inside[key] = dict(inside[key])
                inside = inside[key]
            del inside[setting.path[-1]]


def _is_in(path: SettingPath, given: Collection[SettingPath]) -> bool:
    """Whether a path, or a section that it is in, was given."""
    return any(path[: depth + 1] in given for depth in range(len(path)))


def _idle(values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    for section, kind in SECTIONS.items():
        yield from _idle_in((section,), kind, values)
    for path, (registry, default) in COMPONENTS.items():
        entry = _entry(registry, default, _at(values, path))
        if isinstance(entry, type) and dataclasses.is_dataclass(entry):
            yield from _idle_in(path, entry, values)
            if issubclass(entry, Method):
                yield from _unread(path, entry, values)
            if issubclass(entry, Partition):
                yield from _undivided(path, entry, values)


def _idle_in(section: SettingPath, kind: type, values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    """The idle ones of the settings that a class declares."""
    inside = _at(values, section)
    if not isinstance(inside, Mapping):
        return
    for name, conditions in declared(kind, Condition).items():
        if name not in inside:
            continue
        is_default = _plain(inside[name]) == _plain(_default(kind, name))
        for condition in conditions:
            other = _governor(section, condition)
            value = _value_at(values, other, kind)
            if not _holds(condition, value):
                path = (*section, name)
                yield IdleSetting(path, is_default, other, _sentence(path, inside[name], other, value, condition))
                break


def _unread(section: SettingPath, method: Any, values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    inside = _at(values, section)
    if not isinstance(inside, Mapping):
        return
    changed = [name for name in inside if _plain(inside[name]) != _plain(_default(method, name, inside[name]))]
    for name in changed and unread_options(method).intersection(changed):
        said = f"method.{name} is {_said(inside[name])}, which nothing that {method.__name__} does in a run reads"
        yield IdleSetting((*section, name), False, (), f"{said}; read self.{name}, or leave it out.")


def _undivided(section: SettingPath, partition: type[Partition], values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    """All of a partition, if the data are a population."""
    data = _at(values, ("data",))
    population = _entry(*COMPONENTS["data",], data)
    if not getattr(population, "describes_clients", False):
        return
    other = ("data", "name")
    mend = "leave {this} out, since a Population decides who holds what"
    condition = Condition(".".join(other), lambda name: False, mend)
    for name, value in _at(values, section).items():
        default = COMPONENTS[section][1] if name == "name" else _default(partition, name, value)
        path = (*section, name)
        sentence = _sentence(path, value, other, data["name"], condition)
        yield IdleSetting(path, _plain(value) == _plain(default), other, sentence)


def _sentence(path: SettingPath, value: Any, other: SettingPath, others: Any, condition: Condition) -> str:
    name = ".".join(path)
    governor = ".".join(other)
    mend = condition.mend.replace("{other}", governor).replace("{this}", name)
    return f"{name} is {_said(value)}, which has no effect while {governor} is {_said(others)}; {mend}."


def _governor(section: SettingPath, condition: Condition) -> SettingPath:
    if "." in condition.setting:
        return tuple(condition.setting.split("."))
    return (*section, condition.setting)


def _holds(condition: Condition, value: Any) -> bool:
    try:
        return condition.holds(value)
    except (TypeError, ConfigError):  # of a wrong type, or unknown, which is another mistake
        return True


def _value_at(values: Mapping[str, Any], path: SettingPath, kind: type) -> Any:
    """A setting, or its default in the class `kind` of its section."""
    inside = _at(values, path[:-1])
    if isinstance(inside, Mapping) and path[-1] in inside:
        value = inside[path[-1]]
        # `optimizer: {name: sgd}` says what `optimizer: sgd` says.
        return value["name"] if isinstance(value, Mapping) and "name" in value else value
    return _default(SECTIONS.get(path[0], kind), path[-1])


def _at(values: Mapping[str, Any], path: SettingPath) -> Any:
    """What is at a path; an empty mapping where there is nothing, and for a name alone."""
    inside: Any = values
    for key in path:
        if not isinstance(inside, Mapping):
            return {}
        inside = inside.get(key, {})
    return {"name": inside} if isinstance(inside, str) else inside


def _entry(registry: Registry, default: str, inside: Any) -> Any:
    """The component that a section names; None if there is no such one, which is another mistake."""
    name = inside.get("name", default) if isinstance(inside, Mapping) else None
    try:
        return registry.get(name) if isinstance(name, str) else None
    except ConfigError:
        return None


def _default(kind: type, name: str, otherwise: Any = None) -> Any:
    for field in dataclasses.fields(kind):
        if field.name == name:
            return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return otherwise


def _plain(value: Any) -> Any:
    """Lists and tuples compare alike."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _said(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)
