"""Tables of what each method spends until all are as good, and of how good each is on the budget of the cheapest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

import numpy as np

from raypfl.results.budgets import as_good_as
from raypfl.results.numbers import Axis, Curve, has_simulated_time, metric_curves, runs_together
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import capitalised

_HEADINGS: dict[Axis, str] = {
    "round": "rounds",
    "megabytes": "MB, up and down",
    "seconds": "seconds",
    "simulated_seconds": "simulated seconds",
    "kilojoules": "kJ",
}


@dataclass(frozen=True)
class BudgetTable:
    """A table of the report.

    Attributes
    ----------
    lines : a group's index, its label, and a cell for each heading.
    """

    title: str
    headings: list[str]
    lines: list[tuple[int, str, list[str]]]
    note: str


def axes_of(groups: Sequence[RunGroup]) -> list[Axis]:
    """Return what runs cost: megabytes, seconds and, if time is simulated, seconds and energy of the devices.

    Without seconds if any runs advanced together: their seconds are shares of a process, not a method's own cost.
    """
    axes: list[Axis] = ["megabytes"]
    if all(runs_together(group) == 1 for group in groups):
        axes.append("seconds")
    if all(map(has_simulated_time, groups)):
        axes += ["simulated_seconds", "kilojoules"]
    return axes


def for_target(groups: Sequence[RunGroup], protocol: str, axes: Sequence[Axis]) -> BudgetTable | None:
    """Return what each method spends until it is first as good as the worst one at its end; None for one method."""
    finals = [fmean(group.scores(protocol)) for group in groups if group.scores(protocol)]
    finite = [final for final in finals if isfinite(final)]
    if len(finals) < 2 or not finite:
        return None

    unit = groups[0].unit
    target = min(finite) if unit.metric.higher_is_better else max(finite)
    columns: dict[str, dict[int, str]] = {}
    for axis in ("round", *axes):
        column = columns[_HEADINGS[axis]] = {}
        for i, curve in _curves(groups, protocol, axis).items():
            reached = np.flatnonzero(as_good_as(curve.mean, target, unit))
            column[i] = _number(curve.x[reached[0]]) if len(reached) else "–"
    return BudgetTable(
        title=f"To {unit.in_words(target)}",
        headings=list(columns),
        lines=_lines(groups, columns.values()),
        note="What is spent until the mean over seeds is first as good as the worst method's result. –: never.",
    )


def within_budgets(groups: Sequence[RunGroup], protocol: str, axes: Sequence[Axis]) -> BudgetTable | None:
    """Return how good each method is with what the cheapest one spends; None for one method, or if none spends any.

    Methods that spend nothing, such as training alone, are not the cheapest.
    """
    unit = groups[0].unit
    columns: dict[str, dict[int, str]] = {}
    for axis in axes:
        curves = _curves(groups, protocol, axis)
        spent = [curve.x[-1] for curve in curves.values() if curve.x[-1] > 0]
        if len(curves) < 2 or not spent:
            continue

        column = columns[f"{min(spent):,.3g} {_HEADINGS[axis]}"] = {}
        for i, curve in curves.items():
            affordable = curve.mean[curve.x <= min(spent)]
            column[i] = unit.text(affordable[-1]) if len(affordable) else "–"
    if not columns:
        return None
    return BudgetTable(
        title=f"{capitalised(unit.phrase)} on equal budgets",
        headings=list(columns),
        lines=_lines(groups, columns.values()),
        note="In the last evaluation by which a method spends no more than the cheapest one that spends any, mean over "
        "seeds. –: there is none.",
    )


def _curves(groups: Sequence[RunGroup], protocol: str, axis: Axis) -> dict[int, Curve]:
    """Curves of the models that clients use, by the index of the group."""
    curves = metric_curves(groups, protocol, axis)
    return {i: curve for (i, model), curve in curves.items() if model == groups[i].deployed(protocol)}


def _lines(groups: Sequence[RunGroup], columns: Iterable[Mapping[int, str]]) -> list[tuple[int, str, list[str]]]:
    """A line for each group that is in a column; columns hold cells by the index of the group."""
    lines = []
    for i, group in enumerate(groups):
        if any(i in column for column in columns):
            lines.append((i, group.label, [column.get(i, "–") for column in columns]))
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.3g}"
