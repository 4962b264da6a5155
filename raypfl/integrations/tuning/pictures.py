"""Two pictures of a sweep: its configurations as lines over the settings, and how much each setting matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patheffects import withStroke

from raypfl.common.counting import counted
from raypfl.experiment.spaces import Space, values_by_column
from raypfl.results.drawing.canvas import png

ABSENT = -0.12
"""The height at which a configuration without a setting crosses that setting's axis."""

FEWEST = 4
"""Fewest trials from which importance is estimated."""

ENOUGH = 30
"""Fewest trials with which the estimate is not called rough."""


def draw_configurations(
    spaces: Sequence[Space], configurations: Sequence[dict[str, Any]], values: Sequence[float], label: str, path: Path
) -> None:
    """Write a PNG with an axis for each setting and one for the metric, and a line for each configuration.

    Parameters
    ----------
    configurations : the draws of each trial.
    values : the metric of each trial, in the unit of `label`.
    """
    rows = [values_by_column(list(spaces), draws) for draws in configurations]
    # A setting inside a choice may have been drawn in none of them.
    keys = [key for key in dict.fromkeys(space.key for space in spaces) if any(key in row for row in rows)]
    logarithmic = {space.key for space in spaces if space.is_logarithmic}

    with png(path, 2.4 * (len(keys) + 1), 4.5) as figure:
        axes = figure.subplots()
        axes.grid(False)
        columns = [_column([row.get(key) for row in rows], key in logarithmic) for key in keys]
        columns.append(_column(list(values), False))

        norm = Normalize(min(values), max(values))
        colours = matplotlib.colormaps["viridis"]
        for i in np.argsort(values):  # the largest last, on top of the others
            line = [heights[i] for heights, _ in columns]
            axes.plot(range(len(columns)), line, color=colours(norm(values[i])), linewidth=1.4, alpha=0.8)

        style: dict[str, Any] = {"fontsize": 8, "path_effects": [withStroke(linewidth=2.5, foreground="white")]}
        for x, (_, ticks) in enumerate(columns):
            axes.axvline(x, color="#999999", linewidth=1)
            for height, text in ticks:
                axes.plot(x, height, "_", color="#999999")
                axes.annotate(text, (x, height), (3, 2), textcoords="offset points", va="bottom", **style)

        axes.set_xticks(range(len(columns)), [*keys, label])
        axes.set_yticks([])
        axes.set_xlim(-0.15, len(columns) - 0.6)
        axes.spines[:].set_visible(False)
        axes.set_title(counted(len(values), "configuration"))
        figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, pad=0.02)


def _column(values: list[Any], logarithmic: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the values as heights on an axis, and the axis's ticks, each a height and a text.

    Heights are from 0 to 1, or `ABSENT` for None, the value of a configuration without this setting.
    """
    present = [value for value in values if value is not None]
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in present)
    if are_numbers:
        heights, ticks = _axis_of_numbers(present, logarithmic)
    else:
        heights, ticks = _axis_of_names([str(value) for value in present])

    if len(present) < len(values):
        ticks = [*ticks, (ABSENT, "none")]
    remaining = iter(heights)
    return [ABSENT if value is None else next(remaining) for value in values], ticks


def _axis_of_numbers(values: list[Any], logarithmic: bool) -> tuple[list[float], list[tuple[float, str]]]:
    scaled = [math.log10(value) if logarithmic else float(value) for value in values]
    low = min(scaled)
    high = max(scaled)
    span = (high - low) or 1.0
    heights = [(value - low) / span for value in scaled]
    if high == low:
        return heights, [(0.0, f"{values[0]:.3g}")]

    ticks = []
    for quarter in range(5):
        tick = low + span * quarter / 4
        ticks.append((quarter / 4, f"{10**tick if logarithmic else tick:.3g}"))
    return heights, ticks


def _axis_of_names(values: list[str]) -> tuple[list[float], list[tuple[float, str]]]:
    names = sorted(set(values))
    height_of = {name: position / max(len(names) - 1, 1) for position, name in enumerate(names)}
    return [height_of[value] for value in values], [(height, name) for name, height in height_of.items()]


def importances(
    spaces: Sequence[Space], configurations: Sequence[dict[str, Any]], values: Sequence[float]
) -> dict[str, float]:
    """Return each setting's share of the metric's variance over the space, the largest first.

    The shares are those of fANOVA (Hutter et al. 2014). They are empty for fewer than `FEWEST` trials, or if all have
    the same value. A setting inside a choice has none, since not every configuration has it.
    """
    import optuna

    if len(values) < FEWEST or len(set(values)) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    common = [space for space in spaces if not space.owner]
    distributions = {space.name: _distribution(space) for space in common}
    study = optuna.create_study()
    for draws, value in zip(configurations, values, strict=True):
        # A draw may be a rounding error outside of its range.
        inside = {space.name: space.inside(draws[space.name]) for space in common if space.is_range}
        parameters = {space.name: draws[space.name] for space in common} | inside
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=distributions, value=value))

    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {str(name): float(share) for name, share in shares.items()}


def _distribution(space: Space) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not space.is_range:
        return CategoricalDistribution(list(range(len(space.values))))
    low, high = space.values
    distribution = IntDistribution if space.is_integer else FloatDistribution
    return distribution(low, high, log=space.is_logarithmic)


def draw_importances(shares: dict[str, float], trials: int, metric: str, path: Path) -> None:
    """Write a PNG with a bar for each setting's share, which was estimated from `trials` trials."""
    with png(path, 7, 1.2 + 0.4 * len(shares)) as figure:
        axes = figure.subplots()
        names = list(shares)[::-1]
        bars = axes.barh(names, [100 * shares[name] for name in names], color="#4C72B0")
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=9)
        axes.set(xlim=(0, 100), xlabel=f"share of the variance of {metric} over the search space (%)")
        axes.grid(False, axis="y")
        rough = ", a rough estimate" if trials < ENOUGH else ""
        axes.set_title(f"How much each setting matters ({trials} trials{rough})")
