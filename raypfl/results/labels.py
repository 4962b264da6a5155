"""Labels of runs: the method, with the options and settings in which it differs from the runs beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.experiment.identity import ONLY_ROUNDING, deciding_settings, is_in
from raypfl.results.setting_text import implied_settings, value_text

_SHOWN_ELSEWHERE = ("method", "seed", "data.root")
_EVALUATIONS = ("evaluation.every", "evaluation.protocols")
_MISSING = object()


def labels(experiments: Sequence[Experiment], searched: Collection[str] = ()) -> list[str]:
    """Return a name for each experiment; those that differ in their seed alone have the same one.

    A label is the method with the options in which runs of this method differ, and with the settings in which it
    differs from the first experiment: ``ditto lam=0.1 training.lr=0.05``. When and on what models are evaluated is left
    out, unless it alone tells experiments apart; so are analyses, which change no result, unless they alone tell
    experiments from one seed apart. All labels, the first one's too, show their values if the experiments differ in a
    single setting that is not a method's own. If all are of one method and differ in several settings, labels show
    those that are not at their default, and those of the settings in `searched`, by dotted name.
    """
    if not experiments:
        return []
    names = _method_names(experiments)
    texts = _setting_texts(names, experiments, searched)
    return [f"{name} {text}".rstrip() for name, text in zip(names, texts, strict=True)]


def differing_settings(experiments: Sequence[Experiment]) -> list[str]:
    """Return the part of each of the `labels` that is about settings other than the method's options.

    It begins with the method, as ``method=module:Class``, where two classes have the same name.
    """
    texts = _setting_texts(_method_names(experiments), experiments)
    methods = [experiment.to_dict()["method"]["name"] for experiment in experiments]
    if any(":" in name for name in _shown_names(methods).values()):
        return [f"method={method} {text}".rstrip() for method, text in zip(methods, texts, strict=True)]
    return texts


def _shown_names(full_names: Iterable[str]) -> dict[str, str]:
    """Return the names to show: of a user's ``module:Class`` the class, unless two have the same name."""
    shown_names = {name: name.rpartition(":")[2] for name in full_names}
    if len(set(shown_names.values())) < len(shown_names):
        return {name: name for name in shown_names}
    return shown_names


def _method_names(experiments: Sequence[Experiment]) -> list[str]:
    """Methods, each with the options in which experiments with this method differ."""
    methods = [experiment.to_dict()["method"] for experiment in experiments]

    shown_names = _shown_names(method["name"] for method in methods)
    names = []
    for experiment, method in zip(experiments, methods, strict=True):
        words = [shown_names[method["name"]]]
        namesakes = [other for other in methods if other["name"] == method["name"]]
        for key, value in method.items():
            # Options that are off by default are left out: `ditto` beside `ditto personal_epochs=2`.
            is_off = value is None and getattr(type(experiment.method), key, ...) is None
            if not is_off and any(other[key] != value for other in namesakes):
                words.append(f"{key}={value_text(value)}")
        names.append(" ".join(words))
    return names


def _setting_texts(
    names: Sequence[str], experiments: Sequence[Experiment], searched: Collection[str] = ()
) -> list[str]:
    """Return ``training.lr=0.05 rounds=4`` of each experiment, as `labels` says; `names` are their methods."""
    # Runs that have begun record the objective that the data decide on; the others leave it open.
    is_objective_open = any(experiment.objective is None for experiment in experiments)
    hidden = ("objective",) if is_objective_open else ()
    settings = [_deciding_settings(experiment, hidden) for experiment in experiments]
    runs = [(name, experiment.seed) for name, experiment in zip(names, experiments, strict=True)]
    settings = _without_unneeded(("analyses",), runs, settings)
    settings = _without_unneeded(_EVALUATIONS, names, settings)
    differing = _differing_keys(settings)

    complete = _with_defaults(settings)
    one_method = len({name.split()[0] for name in names}) == 1
    if len(differing) == 1 and (one_method or not _are_settings_of_methods(names, settings)):
        # Each label shows its value, even a default one, unless it is None.
        reference = {key: value for key, value in _defaults().items() if value is None}
    elif one_method:
        reference = _defaults()
    else:
        reference = complete[0]
    reference = {key: value for key, value in reference.items() if key not in searched or value is None}
    differences = [_differences(values, reference, differing) for values in complete]

    return [_as_text(_without_parts_of_other_components(values, settings)) for values in differences]


