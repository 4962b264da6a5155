"""Runs grouped by method: runs that differ in their seed alone are repetitions of one method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raypfl.common.counting import numbered
from raypfl.common.errors import ConfigError
from raypfl.evaluation.run_metrics import PRIMARY_AGGREGATES, Measures, is_tested_once
from raypfl.results.colours import colour
from raypfl.results.labels import labels
from raypfl.results.setting_text import data_text
from raypfl.results.units import Unit
from raypfl.runs.records import SUMMARY, WITHOUT_RESULT
from raypfl.runs.result import RunResult
from raypfl.runs.several.sweeps import searched_settings


@dataclass(frozen=True)
class RunGroup:
    """Runs of one method with the same options and settings, one for each seed."""

    label: str
    colour: str
    results: tuple[RunResult, ...]

    @property
    def measures(self) -> Measures:
        """The metrics of the runs."""
        return self.results[0].experiment.measures

    @property
    def unit(self) -> Unit:
        """The unit of the primary metric."""
        return Unit(self.measures.primary)

    def scores(self, protocol: str, model: str = "", aggregate: str = "", best: bool = False) -> list[float]:
        """Return one number per seed, in the metric's unit; nothing where there is none.

        Parameters
        ----------
        model : ``personal`` or ``global``; empty: the one that clients use.
        aggregate : a name in ``measures.aggregates``; empty: the primary metric. One model on one test set has no
            spread over clients.
        best : whether to take the round that validation data chose, instead of the last evaluated one.
        """
        aggregate = aggregate or self.measures.primary.name
        model = model or self.deployed(protocol)

        has_no_spread = aggregate in PRIMARY_AGGREGATES and is_tested_once(protocol, model)
        if aggregate not in self.measures.aggregates or has_no_spread:
            return []

        values = []
        for row in self._summaries[best]:
            if (row["protocol"], row["model"]) == (protocol, model) and aggregate in row:
                values.append(row[aggregate])
        return Unit(self.measures.metric_of(aggregate)).of(values)

    @cached_property
    def _summaries(self) -> dict[bool, list[dict[str, Any]]]:
        """Summary rows of all seeds, by whether they are of the best round (True) or of the last one (False)."""
        last = [row for result in self.results for row in result.summary()]
        best = [row for result in self.results for row in result.summary(result.best_round)]
        return {False: last, True: best}

    @property
    def protocols(self) -> list[str]:
        """The evaluated protocols, in order."""
        return list(dict.fromkeys(row["protocol"] for row in self._summaries[False]))

    @property
    def has_best(self) -> bool:
        """Whether validation data chose a round of every run."""
        return all(result.best_round is not None for result in self.results)

    @property
    def leaves_untrained(self) -> bool:
        """Whether a part of the global model has its initial values, so that its scores say little about the method."""
        return self.results[0].experiment.method.leaves_untrained()

    def was_tested(self, protocol: str, best: bool) -> bool:
        """Return whether there are results on a protocol, of the last round or of the `best` by validation data."""
        if best and not self.has_best:
            return False
        return protocol in self.protocols

    def deployed(self, protocol: str) -> str:
        """Return the model that clients use: ``personal`` where the method makes personal models, else ``global``."""
        return "personal" if self.scores(protocol, "personal") else "global"


def group_runs(results: Sequence[RunResult]) -> list[RunGroup]:
    """Group results by everything but the seed, in order of first appearance; without runs `without_result`."""
    members: dict[str, list[RunResult]] = {}
    for label, result in labelled(results):
        runs = members.setdefault(label, [])
        if result.status not in WITHOUT_RESULT or (len(results) == 1 and result.evaluations.num_rows):
            runs.append(result)
    return [RunGroup(label, colour(i), tuple(runs)) for i, (label, runs) in enumerate(members.items()) if runs]


def refuse_no_results(results: object, function: str) -> None:
    """Raise a ConfigError unless `results`, which were given to a function of this name, are a list of results."""
    if not (isinstance(results, Sequence) and results and all(isinstance(result, RunResult) for result in results)):
        raise ConfigError(
            f"{function} takes a list of results, such as [a, b] with a = raypfl.run(...) or, from a run's folder, "
            "b = raypfl.Result.load(FOLDER)."
        )


def refuse_untested(result: RunResult) -> None:
    """Raise a ConfigError if a run has no evaluation, and did not diverge or fail, which would say why."""
    if result.evaluations.num_rows or result.status in WITHOUT_RESULT:
        return
    if result.status == "finished":
        raise ConfigError(f"{result.run_dir} has no results, since no client was tested in it.")
    raise ConfigError(f"{result.run_dir} ended before its first evaluation.")


def without_repetitions(results: Sequence[RunResult]) -> tuple[list[RunResult], list[str]]:
    """Return the run of each experiment and seed that ended last, and a sentence on each other one.

    To count one seed twice would shift means, and make deviations over seeds too small.
    """
    keys = []
    for label, result in zip(labels([result.experiment for result in results]), results, strict=True):
        # A label leaves out the folder of the data, which may be elsewhere on another machine.
        keys.append((label, result.experiment.seed, data_text(result)))
    last: dict[tuple[str, int, str], RunResult] = {}
    for key, result in zip(keys, results, strict=True):
        if key not in last or _end_time(result) >= _end_time(last[key]):
            last[key] = result

    sentences = []
    for key, result in zip(keys, results, strict=True):
        counted_run = last[key]
        if result.run_dir != counted_run.run_dir:
            label, seed, _ = key
            is_edited = result.metadata.get("code") != counted_run.metadata.get("code")
            edited = ", with edited code" if is_edited else ""
            later = f"{counted_run.run_dir}, which ended later, is also {label} from seed {seed}{edited}."
            sentences.append(f"{result.run_dir} is left out: {later}")
    return list(last.values()), sentences


def _end_time(result: RunResult) -> int:
    """Return the time at which a run's end was written, in nanoseconds; 0 if its folder is gone."""
    summary = result.run_dir / SUMMARY
    return summary.stat().st_mtime_ns if summary.exists() else 0


