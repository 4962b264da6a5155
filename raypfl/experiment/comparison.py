"""Comparisons: several methods, each run with several seeds, in an experiment that is otherwise the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from raypfl.common.errors import ConfigError, one_message
from raypfl.experiment.assignments import flatten, parse_assignments
from raypfl.experiment.checks.effects import assign_all, is_in_any, require_effect
from raypfl.experiment.components import unknown_option
from raypfl.experiment.experiment import Experiment
from raypfl.experiment.yaml_text import read

PER_METHOD = ("training", "model", "cohort", "asynchronous", "aggregation", "compression", "rounds")
"""Sections and settings that may differ between the methods of a comparison."""

_EVALUATED = "evaluation.every"
"""May differ, too: a round of one method may take as long as ten of another, and each has its own number of rounds."""


def experiments(source: str | Path | Mapping[str, Any], assignments: Iterable[str] = ()) -> list[Experiment]:
    """Return the experiments of a comparison: each method with each seed, method by method.

    Parameters
    ----------
    source : an `Experiment` as YAML text, file or mapping, in which ``methods: [fedavg, {name: ditto, lam: 1}]`` may
        take the place of ``method``, and ``seeds: 3`` runs each method with three seeds, from ``seed`` on. A method may
        have its own settings, as in ``{name: ditto, settings: {training.lr: 0.05}}``.
    assignments : ``dotted.key=value``, also in place of a method's own setting, unless they give the methods, too;
        ``method.lam=1`` applies to each method with a `lam`.

    Raises
    ------
    ConfigError : as `Experiment` does, before anything runs; if an assignment has no effect on one of the methods; or
        if two methods have the same name, options and settings, since their runs would be mistaken for two seeds.
    """
    values = deepcopy(dict(source)) if isinstance(source, Mapping) else read(source)
    methods_of_source = _methods_by_name(values)

    # An option of a method applies to the methods that have it, once all methods are known.
    options = []
    changes = []
    for path, value in parse_assignments(assignments):
        if path[0] == "method" and len(path) > 1:
            options.append((path, value))
        else:
            # A command's `method` replaces a file's `methods`, and the other way round.
            replaced_key = {"method": "methods", "methods": "method"}.get(path[0], "")
            values.pop(replaced_key, None)
            changes.append((path, value))
    require_effect(assign_all(values, changes))

    methods = _take_methods(values)
    seeds = _take_seeds(values)
    base = Experiment(**values)
    assigned = [tuple(path) for path, _ in changes]
    chosen = [(method, True) for method in methods]
    are_named = any(path[0] in ("method", "methods") for path in assigned)
    if are_named:
        chosen = _choose(methods, methods_of_source)
        methods = [method for method, _ in chosen]
    compared = [_with_settings(base, method, assigned if is_of_source else ()) for method, is_of_source in chosen]
    _refuse_without_effect(base, compared, methods, assigned)
    compared = _with_options(compared, options)
    compared = _without_repetition(compared, [are_named and is_of_source for _, is_of_source in chosen])

    planned = []
    for experiment in compared:
        # Copied without another check, since no check looks at the seed: a study has hundreds of experiments.
        planned += [experiment.model_copy(update={"seed": experiment.seed + i}) for i in range(seeds)]
    return planned


def _methods_by_name(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the methods of a description by name, each with all its variants; none if they are no list."""
    methods = values.get("methods", [values.get("method")])
    by_name: dict[str, list[Any]] = {}
    for method in methods if isinstance(methods, list) else []:
        name = method.get("name", "fedavg") if isinstance(method, Mapping) else method
        if isinstance(name, str):
            by_name.setdefault(name, []).append(method)
    return by_name


def _choose(methods: Sequence[Any], of_source: Mapping[str, Sequence[Any]]) -> list[tuple[Any, bool]]:
    """Replace a bare name by the source's methods of this name: the bare one if it is listed, else all variants.

    Returns
    -------
    The methods, each with whether it is the source's.
    """
    chosen = []
    for method in methods:
        variants = of_source.get(method, []) if isinstance(method, str) else []
        if not variants or method in variants:
            chosen.append((method, False))
        else:
            chosen += [(variant, True) for variant in variants]
    return chosen


def _take_methods(values: dict[str, Any]) -> list[Any]:
    if "method" in values and "methods" in values:
        raise ConfigError("Both method and methods are given; keep one of them.")
    if isinstance(values.get("method"), list):
        raise ConfigError(f"method is {values['method']!r}; give several as methods, or with --method A,B.")
    methods = values.pop("methods", [values.pop("method", "fedavg")])
    if not isinstance(methods, list) or not methods:
        raise ConfigError(f"methods is {methods!r}; it must be a list, such as [fedavg, ditto].")
    return methods


def _take_seeds(values: dict[str, Any]) -> int:
    seeds = values.pop("seeds", 1)
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= 10_000:
        raise ConfigError(f"seeds is {seeds!r}; it must be a whole number from 1 to 10000, the seeds of each method.")
    return seeds


