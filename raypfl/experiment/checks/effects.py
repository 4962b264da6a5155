"""Settings without effect: refused where they were set, dropped where they were inherited.

A setting's declaration names the condition under which it has an effect (:mod:`raypfl.common.conditions`). The setting
is *idle* if the condition does not hold. Idle settings at their defaults are fine, since a complete description has all
settings. A description is refused if

- an idle setting differs from its default, or
- an idle setting is set, but the setting that it depends on is not: ``privacy: {clip: 1}`` without ``noise``.

A setting that becomes idle by an assignment is dropped, not refused: ``training.steps=20`` drops a recipe's
``training.epochs``, and ``partition.name=iid`` the options of the partition that it replaces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from raypfl.common.annotations import declared
from raypfl.common.conditions import Condition, as_yaml
from raypfl.common.errors import ConfigError, one_message
from raypfl.common.registry import Registry
from raypfl.data import Partition
from raypfl.experiment.assignments import assign
from raypfl.experiment.checks.unread_options import unread_options
from raypfl.experiment.components import options_of
from raypfl.experiment.sections import COMPONENTS, SECTIONS
from raypfl.methods import Method

SettingPath = tuple[str, ...]


class IdleSetting(NamedTuple):
    """A setting without effect.

    Attributes
    ----------
    is_default : whether it has its default.
    depends_on : the setting that decides whether it has an effect; empty: no setting could give it one.
    explain : a function that returns what is wrong, and how to mend it.
    """

    path: SettingPath
    is_default: bool
    depends_on: SettingPath
    explain: Callable[[], str]


def refused_settings(values: Mapping[str, Any], set_paths: Collection[SettingPath] = ()) -> dict[SettingPath, str]:
    """Return a message for each idle setting that is refused, by its path.

    Parameters
    ----------
    values : a description in plain values, as in YAML.
    set_paths : the paths that were set on purpose, see :func:`paths_set_in`.
    """
    # A section that is given as an object has all of its settings, most of them at their defaults.
    set_by_name = {path for path in set_paths if len(path) > 1}
    messages = {}
    for setting in _idle(values):
        is_set_alone = is_in_any(setting.path, set_by_name) and not is_in_any(setting.depends_on, set_paths)
        if is_set_alone or not setting.is_default:
            messages[setting.path] = setting.explain()
    return messages


def paths_set_in(values: Mapping[str, Any]) -> set[SettingPath]:
    """Return the paths that a description sets, down to the settings of a section."""
    paths: set[SettingPath] = set()
    for section, value in values.items():
        if isinstance(value, Mapping):
            paths |= {(section, str(key)) for key in value}
        else:
            paths.add((section,))
    return paths


def assign_all(values: dict[str, Any], assignments: Iterable[tuple[list[str], Any]]) -> dict[SettingPath, str]:
    """Change a description in place, and drop inherited settings that have no effect any more.

    Returns
    -------
    A message for each assigned setting without effect, by its path.
    """
    pairs = list(assignments)
    idle_before = {setting.path for setting in _idle(values)}
    options_before = {path: _component_options(path, values) for path in COMPONENTS}
    for path, value in pairs:
        assign(values, path, value)

    assigned = {tuple(path) for path, _ in pairs}
    for component, options in options_before.items():
        if (*component, "name") in assigned:
            _drop_options(component, options - _component_options(component, values), values, assigned)
    dropped = drop_idle(values, assigned | idle_before)
    # A setting is declared after the one that it depends on.
    for setting in list(_idle(values)):
        # It was idle before, too: what it depends on was at its default, and is now gone, alone or with its section.
        is_gone = setting.depends_on in dropped or _was_left_out(setting.depends_on, values, assigned)
        if setting.is_default and is_gone and not is_in_any(setting.path, assigned):
            _delete(values, setting.path)
            dropped.add(setting.path)
    refused = refused_settings(values, assigned)
    return {path: message for path, message in refused.items() if is_in_any(path, assigned)}


def _was_left_out(path: SettingPath, values: Mapping[str, Any], assigned: Collection[SettingPath]) -> bool:
    """Return whether a section was assigned as a whole, as in ``devices={dropout: 0.2}``, without this setting."""
    return path not in assigned and is_in_any(path, assigned) and path[-1] not in _at(values, path[:-1])


def _component_options(path: SettingPath, values: Mapping[str, Any]) -> set[str]:
    """Return the options that the component at a path could have; none if there is no such component."""
    entry = _entry(*COMPONENTS[path], _at(values, path))
    if entry is None:
        return set()
    try:
        options = set(options_of(entry))
    except (TypeError, ValueError):
        return set()  # not a class or function; reported elsewhere
    if len(path) == 1 and path[0] in SECTIONS:
        options |= {field.name for field in dataclasses.fields(SECTIONS[path[0]])}
    return options


def _drop_options(
    path: SettingPath, names: Collection[str], values: dict[str, Any], assigned: Collection[SettingPath]
) -> None:
    """Drop options of a component that was replaced, in place, except those that are assigned."""
    section = _at(values, path)
    for name in names:
        if name in section and (*path, name) not in assigned:
            del section[name]


def require_effect(messages: Mapping[SettingPath, str]) -> None:
    """Raise a ConfigError with these messages, if there are any."""
    if messages:
        raise ConfigError(one_message(list(messages.values()), "The experiment"))


def drop_idle(values: dict[str, Any], set_paths: Collection[SettingPath] = ()) -> set[SettingPath]:
    """Drop the idle settings of a description, in place, except those that were set on purpose.

    Returns
    -------
    The paths of those that it dropped.
    """
    dropped = {setting.path for setting in _idle(values) if not is_in_any(setting.path, set_paths)}
    for path in dropped:
        _delete(values, path)
    return dropped


def drop_once_accepted(values: dict[str, Any]) -> None:
    """Drop the idle settings of a recorded run, in place: the version that recorded it may not have refused them.

    Options that the code of a method does not read stay: the code may have read them when the run was recorded.
    """
    for setting in list(_idle(values)):
        if setting.depends_on and not setting.is_default:
            _delete(values, setting.path)


def _delete(values: dict[str, Any], path: SettingPath) -> None:
    *sections, name = path
    section = values
    for key in sections:
        # A copy: another description may share the section.
        section[key] = dict(section[key])
        section = section[key]
    del section[name]


def is_in_any(path: SettingPath, paths: Collection[SettingPath]) -> bool:
    """Return whether a path, or a section around it, is among `paths`."""
    return any(path[: depth + 1] in paths for depth in range(len(path)))


def _idle(values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    for section, settings_class in SECTIONS.items():
        yield from _idle_in((section,), settings_class, values)

    for path, (registry, default) in COMPONENTS.items():
        entry = _entry(registry, default, _at(values, path))
        if isinstance(entry, type) and dataclasses.is_dataclass(entry):
            yield from _idle_in(path, entry, values)
            if issubclass(entry, Method):
                yield from _unread(path, entry, values)
            if issubclass(entry, Partition):
                yield from _undivided(path, entry, values)


def _idle_in(section: SettingPath, declaring_class: type, values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    """Yield the idle settings among those that a class declares."""
    settings = _at(values, section)
    if not isinstance(settings, Mapping):
        return
    for name, conditions in declared(declaring_class, Condition).items():
        if name not in settings:
            continue
        path = (*section, name)
        for condition in conditions:
            if not _holds(condition, section, declaring_class, values):
                governor = _governor(section, condition)
                governor_value = _value_at(values, governor, declaring_class)
                is_default = _plain(settings[name]) == _plain(_default(declaring_class, name))
                explain = partial(_message, path, settings[name], governor, governor_value, condition)
                yield IdleSetting(path, is_default, governor, explain)
                break


def _unread(section: SettingPath, method: Any, values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    """Yield the changed options of a method that its code never reads."""
    options = _at(values, section)
    if not isinstance(options, Mapping):
        return
    changed = []
    for name, value in options.items():
        if _plain(value) != _plain(_default(method, name, value)):
            changed.append(name)
    if not changed:
        return

    for name in unread_options(method).intersection(changed):
        yield IdleSetting((*section, name), False, (), partial(_unread_message, method, name, options[name]))


def _unread_message(method: type[Method], name: str, value: Any) -> str:
    return (
        f"method.{name} is {as_yaml(value)}, which nothing that {method.__name__} does in a run reads; read "
        f"self.{name}, or leave it out."
    )


def _undivided(section: SettingPath, partition: type[Partition], values: Mapping[str, Any]) -> Iterator[IdleSetting]:
    """Yield all settings of a partition, if the data are a population."""
    data = _at(values, ("data",))
    population = _entry(*COMPONENTS["data",], data)
    if not getattr(population, "describes_clients", False):
        return

    governor = ("data", "name")
    advice = "leave {this} out, since a Population decides who holds what"
    condition = Condition(".".join(governor), lambda name: False, advice)
    for name, value in _at(values, section).items():
        default = COMPONENTS[section][1] if name == "name" else _default(partition, name, value)
        path = (*section, name)
        explain = partial(_message, path, value, governor, data["name"], condition)
        yield IdleSetting(path, _plain(value) == _plain(default), governor, explain)


def _message(path: SettingPath, value: Any, governor: SettingPath, governor_value: Any, condition: Condition) -> str:
    name = ".".join(path)
    governor_name = ".".join(governor)
    advice = condition.advice.replace("{other}", governor_name).replace("{this}", name)
    governor_text = as_yaml(governor_value)
    return f"{name} is {as_yaml(value)}, which has no effect while {governor_name} is {governor_text}; {advice}."


def _governor(section: SettingPath, condition: Condition) -> SettingPath:
    """Return the path of the setting on which a condition depends."""
    if "." in condition.setting:
        return tuple(condition.setting.split("."))
    return (*section, condition.setting)


def _holds(condition: Condition, section: SettingPath, declaring_class: type, values: Mapping[str, Any]) -> bool:
    """Return whether a condition of a setting in a section holds, or the other one that suffices."""
    try:
        if condition.holds(_value_at(values, _governor(section, condition), declaring_class)):
            return True
    except (TypeError, ConfigError):
        # The value has a wrong type or is unknown, which is reported as a mistake of its own.
        return True
    other = condition.otherwise
    return other is not None and _holds(other, section, declaring_class, values)


def _value_at(values: Mapping[str, Any], path: SettingPath, declaring_class: type) -> Any:
    """Return a setting, or its default in the class of its section."""
    *section, name = path
    settings = _at(values, tuple(section))
    if not isinstance(settings, Mapping) or name not in settings:
        return _default(SECTIONS.get(path[0], declaring_class), name)

    value = settings[name]
    if isinstance(value, Mapping) and "name" in value:
        # `optimizer: {name: sgd}` means the same as `optimizer: sgd`.
        return value["name"]
    return value


def _at(values: Mapping[str, Any], path: SettingPath) -> Any:
    """Return the value at a path; an empty mapping if there is none, and ``{"name": ...}`` for a name alone."""
    value: Any = values
    for key in path:
        if not isinstance(value, Mapping):
            return {}
        value = value.get(key, {})
    return {"name": value} if isinstance(value, str) else value


def _entry(registry: Registry, default: str, section: Any) -> Any:
    """Return the component that a section names; None for an unknown one, which is reported elsewhere."""
    name = section.get("name", default) if isinstance(section, Mapping) else None
    if not isinstance(name, str):
        return None
    try:
        return registry.get(name)
    except ConfigError:
        return None


def _default(declaring_class: type, name: str, otherwise: Any = None) -> Any:
    for field in dataclasses.fields(declaring_class):
        if field.name != name:
            continue
        if field.default_factory is dataclasses.MISSING:
            return field.default
        return field.default_factory()
    return otherwise


def _plain(value: Any) -> Any:
    """Turn lists into tuples, so that both compare alike."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
