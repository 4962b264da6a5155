"""Sentences below a table of paired differences: what the numbers are, and what they cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat

from raypfl.common.counting import numbered
from raypfl.results.pairing import bootstrap
from raypfl.results.pairing.differences import Difference
from raypfl.results.run_groups import RunGroup, seeds_together
from raypfl.runs.result import RunResult

COVERAGE = {2: 50, 3: 75, 4: 80, 5: 85}
"""Number of seeds -> in how many of 100 cases an interval contains the true difference, if differences vary much
between seeds. With two seeds, and with three, it is about that from the least difference of a seed to the greatest."""

ENOUGH_SEEDS = 6
"""Fewest seeds with which a two-sided Wilcoxon test can give p < 0.05: over n seeds, p is at least 2 / 2^n."""


def remarks(rows: Sequence[Difference], groups: Sequence[RunGroup]) -> list[str]:
    """Return sentences for below a table of the differences between `groups`; without rows, those on their code."""
    if not rows:
        return _code_remarks(groups)

    unit = rows[0].unit
    in_points = " in points" if unit.sign else ""
    first = f"Paired differences{in_points}, seed by seed and client by client, of the models that clients use."
    second = "Ahead: in how many seeds, and in what share of the bootstrap's draws, the method is better."
    if not unit.metric.higher_is_better:
        second = (
            "Ahead: in how many seeds, and in what share of the bootstrap's draws, the method is better, that is lower."
        )
    lines = [first, second, *_resampling_remarks(rows)]

    seeds = max(len(row.by_seed) for row in rows)
    if 1 < seeds < ENOUGH_SEEDS:
        lines.append(
            f"{seeds} seeds cannot show much: a two-sided Wilcoxon test over them gives p = {2 / 2**seeds:.2g} at "
            f"best, and p below 0.05 takes {ENOUGH_SEEDS} seeds or more. The interval is too narrow, too: if "
            f"differences vary much between seeds, it contains the true one in only about {COVERAGE[seeds]}% of cases."
        )

    results_of = {group.label: group.results for group in groups}
    for row in rows:
        remark = _unpaired_remark(row, results_of[row.method], results_of[row.baseline])
        if remark and remark not in lines:
            lines.append(remark)
    return lines + _code_remarks(groups)


def _code_remarks(groups: Sequence[RunGroup]) -> list[str]:
    """Return a sentence for each module of the user's own that was edited between runs of the `groups`."""
    versions: dict[str, dict[str, list[tuple[str, RunResult]]]] = {}
    for group in groups:
        for result in group.results:
            for module, digest in result.metadata.get("code", {}).items():
                versions.setdefault(module, {}).setdefault(digest, []).append((group.label, result))

    sentences = []
    for module, runs_by_version in versions.items():
        if len(runs_by_version) == 1:
            continue
        sentence = f"{module}, or what it imports, was edited between these runs."
        for heading, runs in zip(chain(["One version"], repeat("Another")), runs_by_version.values(), strict=False):
            names = seeds_together((label, result, "") for label, result in runs)
            sentence += f" {heading}: {'; '.join(name for name, _ in names)}."
        sentences.append(f"{sentence} Their differences are those of the versions, too.")
    return sentences


def _resampling_remarks(rows: Sequence[Difference]) -> list[str]:
    """Return sentences on how intervals and draws are computed."""
    resampled = [row for row in rows if row.draws_ahead is not None]
    alone = [row for row in rows if row.draws_ahead is None and row.mean is not None]
    no_interval = ["No interval (–): there is one seed, and in it one test, of global models or of a single client."]
    if not resampled:
        return no_interval if alone else []

    several_seeds = any(len(row.by_seed) > 1 for row in resampled)
    levels = []
    if several_seeds:
        levels.append("the seeds")
    if any(row.over_clients for row in resampled):
        levels.append("the clients")

    lines = [f"The 95% interval is that of {bootstrap.DRAWS:,} bootstrap draws of {' and '.join(levels)}."]
    if not several_seeds:
        lines.append("There is only one seed, which does not show how results vary between seeds.")
    return lines + no_interval if alone else lines


def _unpaired_remark(row: Difference, results: Sequence[RunResult], references: Sequence[RunResult]) -> str:
    """Return a sentence on what is not paired; empty if all seeds are."""
    if all(row.by_seed.keys() == {result.experiment.seed for result in runs} for runs in (results, references)):
        return ""
    are_finished = all(result.status == "finished" for result in (*results, *references))
    if not row.by_seed:
        need = "the same data" if are_finished else "the same data and as many rounds"
        return f"{row.method} and {row.baseline} have no seed with {need} in common, so they are not paired."

    seeds = numbered("seed", list(row.by_seed))
    rule = "" if are_finished else " A stopped run is paired with one of as many rounds."
    return f"{row.method} against {row.baseline}: only over what both have, {seeds}.{rule}"
