"""The notes below a study's table: its legend, what a search chose, and where the runs depart from the publication."""

from __future__ import annotations

from collections.abc import Sequence

from raypfl.common.counting import counted, series
from raypfl.results.pairing import bootstrap
from raypfl.results.pairing.remarks import ENOUGH_SEEDS
from raypfl.results.ranking.standings import Standing
from raypfl.results.table import untrained_sentence
from raypfl.studies.description import PublishedTable, Study
from raypfl.studies.table.entries import TableEntry

PENDING = "…"
"""Mark of unfinished cells."""

NoteList = list[tuple[str, list[str]]]
"""Headings with lines."""


def notes_on(
    study: Study,
    published: PublishedTable | None,
    entries: Sequence[TableEntry],
    deviations: Sequence[str],
    searched: Sequence[str],
) -> NoteList:
    """Return the notes, of which the first is the legend; parameters as for `arrange` in ``layout.py``."""
    notes = [("Numbers", [_legend(published, entries)])]
    ranked = [entry.standing for entry in entries if entry.standing]
    if ranked:
        notes.append(("Against the best", _standing_remarks(ranked)))
    notes.append(("Search", [*searched]))
    if published:
        notes.append(("Published", [published.source, *published.notes]))
    notes.append(("Choices where the source leaves something open" if published else "Choices", study.choices))

    heading = "Deviations from the published protocol" if published else "Deviations"
    notes.append((heading, [*deviations] or ["None: everything was run as described."]))
    return [(heading, lines) for heading, lines in notes if lines]


def _legend(published: PublishedTable | None, entries: Sequence[TableEntry]) -> str:
    over = "the seeds"
    over_clients = dict.fromkeys(entry.metric for entry in entries if entry.spread_over == "clients")
    if over_clients:
        gaps = "; gap (gap of the ±)" if published else ""
        over = f"the clients, averaged over the seeds{gaps}"
        if any(entry.metric not in over_clients for entry in entries):
            over = f"the seeds or, in {series(over_clients)}, over {over}"
    all_in_percent = all(entry.label.endswith("(%)") for entry in entries)
    shares = "In %" if all_in_percent else "Shares in %"
    legend = f"{shares}. ± is the standard deviation over {over}."

    if any(entry.missing for entry in entries):
        legend += f" {PENDING} marks unfinished cells."
    if any(entry.never for entry in entries):
        legend += " Never: so many seeds did not reach the target."
    untrained = dict.fromkeys(entry.method for entry in entries if entry.untrained)
    if untrained:
        legend += f" {untrained_sentence(untrained)} It is not ranked."
    return legend


def _standing_remarks(standings: Sequence[Standing]) -> list[str]:
    remarks = [
        f"Of {bootstrap.DRAWS:,} bootstrap draws of seeds and clients, the same for all methods of a column: the "
        "middle 95% of a method's mean, of its difference from the method with the best mean (to best), and of its "
        "rank. P(better) is the share of draws in which it is better than that method; a tie counts half."
    ]
    seeds = min(standing.seeds for standing in standings)
    if seeds < ENOUGH_SEEDS:
        remarks.append(
            f"Over {counted(seeds, 'seed')}: a two-sided Wilcoxon test can give p < 0.05 from {ENOUGH_SEEDS} seeds on."
        )
    return remarks