def _without_unneeded(
    keys: Sequence[str], runs: Sequence[object], settings: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the settings without these keys, unless they alone tell equal `runs` apart."""
    needed = [{key: value for key, value in values.items() if key not in keys} for values in settings]
    counts = []
    for alternative in (settings, needed):
        counts.append(len({repr(pair) for pair in zip(runs, alternative, strict=True)}))
    return needed if counts[0] == counts[1] else list(settings)


def _defaults() -> dict[str, Any]:
    """Return the default of each setting that is not an option of a component, such as a partition's."""
    return flatten(deciding_settings(Experiment()))


def _differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same everywhere, in the order of their first appearance."""
    first = settings[0]
    differing = []
    for key in dict.fromkeys(key for values in settings for key in values):
        # A key may be missing: a section that is null here may be a component with options elsewhere.
        if any(values.get(key, _MISSING) != first.get(key, _MISSING) for values in settings):
            differing.append(key)
    return differing


def _are_settings_of_methods(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether each of several methods has settings of its own, the same in all of its runs."""
    by_name = dict(zip(names, settings, strict=True))
    if len(by_name) == 1:
        return False
    return all(by_name[name] == values for name, values in zip(names, settings, strict=True))


def _deciding_settings(experiment: Experiment, hidden: Sequence[str]) -> dict[str, Any]:
    """Return the settings, other than method, seed and the `hidden` ones, that decide a result up to rounding."""
    left_out = {*ONLY_ROUNDING, *_SHOWN_ELSEWHERE, *hidden, *implied_settings(experiment)}
    shown = {}
    for key, value in flatten(deciding_settings(experiment)).items():
        if not any(is_in(key, section) for section in left_out):
            shown[key] = value
    return shown


def _differences(settings: Mapping[str, Any], reference: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of `keys` that are not the reference's."""
    different = {}
    for key in keys:
        is_as_reference = key in reference and settings.get(key) == reference[key]
        if key in settings and not is_as_reference:
            different[key] = settings[key]
    return different


def _with_defaults(all_settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings with ``default`` for options that others give to the same network, partition and so on."""
    components_with: dict[str, set[str | None]] = {}
    for settings in all_settings:
        for key in settings:
            components_with.setdefault(key, set()).add(settings.get(f"{_section(key)}.name"))

    complete = []
    for settings in all_settings:
        values = dict(settings)
        for key, components in components_with.items():
            if key in settings:
                continue
            # Nothing is missing in a plain value, such as no privacy, or in a section instead of one.
            is_plain = _section(key) in settings
            is_section = any(is_in(present, key) for present in settings)
            has_same_component = settings.get(f"{_section(key)}.name") in components
            if has_same_component and not is_plain and not is_section:
                values[key] = "default"
        complete.append(values)
    return complete


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _without_parts_of_other_components(
    differences: Mapping[str, Any], all_settings: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the differences with only the name of another network, partition and so on: ``model=lenet``.

    If there are several with this name, such as two depths of one network, the options in which they differ are kept.
    """
    components = {}
    for key, value in differences.items():
        if key.endswith(".name"):
            components[key.removesuffix(".name")] = value

    others = {}
    for key, value in differences.items():
        component = next((component for component in components if is_in(key, component)), None)
        if component is None:
            others[key] = value
            continue
        name = f"{component}.name"
        namesakes = [settings for settings in all_settings if settings.get(name) == components[component]]
        if any(settings.get(key, _MISSING) != value for settings in namesakes):
            others[key] = value
    return components | others


def _as_text(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key.removesuffix('.name')}={value_text(value)}" for key, value in settings.items())
