"""Several methods, each from several seeds, on what is otherwise one experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError
from raypfl.config.assignments import assign, parsed
from raypfl.config.components import unknown
from raypfl.config.experiment import Experiment
from raypfl.config.yaml_text import read
from raypfl.methods import Method

_OWN = ("training", "model", "cohort", "rounds")
"""What a method of a comparison may have of its own."""


def experiments(source: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> list[Experiment]:
    """The experiments of a comparison: each of its methods from each of its seeds, method by method.

    Parameters
    ----------
    source : an `Experiment` as YAML text, file or mapping, in which ``methods: [fedavg, {name: ditto, lam: 1}]`` may
        stand for ``method``, and ``seeds: 3`` asks for as many repetitions, the first of them with ``seed``. A method
        may have settings of its own, as in ``{name: ditto, settings: {training.lr: 0.05}}``.
    assignments : ``dotted.key=value``; ``method.lam=1`` reaches each of the methods that has a `lam`. Settings of a
        method's own win over them.

    Raises
    ------
    ConfigError : as `Experiment` does, before anything is run.
    """
    values = deepcopy(dict(source)) if isinstance(source, Mapping) else read(source)
    of_methods = []
    for path, value in parsed(assignments):
        if path[0] == "method" and len(path) > 1:
            of_methods.append((path, value))
        else:
            values.pop({"method": "methods", "methods": "method"}.get(path[0], ""), None)
            assign(values, path, value)
    methods, seeds = _methods(values), _seeds(values)
    base = Experiment(**values)
    compared = [_with_settings(base, *_parted(method)) for method in methods]
    return [one.replace(seed=one.seed + i) for one in _with_options(compared, of_methods) for i in range(seeds)]


def _methods(values: dict[str, Any]) -> list[Any]:
    if "method" in values and "methods" in values:
        raise ConfigError("Both method and methods are given; keep one of them.")
    if isinstance(values.get("method"), list):
        raise ConfigError(
            f"method is {values['method']!r}, which is several: give them as methods, or with --method A,B."
        )
    methods = values.pop("methods", [values.pop("method", "fedavg")])
    if not isinstance(methods, list) or not methods:
        raise ConfigError(f"methods is {methods!r}; it must be a list, such as [fedavg, ditto].")
    return methods


def _parted(method: Any) -> tuple[Any, dict[str, Any]]:
    """A method without, and the settings of its own."""
    if not isinstance(method, Mapping) or "settings" not in method:
        return method, {}
    settings = method["settings"]
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings of method {method.get('name')!r} is {settings!r}; it must be dotted keys and values, such as "
            "{training.lr: 0.05}."
        )
    return {key: value for key, value in method.items() if key != "settings"}, dict(settings)


def _with_settings(base: Experiment, method: Any, settings: Mapping[str, Any]) -> Experiment:
    """`base` with a method and the settings of its own.

    Of a section, what is given changes what is there, unless it has a name: ``model: {name: cnn}`` is another model.
    """
    experiment = base.replace(method=method)
    if not settings:
        return experiment
    values = experiment.to_dict()
    name = values["method"]["name"]
    for path, value in sorted(_paths(settings), key=lambda pair: len(pair[0])):
        if path[0] not in _OWN:
            raise ConfigError(
                f"settings of method {name!r} has {'.'.join(path)}, which all methods of a comparison share; one may "
                f"have its own {', '.join(_OWN)}."
            )
        assign(values, path, value)
    try:
        return Experiment(**values)
    except ConfigError as error:
        raise ConfigError(f"With the settings of method {name!r}: {error}") from None


def _paths(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    for key, value in settings.items():
        path = (*above, *str(key).split("."))
        if isinstance(value, Mapping) and "name" not in value:
            yield from _paths(value, path)
        else:
            yield list(path), value


def _seeds(values: dict[str, Any]) -> int:
    seeds = values.pop("seeds", 1)
    if not isinstance(seeds, int) or seeds < 1:
        raise ConfigError(f"seeds is {seeds!r}; it must be a whole number, at least 1: how often each method is run.")
    return seeds


def _with_options(compared: list[Experiment], assignments: list[tuple[list[str], Any]]) -> list[Experiment]:
    changed = [{"method": one.to_dict()["method"]} for one in compared]
    for path, value in assignments:
        takers = [one for one in changed if path[1] in one["method"]]
        if not takers:
            raise ConfigError(_unknown_option(path[1], [one.method for one in compared], changed))
        for one in takers:
            assign(one, path, value)
    return [one.replace(**change) for one, change in zip(compared, changed, strict=True)]


def _unknown_option(option: str, methods: list[Method], described: list[dict[str, Any]]) -> str:
    names = " or ".join(one["method"]["name"] for one in described)
    known = {key for one in described for key in one["method"]} - {"name"}
    return f"method.{option} {unknown(option, names, known, *map(type, methods))}"
