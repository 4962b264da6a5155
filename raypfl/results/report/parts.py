"""The parts of a report: what is compared with what, and which of it may be called the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raypfl.common.errors import ConfigError
from raypfl.results.pairing.differences import find_baseline
from raypfl.results.report.searches.folders import chosen_trials
from raypfl.results.run_groups import RunGroup, group_runs
from raypfl.results.setting_text import data_text
from raypfl.runs.result import RunResult
from raypfl.runs.several.sweeps import sweep_of


@dataclass(frozen=True)
class Part:
    """Runs on the same data with the same primary metric, which are compared with each other.

    Of a sweep's trials, only the configuration that its search chose may be called the best: to name the trial that is
    best on test data would be to choose on test data.

    Attributes
    ----------
    groups : all of them that have a result.
    candidates : those that may be called the best.
    choices : a sentence on the choice of each search; empty: there is no trial of a sweep.
    chosen : labels of the configurations that searches chose.
    baseline : label of the group that the user compares the others with; None: the user names none.
    results : the groups' runs, and those that diverged or failed.
    """

    groups: list[RunGroup]
    candidates: list[RunGroup]
    choices: list[str]
    chosen: list[str]
    baseline: str | None = None
    results: Sequence[RunResult] = ()

    @property
    def reference(self) -> str | None:
        """Label of the group that differences are to: by default, what the first search chose; None: the best."""
        if self.baseline or not self.choices or len(self.groups) == 1:
            return self.baseline
        return next(iter(self.chosen), [*self.candidates, *self.groups][0].label)

    @property
    def bold(self) -> str:
        """What is bold in the table of results, as a sentence; empty: nothing is."""
        if self.is_one_choice:
            return "Bold: the configuration that the search chose."
        if len(self.candidates) < 2:
            return ""
        return f"Bold: the best of a column{', of what searches chose and of other runs' if self.choices else ''}."

    @property
    def is_one_choice(self) -> bool:
        """Whether what a search chose is beside nothing but trials that it did not choose."""
        return len(self.candidates) == 1 and self.candidates[0].label in self.chosen and len(self.groups) > 1


def parts_of(results: Sequence[RunResult], baseline: str | None = None) -> list[Part]:
    """Return the parts of a report on runs, by their data and primary metric.

    Raises
    ------
    ConfigError : if the baseline is in none of them, or no run has a result.
    """
    parts = [part for part in map(part_of, _by_setting(results)) if part.groups]
    if not parts:
        raise ConfigError("\n".join(without_part(results)))
    if baseline is None:
        return parts

    labels: list[str | None] = []
    errors = []
    for part in parts:
        try:
            labels.append(find_baseline(part.results, baseline))
        except ConfigError as error:
            labels.append(None)
            errors.append(error)
    if len(errors) == len(parts):
        raise errors[0]
    return [replace(part, baseline=label) for part, label in zip(parts, labels, strict=True)]


def without_part(results: Sequence[RunResult]) -> list[str]:
    """Return a sentence for each setting of the data that has no part in a report, since no run on it has a result."""
    sentences = []
    for comparable in _by_setting(results):
        if not group_runs(comparable):
            ends = [f"{result.run_dir} {result.status} after round {result.round}" for result in comparable]
            sentences.append(f"No run on {data_text(comparable[0])} has a result: {'; '.join(ends)}.")
    return sentences


def _by_setting(results: Sequence[RunResult]) -> list[list[RunResult]]:
    """Return the runs that can be compared: those on the same data with the same primary metric."""
    by_setting: dict[tuple[str, str], list[RunResult]] = {}
    for result in results:
        by_setting.setdefault((data_text(result), result.experiment.measures.primary.name), []).append(result)
    return list(by_setting.values())


def part_of(results: Sequence[RunResult]) -> Part:
    """Return runs on the same data as a part."""
    groups = group_runs(results)
    candidates = []
    chosen = []
    choices: dict[Path, str] = {}
    trials_of = {}  # read once for each sweep
    for group in groups:
        sweeps = {sweep_of(result.run_dir) for result in group.results}
        sweep = sweeps.pop()
        if sweep is None or sweeps:
            # Not only a sweep's trials.
            candidates.append(group)
            continue

        if sweep not in trials_of:
            trials_of[sweep] = chosen_trials(sweep, group.measures)
            choices[sweep] = f"The search {sweep.name} chose none of these configurations."
        metric, trials = trials_of[sweep]
        if any(result.run_dir.absolute().is_relative_to(trial) for trial in trials for result in group.results):
            candidates.append(group)
            chosen.append(group.label)
            choices[sweep] = f"The search {sweep.name} chose {group.label}, the best by {metric}."
    return Part(groups, candidates, list(choices.values()), chosen, results=results)
