"""Comparisons: several methods, each run with several seeds, in an experiment that is otherwise the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.experiment.assignments import parse_assignments
from raypfl.experiment.components import unknown_option
from raypfl.experiment.effects import assign_all, require_effect
from raypfl.experiment.experiment import Experiment
from raypfl.experiment.validation import one_message
from raypfl.experiment.yaml_text import read

_PER_METHOD = ("training", "model", "cohort", "rounds")
"""Settings that a method of a comparison may have of its own."""


def experiments(source: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> list[Experiment]:
    """The experiments of a comparison: each of its methods with each of its seeds, method by method.

    Parameters
    ----------
    source : an `Experiment` as YAML text, file or mapping, in which ``methods: [fedavg, {name: ditto, lam: 1}]`` may
        take the place of ``method``, and ``seeds: 3`` runs each with three seeds, from ``seed`` on. A method may have
        settings of its own, as in ``{name: ditto, settings: {training.lr: 0.05}}``.
    assignments : ``dotted.key=value``; ``method.lam=1`` applies to each method that has a `lam`. A method's own
        settings win over them.

    Raises
    ------
    ConfigError : as `Experiment` does, before anything is run; or if two methods are the same, with the same options
        and settings: their runs would be taken for two seeds.
    """
    values = deepcopy(dict(source)) if isinstance(source, Mapping) else read(source)
    options = []
    changes = []
    for path, value in parse_assignments(assignments):
        if path[0] == "method" and len(path) > 1:
            options.append((path, value))
        else:
            values.pop({"method": "methods", "methods": "method"}.get(path[0], ""), None)
            changes.append((path, value))
    require_effect(assign_all(values, changes))
    methods, seeds = _methods(values), _seeds(values)
    base = Experiment(**values)
    compared = _with_options([_with_settings(base, method) for method in methods], options)
    _refuse_repetition(compared)
    return [one.replace(seed=one.seed + i) for one in compared for i in range(seeds)]


def _methods(values: dict[str, Any]) -> list[Any]:
    if "method" in values and "methods" in values:
        raise ConfigError("Both method and methods are given; keep one of them.")
    if isinstance(values.get("method"), list):
        raise ConfigError(f"method is {values['method']!r}; give several as methods, or with --method A,B.")
    methods = values.pop("methods", [values.pop("method", "fedavg")])
    if not isinstance(methods, list) or not methods:
        raise ConfigError(f"methods is {methods!r}; it must be a list, such as [fedavg, ditto].")
    return methods


def _seeds(values: dict[str, Any]) -> int:
    seeds = values.pop("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= 10_000:
        raise ConfigError(f"seeds is {seeds!r}; it must be from 1 to 10000: how often each method is run.")
    return seeds


def _with_settings(base: Experiment, method: Any) -> Experiment:
    """`base` with a method and the settings of its own.

    A section is changed in the keys that are given, or replaced if it has a name: ``model: {name: cnn}``.
    """
    if not isinstance(method, Mapping) or "settings" not in method:
        return base.replace(method=method)
    name, settings = method.get("name"), method["settings"]
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings of method {name!r} is {settings!r}; it must be dotted keys and values, such as "
            "{training.lr: 0.05}."
        )
    values = base.replace(method={key: value for key, value in method.items() if key != "settings"}).to_dict()
    changes = setting_paths(settings)
    for path, _ in changes:
        if path[0] not in _PER_METHOD:
            raise ConfigError(
                f"settings of method {name!r} has {'.'.join(path)}, which all methods of a comparison share; one may "
                f"have its own {', '.join(_PER_METHOD)}."
            )
    try:
        require_effect(assign_all(values, changes))
        return Experiment(**values)
    except ConfigError as error:
        raise ConfigError(f"With the settings of method {name!r}: {error}") from None


def setting_paths(settings: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Paths and values of settings that are nested or have dotted keys, shorter paths first.

    A section is taken key by key or, if it has a name, as a whole.
    """
    return sorted(_paths(settings, ()), key=lambda pair: len(pair[0]))


def _paths(settings: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[list[str], Any]]:
    for key, value in settings.items():
        path = (*above, *str(key).split("."))
        if isinstance(value, Mapping) and "name" not in value:
            yield from _paths(value, path)
        else:
            yield list(path), value


def _with_options(compared: list[Experiment], options: list[tuple[list[str], Any]]) -> list[Experiment]:
    """`compared`, with each of the `options` ``method.KEY`` set in the methods in which it has an effect."""
    described = [one.to_dict()["method"] for one in compared]
    for path, _ in options:
        if not any(path[1] in method for method in described):
            names = " or ".join(method["name"] for method in described)
            known = {key for method in described for key in method} - {"name"}
            kinds = [type(one.method) for one in compared]
            raise ConfigError(f"method.{path[1]} {unknown_option(path[1], names, known, *kinds)}")

    changed = []
    idle: dict[str, str] = {}
    used: set[str] = set()
    for experiment, method in zip(compared, described, strict=True):
        values = {"method": dict(method)}
        refusals = assign_all(values, [(path, value) for path, value in options if path[1] in method])
        for (_, name), sentence in refusals.items():
            del values["method"][name]
            idle[name] = sentence
        used |= {name for name in method if ("method", name) not in refusals}
        changed.append(experiment.replace(**values))
    if sentences := [sentence for name, sentence in idle.items() if name not in used]:
        raise ConfigError(one_message(sentences, "The experiment"))
    return changed


def _refuse_repetition(compared: Sequence[Experiment]) -> None:
    described = [one.to_dict() for one in compared]
    for i, one in enumerate(described):
        if one in described[:i]:
            raise ConfigError(
                f"methods has {one['method']['name']} twice, with the same options and settings; keep one of them. "
                "seeds=2 runs each method twice, with different seeds."
            )
