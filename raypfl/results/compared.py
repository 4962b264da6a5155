"""Runs side by side: which of them differ in their seed alone, and names and colours that tell the others apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from raypfl.data.datasets.population import is_described
from raypfl.evaluation.measures import OF_PRIMARY, Measures
from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.experiment.identity import deciding_settings, is_in
from raypfl.experiment.settings import ModelSettings
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

COLOURS = (
    *("#3B82C4", "#E0703C", "#2FA37C", "#B565A7", "#D9A125", "#56B4D3", "#8D6E63", "#7F8C8D"),
    *("#C8364E", "#7A9A2E", "#4F55B5", "#E58FB2"),
)
"""Distinct on light and on dark backgrounds; a method has the same one in every picture of a comparison."""

_MARKS = ("", "●", "■", "▲", "◆", "▼")

_NETWORK = {field.name: field.default for field in fields(ModelSettings) if field.name != "name"}
_BY_ROUNDING = ("engine", "training.channels_last")
_SHOWN_APART = ("method", "seed", "data.root")

_LONGEST = 45
"""Characters of a method's own settings in a label; more become a letter."""


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method with the same options and settings, one for each seed."""

    label: str
    colour: str
    results: tuple[RunResult, ...]

    @property
    def measures(self) -> Measures:
        """The metrics of its runs."""
        return self.results[0].experiment.measures

    @property
    def unit(self) -> Unit:
        """Of the primary metric."""
        return Unit(self.measures.primary)

    def scores(self, protocol: str, model: str = "", aggregate: str = "", best: bool = False) -> list[float]:
        """One number per seed, in the metric's unit; empty where there is none.

        Parameters
        ----------
        model : ``personal`` or ``global``; empty: the one that clients use.
        aggregate : a name in ``measures.aggregates``; empty: the primary metric. One model on one test set has no
            spread over clients.
        best : in the round that validation data chose, instead of the last evaluated one.
        """
        aggregate, model = aggregate or self.measures.primary.name, model or self.deployed(protocol)
        tested_once = model == "global" and (protocol == "global" or protocol.startswith("ood/"))
        if aggregate not in self.measures.aggregates or (tested_once and aggregate in OF_PRIMARY):
            return []
        rows = [row for row in self._summaries[best] if (row["protocol"], row["model"]) == (protocol, model)]
        return Unit(self.measures.of(aggregate)).of(row[aggregate] for row in rows if aggregate in row)

    @cached_property
    def _summaries(self) -> dict[bool, list[dict[str, Any]]]:
        last = [row for result in self.results for row in result.summary()]
        best = [row for result in self.results for row in result.summary(result.best_round)]
        return {False: last, True: best}

    @property
    def protocols(self) -> list[str]:
        """Those that were evaluated, in order."""
        return list(dict.fromkeys(row["protocol"] for row in self._summaries[False]))

    @property
    def has_best(self) -> bool:
        """Whether validation data chose a round of every run."""
        return all(result.best_round is not None for result in self.results)

    def deployed(self, protocol: str) -> str:
        """The model that clients use: ``personal`` where the method makes personal models, else ``global``."""
        return "personal" if self.scores(protocol, "personal") else "global"


def group_runs(results: Sequence[RunResult]) -> list[RunGroup]:
    """Results grouped by everything but the seed, in order of first appearance."""
    names = labels([result.experiment for result in results])
    groups = {label: tuple(r for r, name in zip(results, names, strict=True) if name == label) for label in names}
    return [RunGroup(label, colour(i), members) for i, (label, members) in enumerate(groups.items())]


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """A short name for each experiment: its method, with the options in which runs of this method differ.

    Where experiments also differ in one other setting, every label shows its value; where in several, those that differ
    from the first experiment's, and labels of runs of one method show all that differ. If that is long, a letter stands
    for them: ``ditto lam=0.1 · settings B``.
    """
    return [f"{name}{suffix}" for name, suffix in zip(*_names_and_settings(experiments), strict=True)]


def lettered_settings(experiments: Sequence[Experiment]) -> list[str]:
    """What letters in the `labels` stand for: all that others differ in, of the first; what differs from it, of others.

    As in ``settings A: training.lr=0.1``, ``settings B: training.lr=0.05``.
    """
    letters = differing_settings(experiments)
    if not letters[0].startswith("settings "):
        return []
    first = _deciding(experiments[0])
    of_letter: dict[str, dict[str, Any]] = {}
    for letter, experiment in dict(zip(letters, experiments, strict=True)).items():
        own = _deciding(experiment)
        mine = _own(own, first, list(own))
        lacking = {key: "default" for key in _own(first, own, list(first)) if key not in mine}
        of_letter[letter] = mine | lacking
    names = {key.removesuffix(".name"): value for key, value in first.items()}
    of_letter[letters[0]] = {key: names.get(key, "default") for own in of_letter.values() for key in own}
    return [f"{letter}: {_listed(values)}" for letter, values in of_letter.items()]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={'null' if value is None else value}" for key, value in values.items())


def differing_settings(experiments: Sequence[Experiment]) -> list[str]:
    """The part of each of the `labels` that is about settings other than the method's options."""
    return [suffix.strip(" ·") for suffix in _names_and_settings(experiments)[1]]


def colour(index: int) -> str:
    """The colour of the group at `index`."""
    return COLOURS[index % len(COLOURS)]


