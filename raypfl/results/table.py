"""The table of results, for the terminal, the report and MLflow: groups of runs down, aggregates across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from raypfl.evaluation.masking import unmasked_name
from raypfl.results.compared import RunGroup
from raypfl.results.units import Cell, Unit, over_seeds

MODELS = ("personal", "global")


@dataclass(frozen=True)
class Column:
    """An aggregate of one of a method's models or, without `model`, of the one that its clients use.

    Attributes
    ----------
    heading : with line breaks for narrow tables.
    aggregate : a name in ``measures.aggregates``; empty: the primary metric.
    """

    heading: str
    aggregate: str = ""
    model: str = ""


@dataclass(frozen=True)
class Block:
    """Results on one protocol, in the last evaluated round or, if `best`, in the one that validation data chose.

    Attributes
    ----------
    rows : for each group that has such results, by its index: a cell for each column.
    """

    protocol: str
    best: bool
    rows: dict[int, list[Cell]]


def columns(compared: Sequence[RunGroup]) -> list[Column]:
    """The primary metric of both models, its spread, and the other shown metrics that have a value."""
    measures = compared[0].measures
    spread = [Column("std", "std"), Column("worst\ndecile", "worst_decile"), Column("by\nsamples", "weighted")]
    others = [
        Column(metric.heading or metric.name, metric.name)
        for metric in measures.others
        if metric.shown and any(one.scores(name, aggregate=metric.name) for one in compared for name in one.protocols)
    ]
    return [*(Column(model, model=model) for model in MODELS), *spread, *others]


def blocks(compared: Sequence[RunGroup], columns: Sequence[Column]) -> list[Block]:
    """The rows of all tests, then those of tests in the round that validation data chose, then those of validation."""
    made = []
    for protocol, best in tests_of(compared):
        there = [i for i, one in enumerate(compared) if protocol in one.protocols and (one.has_best or not best)]
        down = [_cells([compared[i] for i in there], column, protocol, best) for column in columns]
        made.append(Block(protocol, best, {i: [cells[row] for cells in down] for row, i in enumerate(there)}))
    return [block for block in made if block.rows]


def tests_of(compared: Sequence[RunGroup]) -> list[tuple[str, bool]]:
    """Protocols, in the order of the blocks, and whether in the round that validation data chose."""
    protocols = list(dict.fromkeys(name for group in compared for name in group.protocols))
    tests = [name for name in protocols if unmasked_name(name) != "val"]
    validation = [name for name in protocols if name not in tests]
    return [(name, False) for name in tests] + [(name, True) for name in tests] + [(name, False) for name in validation]


def _cells(groups: Sequence[RunGroup], column: Column, protocol: str, best: bool) -> list[Cell]:
    """A column: with as many digits as its largest number needs, and the best of several means marked."""
    values = [one.scores(protocol, column.model, column.aggregate, best) for one in groups]
    rivals = [seeds for seeds in values if seeds]
    if not rivals:
        return [over_seeds(seeds) for seeds in values]
    measures = groups[0].measures
    aggregate = column.aggregate or measures.primary.name
    digits = Unit(measures.of(aggregate)).digits(value for seeds in rivals for value in seeds)
    if column.model and len(rivals) == 1:  # the only such model is best if it beats those that the others' clients use
        rivals = [seeds for one in groups if (seeds := one.scores(protocol, best=best))]
    means = [fmean(seeds) for seeds in rivals]
    top = (min if measures.lower_is_better(aggregate) else max)(means) if len(means) > 1 else None
    return [over_seeds(seeds, digits, None if top is None else f"{top:,.{digits}f}") for seeds in values]
