"""Runs that belong together: a contender is a method with its options and settings, run from one seed or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from raypfl.config.assignments import flatten
from raypfl.datasets.population import is_described
from raypfl.evaluation.measures import Measures
from raypfl.results.units import Unit

if TYPE_CHECKING:
    from raypfl.config import Experiment
    from raypfl.runs import Result

COLOURS = (
    *("#3B82C4", "#E0703C", "#2FA37C", "#B565A7", "#D9A125", "#56B4D3", "#8D6E63", "#7F8C8D"),
    *("#C8364E", "#7A9A2E", "#4F55B5", "#E58FB2"),
)
"""Told apart on light and dark grounds; a method has the same one everywhere in a comparison."""

# What changes no result, or its rounding alone.
_BESIDE = ("name", "seed", "output", "engine", "ray", "checkpoint", "tracking", "method")
_BESIDE_KEYS = ("data.root", "data.download", "data.cache", "training.channels_last")

_MOST_TOLD = 3
"""Settings of a method's own that its name has; of more, it has a letter."""


@dataclass(frozen=True)
class Contender:
    """One method's runs with the same settings, one for each seed."""

    label: str
    colour: str
    results: tuple[Result, ...]

    @property
    def measures(self) -> Measures:
        """By which metrics its runs were judged."""
        return self.results[0].experiment.measures

    @property
    def unit(self) -> Unit:
        """Of the primary metric."""
        return Unit(self.measures.primary)

    def scores(self, protocol: str, model: str, metric: str, best: bool = False) -> list[float]:
        """One number a seed, of the last evaluated round or of the best; empty where the method has no such model."""
        chosen = [row for row in self._summaries[best] if (row["protocol"], row["model"]) == (protocol, model)]
        return [row[metric] for row in chosen if metric in row]

    def spread(self, protocol: str, metric: str, best: bool = False) -> list[float]:
        """`scores` of the deployed model, of a metric over clients; empty where one model had one test."""
        model = self.deployed(protocol)
        once = model == "global" and (protocol == "global" or protocol.startswith("ood/"))
        return [] if once else self.scores(protocol, model, metric, best)

    @cached_property
    def _summaries(self) -> dict[bool, list[dict[str, Any]]]:
        last = [row for result in self.results for row in result.summary()]
        chosen = [row for result in self.results for row in result.summary(result.best_round)]
        return {False: last, True: chosen}

    @property
    def protocols(self) -> list[str]:
        """Those that were evaluated, in order."""
        return list(dict.fromkeys(row["protocol"] for row in self._summaries[False]))

    @property
    def has_best(self) -> bool:
        """Whether validation data chose a round of every run."""
        return all(result.best_round is not None for result in self.results)

    def deployed(self, protocol: str) -> str:
        """``personal`` where the method makes personal models, else ``global``."""
        return "personal" if self.scores(protocol, "personal", self.measures.primary.name) else "global"


def contenders(results: Sequence[Result]) -> list[Contender]:
    """Results grouped by what decides them but for the seed, in order of first appearance."""
    named = labels([result.experiment for result in results])
    groups = {label: tuple(r for r, name in zip(results, named, strict=True) if name == label) for label in named}
    return [Contender(label, colour(i), members) for i, (label, members) in enumerate(groups.items())]


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """A short name for each experiment: its method, with the options that tell it from namesakes.

    Where experiments differ in a setting beside, all of their names have that; where in several, a letter for them:
    ``ditto lam=0.1 · settings B``. If these are settings of a method's own, which its name tells already, it has what
    differs from the first one's.
    """
    return [f"{name}{words}" for name, words in zip(*_named(experiments), strict=True)]


def settings_told(experiments: Sequence[Experiment]) -> list[str]:
    """What of each of the `labels` tells of settings beside method and options."""
    return [words.strip(" ·") for words in _named(experiments)[1]]


