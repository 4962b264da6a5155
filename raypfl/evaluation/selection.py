"""The best round, and when to stop, by validation data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raypfl.evaluation.measures import Measures
from raypfl.evaluation.settings import EvaluationSettings

PROTOCOL = "val"


class Selection(NamedTuple):
    """What validation says so far.

    Attributes
    ----------
    round : the best one, the earliest among equals; None: no round has a value.
    value : of the metric there.
    waited : evaluations since then, none of them better.
    """

    round: int | None
    value: float | None
    waited: int

    def is_over(self, settings: EvaluationSettings) -> bool:
        """Whether patience is at its end."""
        return settings.patience is not None and self.waited >= settings.patience


def select(measures: Measures, validated: Mapping[int, Mapping[str, Any]], settings: EvaluationSettings) -> Selection:
    """The best of the evaluated rounds.

    Parameters
    ----------
    validated : round -> its :func:`deciding` aggregates, ascending. A metric that is missing or NaN is never best.
    """
    metric = settings.metric or measures.primary.name
    sign = -1 if _lower_is_better(measures, metric, settings.mode) else 1
    values = {round: sign * row.get(metric, math.nan) for round, row in validated.items()}
    known = {round: value for round, value in values.items() if not math.isnan(value)}
    if not known:
        return Selection(None, None, len(values))
    best = max(known, key=lambda round: (known[round], -round))
    return Selection(best, sign * known[best], sum(round > best for round in values))


def deciding(summary: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The aggregates on the clients' own validation splits in a round's summary; None if it was not validated.

    Those of the personal models where the method makes any, else of the global one. Nothing else is looked at.
    """
    rows = {row["model"]: row for row in summary if row["protocol"] == PROTOCOL}
    row = rows.get("personal", rows.get("global"))
    return None if row is None else dict(row)


def _lower_is_better(measures: Measures, metric: str, mode: str) -> bool:
    """As the settings say or, if they leave it open, as the metric has it."""
    return measures.lower_is_better(metric) if mode == "auto" else mode == "min"
