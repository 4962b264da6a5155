"""The table of results, for the terminal, the report and MLflow: groups of runs down, aggregates across."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean

import pyarrow.compute as pc

from raypfl.common.counting import counted, numbered, series
from raypfl.evaluation.masking import unmasked_name
from raypfl.evaluation.protocols import BACKDOOR
from raypfl.evaluation.tables import MODELS
from raypfl.federation.robustness import ATTACKS
from raypfl.results.numbers import runs_together
from raypfl.results.run_groups import RunGroup, seeds_together
from raypfl.results.units import TableCell, Unit, number_text, over_seeds


@dataclass(frozen=True)
class Column:
    """An aggregate of one of a method's models or, without `model`, of the one that its clients use.

    Attributes
    ----------
    heading : the heading, with line breaks for narrow tables.
    aggregate : a name in ``measures.aggregates``; empty: the primary metric.
    """

    heading: str
    aggregate: str = ""
    model: str = ""


@dataclass(frozen=True)
class ProtocolResults:
    """Results on one protocol, in the last evaluated round or, if `best`, in the one that validation data chose.

    Attributes
    ----------
    rows : a cell for each column, by the index of the group; groups without such results are absent.
    """

    protocol: str
    best: bool
    rows: dict[int, list[TableCell]]


def result_columns(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the primary metric of both models, its spread, and the other shown metrics that have a value."""
    columns = [Column(model, model=model) for model in MODELS]
    columns += [Column("std", "std"), Column("worst\ndecile", "worst_decile"), Column("by\nsamples", "weighted")]

    for metric in groups[0].measures.secondary:
        if metric.shown and any(_has_values(group, metric.name) for group in groups):
            columns.append(Column(metric.heading or metric.name, metric.name))
    return columns


def _has_values(group: RunGroup, metric: str) -> bool:
    return any(group.scores(protocol, aggregate=metric) for protocol in group.protocols)


def result_rows(
    groups: Sequence[RunGroup], columns: Sequence[Column], candidates: Sequence[RunGroup] | None = None
) -> list[ProtocolResults]:
    """Return the rows of all tests, then of tests in the round that validation data chose, then of validation data.

    Parameters
    ----------
    candidates : the groups of which the best is marked in each column; None: all.
    """
    rivals = {group.label for group in (groups if candidates is None else candidates)}
    results = []
    for protocol, best in tests_of(groups):
        tested = {i: group for i, group in enumerate(groups) if group.was_tested(protocol, best)}
        if not tested:
            continue
        columns_of_cells = [_cells(list(tested.values()), column, protocol, best, rivals) for column in columns]
        cells_of_groups = map(list, zip(*columns_of_cells, strict=True))
        results.append(ProtocolResults(protocol, best, dict(zip(tested, cells_of_groups, strict=True))))
    return results


def protocols_of(groups: Sequence[RunGroup]) -> list[str]:
    """Return the protocols on which any group was tested, in the order of the group with most of them."""
    most_first = sorted(groups, key=lambda group: -len(group.protocols))
    return list(dict.fromkeys(name for group in most_first for name in group.protocols))


def tests_of(groups: Sequence[RunGroup]) -> list[tuple[str, bool]]:
    """Return each protocol with True for the round that validation data chose, in the order of the table."""
    last = []
    best = []
    validation = []
    for name in protocols_of(groups):
        if unmasked_name(name) == "val":
            validation.append((name, False))
        else:
            last.append((name, False))
            best.append((name, True))
    return [*last, *best, *validation]


def _cells(
    groups: Sequence[RunGroup], column: Column, protocol: str, best: bool, candidates: Collection[str]
) -> list[TableCell]:
    """Return a column's cells, with as many digits as its largest number needs.

    The best of several means is marked, of those groups whose labels are among the `candidates`. A global model that is
    partly untrained is none of them.
    """
    scores = [group.scores(protocol, column.model, column.aggregate, best) for group in groups]
    measures = groups[0].measures
    aggregate = column.aggregate or measures.primary.name
    digits = Unit(measures.metric_of(aggregate)).digits(value for seeds in scores for value in seeds)

    compete = [_competes(group, protocol, column.model, candidates) for group in groups]
    rivals = [seeds for seeds, competes in zip(scores, compete, strict=True) if seeds and competes]
    if column.model and len(rivals) == 1:
        # The only such model is best if it beats the models that clients of the other methods use.
        competitors = [group for group in groups if _competes(group, protocol, "", candidates)]
        rivals = [seeds for group in competitors if (seeds := group.scores(protocol, best=best))]

    means = [mean for mean in map(fmean, rivals) if not isnan(mean)]
    best_mean = None
    if len(rivals) > 1 and means:
        best_mean = number_text(min(means) if measures.lower_is_better(aggregate) else max(means), digits)
    return [
        over_seeds(seeds, digits, best_mean if competes else None)
        for seeds, competes in zip(scores, compete, strict=True)
    ]


def _competes(group: RunGroup, protocol: str, model: str, candidates: Collection[str]) -> bool:
    """Return whether a group's model, by default the one that its clients use, may be marked as the best."""
    is_untrained = group.leaves_untrained and (model or group.deployed(protocol)) == "global"
    return group.label in candidates and not is_untrained