def _named(experiments: Sequence[Experiment]) -> tuple[list[str], list[str]]:
    """Methods with their options, and what tells their settings apart."""
    methods = [experiment.to_dict()["method"] for experiment in experiments]
    names = {method["name"] for method in methods}
    short = {name: name.rpartition(":")[2] for name in names}
    if len(set(short.values())) < len(names):
        short = {name: name for name in names}
    named = [
        _label(method, short[method["name"]], [other for other in methods if other["name"] == method["name"]])
        for method in methods
    ]
    return named, _told_apart(named, [_settings(experiment) for experiment in experiments])


def colour(index: int) -> str:
    """The colour of the contender at `index`."""
    return COLOURS[index % len(COLOURS)]


def setting(experiment: Experiment, metadata: Mapping[str, Any]) -> str:
    """What all contenders share, in one line: data, partition, model; of the partition, what is not by default so.

    `metadata` : of the run (`Result.metadata`). A population, which has no partition, shows its number of clients.
    """
    values = experiment.to_dict()
    if is_described(experiment.data):
        count = [f"{metadata['num_clients']:,} clients"] if "num_clients" in metadata else []
        return " · ".join([values["data"]["name"], *count, _called(values["model"])])
    partition = values["partition"]
    clients = partition.pop("clients", None)
    held = [f"{clients} clients"] if clients else []
    usual = {field.name: field.default for field in fields(experiment.partition)}
    telling = list(partition)[:2]  # its name and first option, such as alpha
    partition = {key: value for key, value in partition.items() if key in telling or value != usual[key]}
    return " · ".join([values["data"]["name"], *held, _called(partition), _called(values["model"])])


def settings(experiment: Experiment) -> dict[str, Any]:
    """Everything that an experiment says, but for the partition of a population, which has no say."""
    values = experiment.to_dict()
    if is_described(experiment.data):
        del values["partition"]
    return values


def _called(component: dict[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in component.items() if key != "name" and value is not None)
    return f"{component['name']}({options})" if options else component["name"]


def _settings(experiment: Experiment) -> dict[str, Any]:
    """What decides a result beside the method and the seed."""
    parts = {key: value for key, value in settings(experiment).items() if key not in _BESIDE}
    return {key: value for key, value in flatten(parts).items() if key not in _BESIDE_KEYS}


def _told_apart(names: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    of_name = dict(zip(names, settings, strict=True))
    if len(of_name) > 1 and all(of_name[name] == one for name, one in zip(names, settings, strict=True)):
        own = [_own(one, settings[0], differing) for one in settings]
        if max(map(len, own)) <= _MOST_TOLD:
            return ["".join(f" {key}={value}" for key, value in mine.items()) for mine in own]
    elif len(differing) < 2:
        return ["".join(f" {key}={one.get(key)}" for key in differing) for one in settings]
    kinds: list[dict[str, Any]] = []
    for one in settings:
        kinds += [one] if one not in kinds else []
    return [f" · settings {_letter(kinds.index(one))}" for one in settings]


def _own(settings: dict[str, Any], first: dict[str, Any], differing: Sequence[str]) -> dict[str, Any]:
    """What `settings` have otherwise than the first ones; of another network or optimizer, the name alone."""
    own = {key: settings[key] for key in differing if key in settings and settings[key] != first.get(key)}
    named = [key.removesuffix(".name") for key in own if key.endswith(".name")]
    rest = {key: value for key, value in own.items() if not key.startswith(tuple(f"{name}." for name in named))}
    return {**{name: own[f"{name}.name"] for name in named}, **rest}


def _letter(index: int) -> str:
    """A to Z, then AA to AZ and so on."""
    before, last = divmod(index, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


def _label(method: dict[str, Any], name: str, namesakes: list[dict[str, Any]]) -> str:
    differing = [key for key, value in method.items() if any(other[key] != value for other in namesakes)]
    return " ".join([name, *(f"{key}={method[key]}" for key in differing)])
