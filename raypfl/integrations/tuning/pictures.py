"""Two pictures of a sweep: all configurations as lines over the settings, and how much each setting matters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from raypfl.integrations.tuning.spaces import Space, shown
from raypfl.results.drawing import png

ABSENT = -0.12
"""Height of a line on the axis of a setting that its configuration does not have."""

FEWEST = 4
"""Trials from which importance is estimated."""

ENOUGH = 30
"""Trials from which the estimate no longer counts as rough."""


def draw_configurations(
    spaces: Sequence[Space], drawn: Sequence[dict[str, Any]], values: Sequence[float], label: str, path: Path
) -> None:
    """Write a PNG with an axis for each setting and one for the metric, and a line for each configuration.

    Parameters
    ----------
    drawn : of each trial, its configuration. values : of each trial, the metric in the unit of `label`.
    """
    rows = [shown(list(spaces), one) for one in drawn]
    keys = list(dict.fromkeys(space.key for space in spaces))
    logarithmic = {space.key for space in spaces if space.is_logarithmic}
    with png(path, 2.4 * (len(keys) + 1), 4.5) as figure:
        axes = figure.subplots()
        axes.grid(False)
        columns = [_column([row.get(key) for row in rows], key in logarithmic) for key in keys]
        columns.append(_column(list(values), False))
        norm, colours = Normalize(min(values), max(values)), matplotlib.colormaps["viridis"]
        for i in np.argsort(values):
            heights = [column[0][i] for column in columns]
            axes.plot(range(len(columns)), heights, color=colours(norm(values[i])), linewidth=1.4, alpha=0.8)
        for x, (_, ticks) in enumerate(columns):
            axes.axvline(x, color="#999999", linewidth=1)
            for height, text in ticks:
                ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1}
                axes.annotate(
                    text, (x, height), (4, 0), textcoords="offset points", va="center", fontsize=8, bbox=ground
                )
        axes.set_xticks(range(len(columns)), [*keys, label])
        axes.set_yticks([])
        axes.set_xlim(-0.15, len(columns) - 0.6)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{len(values)} configurations")
        figure.colorbar(ScalarMappable(norm, colours), ax=axes, label=label, pad=0.02)


def _column(values: list[Any], logarithmic: bool) -> tuple[list[float], list[tuple[float, str]]]:
    """Heights from 0 to 1, `ABSENT` where a configuration has no such setting, and the axis's tick labels."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        scaled = [math.log10(value) if logarithmic else float(value) for value in known]
        low, high = min(scaled), max(scaled)
        span = (high - low) or 1.0
        heights = iter([(value - low) / span for value in scaled])
        ticks = [(k / 4, f"{10 ** (low + span * k / 4) if logarithmic else low + span * k / 4:.3g}") for k in range(5)]
        ticks = ticks if high > low else [(0.0, f"{known[0]:.3g}")]
    else:
        names = sorted({str(value) for value in known})
        place = {name: k / max(len(names) - 1, 1) for k, name in enumerate(names)}
        heights = iter([place[str(value)] for value in known])
        ticks = [(height, name) for name, height in place.items()]
    if len(known) < len(values):
        ticks = [*ticks, (ABSENT, "none")]
    return [ABSENT if value is None else next(heights) for value in values], ticks


def importances(spaces: Sequence[Space], drawn: Sequence[dict[str, Any]], values: Sequence[float]) -> dict[str, float]:
    """Setting -> its share of the metric's variance over the space (fANOVA, Hutter et al. 2014), the largest first.

    Empty for fewer than `FEWEST` trials, or if all have the same value.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if len(values) < FEWEST or len(set(values)) == 1:
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def distribution(space: Space) -> Any:
        if not space.is_range:
            return CategoricalDistribution(list(range(len(space.values))))
        low, high = space.values
        return (IntDistribution if space.is_integer else FloatDistribution)(low, high, log=space.is_logarithmic)

    always = [space for space in spaces if not space.owner]
    study = optuna.create_study()
    for one, value in zip(drawn, values, strict=True):
        parameters = {space.name: one[space.name] for space in always}
        kinds = {space.name: distribution(space) for space in always}
        study.add_trial(optuna.trial.create_trial(params=parameters, distributions=kinds, value=value))
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {str(name): float(share) for name, share in found.items()}


def draw_importances(shares: dict[str, float], trials: int, metric: str, path: Path) -> None:
    """Write a PNG with a bar for each setting, estimated from so many trials."""
    with png(path, 7, 1.2 + 0.4 * len(shares)) as figure:
        axes = figure.subplots()
        names = list(shares)[::-1]
        bars = axes.barh(names, [100 * shares[name] for name in names], color="#4C72B0")
        axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=9)
        axes.set_xlim(0, 112)
        axes.set_xlabel(f"share of the variance of {metric} over the search space (%)")
        rough = ", a rough estimate" if trials < ENOUGH else ""
        axes.set_title(f"How much each setting matters ({trials} trials{rough})")