def compared(results: Sequence[RunResult]) -> list[RunResult]:
    """Return the runs to compare, with those that diverged or failed; empty if none of the others was evaluated."""
    if not any(result.counts for result in results):
        return []
    return [result for result in results if result.counts or result.status in WITHOUT_RESULT]


def without_result(results: Sequence[RunResult]) -> list[tuple[str, RunResult]]:
    """Return the runs that diverged or failed, with their labels: what they had reached is compared with nothing.

    A run on its own is shown whatever became of it.
    """
    if len(results) == 1:
        return []
    return [(label, result) for label, result in labelled(results) if result.status in WITHOUT_RESULT]


def methods_without_result(results: Sequence[RunResult]) -> dict[str, str]:
    """Return the methods of which every run diverged or failed, with how: ``"diverged after round 2"``."""
    with_result = {group.label for group in group_runs(results)}
    ends: dict[str, list[str]] = {}
    for label, result in without_result(results):
        if label not in with_result:
            ends.setdefault(label, []).append(f"{result.status} after round {result.round}")
    return {label: ", ".join(dict.fromkeys(texts)) for label, texts in ends.items()}


def sentences_without_result(results: Sequence[RunResult]) -> list[str]:
    """Return a sentence on all runs that diverged or failed, if there are any."""
    ends = []
    for label, result in without_result(results):
        ends.append((label, result, f"{result.status} after round {result.round} of {result.experiment.rounds}"))
    texts = [f"{runs} ({end})" for runs, end in seeds_together(ends)]
    return [f"Without a result, and in no mean or difference: {'; '.join(texts)}."] if texts else []


def seeds_together(remarks: Iterable[tuple[str, RunResult, str]]) -> list[tuple[str, str]]:
    """Return remarks on labelled runs, with the runs of a label that have the same remark together.

    Each is such as ``("ditto, seeds 0 and 1", remark)``.
    """
    seeds: dict[tuple[str, str], list[int]] = {}
    for label, result, remark in remarks:
        seeds.setdefault((label, remark), []).append(result.experiment.seed)
    return [(f"{label}, {numbered('seed', numbers)}", remark) for (label, remark), numbers in seeds.items()]


def run_labels(results: Sequence[RunResult]) -> list[str]:
    """Return the label of each run's method, as :func:`raypfl.results.labels.labels` does.

    What distinguishes a method that has no result, such as a learning rate with which it diverged, is in its own label
    alone.
    """
    # Labels say how runs differ from the first: let that be one with a result.
    searched = searched_settings(results)
    order = sorted(range(len(results)), key=lambda i: results[i].status in WITHOUT_RESULT)
    by_index = dict(zip(order, labels([results[i].experiment for i in order], searched), strict=True))
    complete = [by_index[i] for i in range(len(results))]

    with_result = {by_index[i] for i in order if results[i].status not in WITHOUT_RESULT}
    shown = [result for label, result in zip(complete, results, strict=True) if label in with_result]
    short = iter(labels([result.experiment for result in shown], searched))
    shortened = [next(short) if label in with_result else label for label in complete]

    is_ambiguous = len(set(shortened)) < len(set(complete))
    return complete if is_ambiguous else shortened


def labelled(results: Sequence[RunResult]) -> list[tuple[str, RunResult]]:
    """Return the runs with their labels, as :func:`run_labels` gives them."""
    return list(zip(run_labels(results), results, strict=True))