def _with_settings(base: Experiment, method: Any, assigned: Collection[tuple[str, ...]]) -> Experiment:
    """Return `base` with a method and that method's own settings, except those that were assigned.

    A section with a name replaces the whole section (``model: {name: cnn}``); otherwise only the keys in it change.
    """
    if not isinstance(method, Mapping) or "settings" not in method:
        return base.replace(method=method)

    name = method.get("name")
    settings = method["settings"]
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings of method {name!r} is {settings!r}; it must be dotted keys and values, such as "
            "{training.lr: 0.05}."
        )

    without_settings = {key: value for key, value in method.items() if key != "settings"}
    values = base.replace(method=without_settings).to_dict()
    changes = setting_paths(settings)
    for path, _ in changes:
        if path[0] not in PER_METHOD and ".".join(path) != _EVALUATED:
            raise ConfigError(
                f"settings of method {name!r} has {'.'.join(path)}, which all methods of a comparison share; only "
                f"{', '.join((*PER_METHOD, _EVALUATED))} may differ between methods."
            )

    remaining = [(path, value) for path, value in changes if not is_in_any(tuple(path), assigned)]
    try:
        require_effect(assign_all(values, remaining))
        return Experiment(**values)
    except ConfigError as error:
        raise ConfigError(f"In the settings of method {name!r}: {error}") from None


def _refuse_without_effect(
    base: Experiment, compared: Sequence[Experiment], methods: Sequence[Any], assigned: Iterable[tuple[str, ...]]
) -> None:
    """Raise a ConfigError if a method's own settings leave an assigned one without effect on that method."""
    with_settings = []
    for experiment, method in zip(compared, methods, strict=True):
        if isinstance(method, Mapping) and "settings" in method:
            replaced = [tuple(own_path) for own_path, _ in setting_paths(method["settings"])]
            with_settings.append((method, flatten(experiment.to_dict()), replaced))
    if not with_settings:
        return

    expected = flatten(base.to_dict())
    for path in assigned:
        key = ".".join(path)
        refusing = []
        for method, settings, replaced in with_settings:
            if key in expected and settings.get(key) != expected[key] and not is_in_any(path, replaced):
                refusing.append(f"{method['name']} with settings {dict(method['settings'])}")
        if refusing:
            raise ConfigError(
                f"{key}={expected[key]} has no effect on {' and on '.join(refusing)}. Leave it out, or give the "
                "methods that it is for, as in methods=[fedavg]."
            )


def setting_paths(settings: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
    """Return paths and values of settings that are nested or have dotted keys, shorter paths first.

    A section counts as one value if it has a name, and key by key otherwise.
    """
    return sorted(_paths(settings, ()), key=lambda pair: len(pair[0]))


def _paths(settings: Mapping[str, Any], prefix: tuple[str, ...]) -> Iterator[tuple[list[str], Any]]:
    for key, value in settings.items():
        path = (*prefix, *str(key).split("."))
        if isinstance(value, Mapping) and "name" not in value:
            yield from _paths(value, path)
        else:
            yield list(path), value


def _with_options(compared: list[Experiment], options: list[tuple[list[str], Any]]) -> list[Experiment]:
    """Set each of the options ``method.KEY`` in the methods in which it has an effect."""
    if not options:
        return compared

    methods = [experiment.to_dict()["method"] for experiment in compared]
    refuse_unknown_options(compared, [path for path, _ in options])

    changed = []
    refusals_by_option: dict[str, str] = {}
    options_with_effect: set[str] = set()
    for experiment, method in zip(compared, methods, strict=True):
        values = {"method": dict(method)}
        refusals = assign_all(values, [(path, value) for path, value in options if path[1] in method])
        for (_, name), message in refusals.items():
            del values["method"][name]
            refusals_by_option[name] = message
        options_with_effect |= {name for name in method if ("method", name) not in refusals}
        changed.append(experiment.replace(**values))

    # It is enough that an option has an effect in one of the methods.
    messages = [message for name, message in refusals_by_option.items() if name not in options_with_effect]
    if messages:
        raise ConfigError(one_message(messages, "The experiment"))
    return changed


def refuse_unknown_options(compared: Sequence[Experiment], paths: Iterable[Sequence[str]]) -> None:
    """Raise a ConfigError if one of the options ``method.KEY``, given as paths, is of none of the methods."""
    methods = {method["name"]: method for method in (experiment.to_dict()["method"] for experiment in compared)}
    for _, option, *_ in paths:
        if any(option in method for method in methods.values()):
            continue
        known_options = {key for method in methods.values() for key in method} - {"name"}
        classes = [type(experiment.method) for experiment in compared]
        raise ConfigError(f"method.{option} {unknown_option(option, ' or '.join(methods), known_options, *classes)}")


def _without_repetition(compared: Sequence[Experiment], are_variants: Sequence[bool]) -> list[Experiment]:
    """Leave out variants of a named method that assignments made equal; refuse a method that is given twice."""
    distinct: list[Experiment] = []
    descriptions: list[dict[str, Any]] = []
    for experiment, is_variant in zip(compared, are_variants, strict=True):
        description = experiment.to_dict()
        if description not in descriptions:
            distinct.append(experiment)
            descriptions.append(description)
        elif not is_variant:
            name = description["method"]["name"]
            raise ConfigError(
                f"methods has {name} twice, with the same options and settings; keep one of them. "
                "seeds=2 runs each method twice, with different seeds."
            )
    return distinct
