"""Several methods, each from several seeds, on what is otherwise one experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from raypfl.config.assignments import assign, parsed
from raypfl.config.components import unknown
from raypfl.config.experiment import Experiment
from raypfl.config.yaml_text import read
from raypfl.errors import ConfigError
from raypfl.methods import Method


def experiments(source: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> list[Experiment]:
    """The experiments of a comparison: each of its methods from each of its seeds, method by method.

    Parameters
    ----------
    source : an `Experiment` as YAML text, file or mapping, in which ``methods: [fedavg, {name: ditto, lam: 1}]`` may
        stand for ``method``, and ``seeds: 3`` asks for as many repetitions, the first of them with ``seed``.
    assignments : ``dotted.key=value``; ``method.lam=1`` reaches each of the methods that has a `lam`.

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
    compared = [base.replace(method=method) for method in methods]
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