def mark(index: int) -> str:
    """A character that tells the group at `index` from one of the same colour; empty for the first of a colour."""
    return _MARKS[min(index // len(COLOURS), len(_MARKS) - 1)]


def setting(experiment: Experiment, metadata: Mapping[str, Any]) -> str:
    """Data, partition and model in one line, with the partition's first option and those that are not at their default.

    `metadata` : what the run found out; the number of clients of a population, which has no partition, is there.
    """
    return " · ".join([data_setting(experiment, metadata), _called(_network(experiment))])


def shared_setting(results: Sequence[RunResult]) -> str:
    """The same of runs on the same data and partition, with what their models have in common."""
    first, *others = (_network(result.experiment) for result in results)
    common = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    data = data_setting(results[0].experiment, results[0].metadata)
    return " · ".join([data, _called(common)]) if "name" in common else data


def data_setting(experiment: Experiment, metadata: Mapping[str, Any]) -> str:
    """The same without the model."""
    values = settings(experiment)
    data, partition = values["data"]["name"], values.get("partition")
    if partition is None:
        clients = [f"{metadata['num_clients']:,} clients"] if "num_clients" in metadata else []
        return " · ".join([data, *clients])
    count = partition.pop("clients", None)
    defaults = {field.name: field.default for field in fields(experiment.partition)}
    always = list(partition)[:2]  # its name and its first option, such as alpha
    partition = {key: value for key, value in partition.items() if key in always or value != defaults[key]}
    return " · ".join([data, *([f"{count} clients"] if count else []), _called(partition)])


def _network(experiment: Experiment) -> dict[str, Any]:
    """The model's name, and its settings that are not at their default."""
    model = settings(experiment)["model"]
    network = {key: value for key, value in model.items() if value != _NETWORK.get(key)}
    if "pretrain" in network:
        network.pop("weights", None)  # a file that follows from the other settings
    return network | ({"weights": Path(network["weights"]).name} if "weights" in network else {})


def settings(experiment: Experiment) -> dict[str, Any]:
    """All settings, without the partition where the data is a population, which has none."""
    values = experiment.to_dict()
    if is_described(experiment.data):
        del values["partition"]
    return values


def _called(component: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in component.items() if key != "name" and value is not None)
    return f"{component['name']}({options})" if options else component["name"]


def _names_and_settings(experiments: Sequence[Experiment]) -> tuple[list[str], list[str]]:
    """Methods with the options in which they differ, and what tells their settings apart."""
    methods = [experiment.to_dict()["method"] for experiment in experiments]
    full = {method["name"] for method in methods}
    short = {name: name.rpartition(":")[2] for name in full}
    if len(set(short.values())) < len(full):
        short = {name: name for name in full}
    names = []
    for method in methods:
        same = [other for other in methods if other["name"] == method["name"]]
        options = [f"{key}={value}" for key, value in method.items() if any(other[key] != value for other in same)]
        names.append(" ".join([short[method["name"]], *options]))
    return names, _suffixes(names, [_deciding(experiment) for experiment in experiments])


def _deciding(experiment: Experiment) -> dict[str, Any]:
    """The settings, other than method and seed, that decide a result up to rounding."""
    apart = [*_BY_ROUNDING, *_SHOWN_APART]
    if experiment.model.pretrain is not None:
        apart.append("model.weights")  # a file that follows from the other settings
    if is_described(experiment.data):
        apart.append("partition")
    found = flatten(deciding_settings(experiment))
    return {key: value for key, value in found.items() if not any(is_in(key, one) for one in apart)}


def _suffixes(names: Sequence[str], settings: Sequence[dict[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]
    of_name = dict(zip(names, settings, strict=True))
    one_each = len(of_name) > 1 and all(of_name[name] == one for name, one in zip(names, settings, strict=True))
    searched = len({name.split()[0] for name in names}) == 1  # the first one's values are as much its own as others'
    if len(differing) < 2 and not one_each:
        return ["".join(f" {key}={one.get(key)}" for key in differing) for one in settings]
    own = [_own(one, {} if searched else settings[0], differing) for one in settings]
    named = ["".join(f" {key}={value}" for key, value in mine.items()) for mine in own]
    meant: dict[tuple[str, str], dict[str, Any]] = {}
    pairs = zip(zip(names, named, strict=True), settings, strict=True)
    if max(map(len, named)) <= _LONGEST and all(meant.setdefault(label, one) == one for label, one in pairs):
        return named
    kinds: list[dict[str, Any]] = []
    for one in settings:
        kinds += [one] if one not in kinds else []
    return [f" · settings {_letter(kinds.index(one))}" for one in settings]


def _own(settings: dict[str, Any], first: dict[str, Any], differing: Sequence[str]) -> dict[str, Any]:
    """The `settings` that differ from the first ones; of another network or optimizer, only its name."""
    own = {key: settings[key] for key in differing if key in settings and settings[key] != first.get(key)}
    named = [key.removesuffix(".name") for key in own if key.endswith(".name")]
    rest = {key: value for key, value in own.items() if not key.startswith(tuple(f"{name}." for name in named))}
    return {**{name: own[f"{name}.name"] for name in named}, **rest}


def _letter(index: int) -> str:
    """A to Z, then AA to AZ and so on."""
    before, last = divmod(index, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)


def legend(groups: Sequence[RunGroup]) -> list[str]:
    """What stands below a table of results: over which rounds and seeds its numbers are."""
    averaged = {len(result.last_rounds) for group in groups for result in group.results} - {0, 1}
    lines = [f"Means over the last {rounds} evaluated rounds." for rounds in sorted(averaged)]
    if any(len(group.results) > 1 for group in groups):
        lines.append("±: standard deviation over seeds.")
    return lines