def legend(groups: Sequence[RunGroup]) -> list[str]:
    """Return sentences for below the table: over which rounds and seeds its numbers are."""
    averaged = {len(result.last_rounds) for group in groups for result in group.results} - {0, 1}
    lines = [f"Means over the last {rounds} evaluated rounds." for rounds in sorted(averaged)]
    lines += _untested_clients(groups)
    lines += attack_sentences(groups)
    lines += untrained_parts(groups)
    lines += unequal_lengths(groups)
    lines += unequal_seeds(groups)
    lines += _unfinished(groups)
    if any(len(group.results) > 1 for group in groups):
        lines.append("±: standard deviation over seeds.")
    return lines


def _untested_clients(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence on clients that have no test samples, if there are any: they are in no mean over clients."""
    numbers = []
    for group in groups:
        if "local" in group.protocols:
            numbers += [result.metadata.get("clients_without_test_samples", 0) for result in group.results]
    fewest, most = (min(numbers), max(numbers)) if numbers else (0, 0)
    if not most:
        return []
    if fewest < most:
        return [f"{fewest} to {most} clients, by the seed, have no test samples and are left out of local."]
    return [f"{counted(most, 'client')} without test samples {'is' if most == 1 else 'are'} left out of local."]


def shared_seconds(groups: Sequence[RunGroup]) -> list[str]:
    """Return what the seconds of runs are that advanced together, if any did: not what a run takes on its own."""
    labels = [group.label for group in groups if runs_together(group) > 1]
    whose = f" of {series(labels)}" if 0 < len(labels) < len(groups) else ""
    sentence = (
        f"The runs{whose} advanced together: their seconds are their own turns in one process and a share of the "
        "trainings that were joined. This is not what a run takes on its own, and does not show how seeds differ."
    )
    return [sentence] if labels else []


def attack_sentences(groups: Sequence[RunGroup]) -> list[str]:
    """Return how many clients are malicious, that they are not evaluated, and how their success is tested."""
    sentences = []
    for group in groups:
        experiment = group.results[0].experiment
        if experiment.attack is not None:
            metadata = group.results[0].metadata
            name = ATTACKS.name_of(type(experiment.attack))
            count = f"{len(metadata['malicious_clients'])} of {counted(metadata['num_clients'], 'client')}"
            sentences.append(f"{count} attack ({name}); scores are of the honest ones.")
        if BACKDOOR in group.protocols:
            sentences.append(f"{BACKDOOR}: a client's own data, all with the attack's trigger.")
    return list(dict.fromkeys(sentences))


def untrained_parts(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence on global models of which a part was never trained, if there are any."""
    labels = []
    for group in groups:
        is_tested = any(group.scores(protocol, "global") for protocol in group.protocols)
        if is_tested and group.leaves_untrained:
            labels.append(group.label)
    return [untrained_sentence(labels)] if labels else []


def untrained_sentence(labels: Iterable[str]) -> str:
    """Return that the global models of these methods have a part that was never trained."""
    return f"In the global model of {' and of '.join(labels)}, what clients keep has its initial values."


def unequal_seeds(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence on which methods were run from which seeds, unless all are the same."""
    methods: dict[str, list[str]] = {}
    for group in groups:
        seeds = sorted(result.experiment.seed for result in group.results)
        methods.setdefault(numbered("seed", seeds), []).append(group.label)
    if len(methods) < 2:
        return []
    whose = "; ".join(f"{seeds} of {series(labels)}" for seeds, labels in methods.items())
    return [f"Methods were run from different seeds ({whose}), so their means are not of the same random draws."]


def _unfinished(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence on runs that have not come to their end, if there are any."""
    rounds = []
    for group in groups:
        for result in group.results:
            if result.status != "finished":
                done = f"{result.round} of {result.experiment.rounds} rounds"
                evaluated = max(result.last_rounds, default=result.round)
                if evaluated < result.round:
                    done += f", evaluated after {evaluated}"
                rounds.append((group.label, result, done))
    runs = [f"{names} ({done})" for names, done in seeds_together(rounds)]
    return [f"Not finished: {'; '.join(runs)}."] if runs else []


def _have_as_many_replies(groups: Sequence[RunGroup]) -> bool:
    """Return whether only asynchronous rounds, which fewer replies make, differ in number."""
    results = [result for group in groups for result in group.results]
    replies = {pc.sum(result.rounds["clients"]).as_py() for result in results}
    is_asynchronous = any(result.experiment.asynchronous.buffer is not None for result in results)
    return is_asynchronous and len(replies) == 1


def unequal_lengths(groups: Sequence[RunGroup]) -> list[str]:
    """Return a caution if not all methods were trained for as many rounds, since a table ranks them side by side."""
    lengths = {frozenset(max(result.last_rounds) for result in group.results) for group in groups}
    if len(lengths) < 2 or _have_as_many_replies(groups):
        return []
    rounds = frozenset().union(*lengths)
    return [
        f"The methods are ranked as they were after {min(rounds)} to {max(rounds)} rounds, each at its own end: a "
        "longer training may be why one is ahead."
    ]
