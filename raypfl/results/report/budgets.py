"""Tables of what each method spends until all are as good, and of how good each is on the budget of the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from raypfl.results.budgets import cost_to_target, score_within
from raypfl.results.numbers import Axis, has_simulated_time, positions
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
    """Return what runs cost: megabytes, seconds and, if time is simulated, seconds and energy of the devices."""
    axes: list[Axis] = ["megabytes", "seconds"]
    if all(map(has_simulated_time, groups)):
        axes += ["simulated_seconds", "kilojoules"]
    return axes


def for_target(groups: Sequence[RunGroup], protocol: str, axes: Sequence[Axis]) -> BudgetTable | None:
    """Return what each method spends until it is first as good as the worst one at its end; None for one method."""
    finals = {i: fmean(group.scores(protocol)) for i, group in enumerate(groups) if group.scores(protocol)}
    finite = [final for final in finals.values() if isfinite(final)]
    if len(finals) < 2 or not finite:
        return None

    unit = groups[0].unit
    target = min(finite) if unit.metric.higher_is_better else max(finite)
    columns: list[Axis] = ["round", *axes]

    def cell(group: RunGroup, axis: Axis) -> str:
        model = group.deployed(protocol)
        costs = [cost_to_target(result, target, axis, protocol, model) for result in group.results]
        reached = [cost for cost in costs if cost is not None]
        return _mean(reached) if len(reached) == len(costs) else f"{len(reached)} of {len(costs)} seeds"

    return BudgetTable(
        title=f"To {unit.text(target)}{unit.sign or f' {unit.phrase}'}",
        headings=[_HEADINGS[axis] for axis in columns],
        lines=[(i, groups[i].label, [cell(groups[i], axis) for axis in columns]) for i in finals],
        note="What is spent until the first evaluation that is as good as the worst method's result, mean over seeds.",
    )


def within_budgets(groups: Sequence[RunGroup], protocol: str, axes: Sequence[Axis]) -> BudgetTable | None:
    """Return how good each method is with what the cheapest one spends in all; None for one method."""
    tested = {i: group for i, group in enumerate(groups) if group.scores(protocol)}
    if len(tested) < 2:
        return None

    unit = groups[0].unit
    results = [result for group in tested.values() for result in group.results]
    budgets = {axis: min(positions(result, axis)[-1] for result in results) for axis in axes}

    def cell(group: RunGroup, axis: Axis) -> str:
        model = group.deployed(protocol)
        scores = [score_within(result, budgets[axis], axis, protocol, model) for result in group.results]
        known = [score for score in scores if score is not None]
        return unit.text(fmean(known)) if known else "–"

    return BudgetTable(
        title=f"{capitalised(unit.phrase)} on equal budgets",
        headings=[f"{budget:,.3g} {_HEADINGS[axis]}" for axis, budget in budgets.items()],
        lines=[(i, group.label, [cell(group, axis) for axis in axes]) for i, group in tested.items()],
        note="In the last evaluation within what the cheapest run spends in all, mean over seeds.",
    )


def _mean(values: Sequence[float]) -> str:
    mean = fmean(values)
    return f"{mean:,.0f}" if mean >= 100 or mean == round(mean) else f"{mean:.3g}"
