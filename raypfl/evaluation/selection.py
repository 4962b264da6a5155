"""Selection of the best round, and early stopping, by validation data only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raypfl.evaluation.run_metrics import Measures
from raypfl.evaluation.settings import EvaluationSettings

PROTOCOL = "val"
"""The protocol whose results select the best round."""


class BestRound(NamedTuple):
    """The best round so far.

    Attributes
    ----------
    round : the best round, the earliest if several are equal; None: no round has a value.
    waited : the number of evaluations since then.
    """

    round: int | None
    waited: int


def select(measures: Measures, validated: Mapping[int, Mapping[str, Any]], settings: EvaluationSettings) -> BestRound:
    """Select the best evaluated round.

    `validated` : each evaluated round's :func:`validation_aggregates`, in ascending order of rounds. A missing metric
    or NaN is never best.
    """
    metric = settings.metric or measures.primary.name
    lower_is_better = measures.lower_is_better(metric) if settings.mode == "auto" else settings.mode == "min"
    sign = -1 if lower_is_better else 1

    values = {}
    for round, aggregates in validated.items():
        value = sign * aggregates.get(metric, math.nan)
        if not math.isnan(value):
            values[round] = value
    if not values:
        return BestRound(None, len(validated))

    best = max(values, key=lambda round: (values[round], -round))
    return BestRound(best, sum(round > best for round in validated))


def validation_aggregates(summary: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the aggregates on the clients' validation splits in a round's summary; None if there are none.

    They are those of the personal models if the method has any, else those of the global model.
    """
    rows = {row["model"]: row for row in summary if row["protocol"] == PROTOCOL}
    row = rows.get("personal", rows.get("global"))
    return None if row is None else dict(row)
