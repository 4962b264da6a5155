"""What a run spends until a target, and how good it is within a budget: rounds, traffic, time and energy."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from raypfl.results.numbers import Axis, evaluated_rows, positions
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

_ROUNDING = 1e-9
"""The relative difference up to which two means of the same numbers, added up in other orders, count as equal."""


def cost_to_target(result: RunResult, target: float, against: Axis, protocol: str, model: str) -> float | None:
    """Return what a run had spent when it was first evaluated to be as good as the target; None: it never was.

    Parameters
    ----------
    target : the primary metric, mean over clients, in its unit: 90 for 90 %.
    against : what is counted.
    protocol, model : which evaluation, such as ``local``, and of which models, ``personal`` or ``global``.
    """
    rounds, scores = _scores(result, protocol, model)
    reached = as_good_as(scores, target, Unit(result.experiment.measures.primary))
    if not reached.any():
        return None
    return float(positions(result, against)[rounds[np.argmax(reached)]])


def score_within(result: RunResult, budget: float, against: Axis, protocol: str, model: str) -> float | None:
    """Return how good a run was in its last evaluation within a budget, in the metric's unit; None: it had none.

    Parameters are as for :func:`cost_to_target`.
    """
    rounds, scores = _scores(result, protocol, model)
    within = np.flatnonzero(positions(result, against)[rounds] <= budget)
    return float(scores[within[-1]]) if len(within) else None


def as_good_as(scores: np.ndarray, target: float, unit: Unit) -> np.ndarray:
    """Return whether each of the scores is as good as the target, ``bool`` of their shape; all are in the unit."""
    # The target may be a run's own final mean.
    rounding = _ROUNDING * abs(target)
    return scores >= target - rounding if unit.metric.higher_is_better else scores <= target + rounding


def _scores(result: RunResult, protocol: str, model: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the evaluated rounds, ascending, and the mean over clients in each, in the metric's unit."""
    unit = Unit(result.experiment.measures.primary)
    name = unit.metric.name
    rows = evaluated_rows(result, protocol, model).group_by("round", use_threads=False).aggregate([(name, "mean")])
    rows = rows.sort_by("round")
    return rows["round"].to_numpy(), pc.multiply(rows[f"{name}_mean"], unit.factor).to_numpy()
