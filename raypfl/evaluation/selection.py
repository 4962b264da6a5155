"""The best round and early stopping, by validation data only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raypfl.evaluation.measures import Measures
from raypfl.evaluation.settings import EvaluationSettings

PROTOCOL = "val"


class Selection(NamedTuple):
    """The best round so far.

    Attributes
    ----------
    round : the best one, the earliest if several are equal; None: no round has a value.
    waited : number of evaluations since then.
    """

    round: int | None
    waited: int


def select(measures: Measures, validated: Mapping[int, Mapping[str, Any]], settings: EvaluationSettings) -> Selection:
    """The best evaluated round.

    Parameters
    ----------
    validated : round -> its :func:`validation_aggregates` aggregates, ascending. A missing metric or NaN is never best.
    """
    metric = settings.metric or measures.primary.name
    lower = measures.lower_is_better(metric) if settings.mode == "auto" else settings.mode == "min"
    sign = -1 if lower else 1
    values = {round: sign * row.get(metric, math.nan) for round, row in validated.items()}
    known = {round: value for round, value in values.items() if not math.isnan(value)}
    if not known:
        return Selection(None, len(values))
    best = max(known, key=lambda round: (known[round], -round))
    return Selection(best, sum(round > best for round in values))


def validation_aggregates(summary: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The aggregates on the clients' validation splits in a round's summary; None if there are none.

    They are those of the personal models if the method has any, else those of the global model.
    """
    rows = {row["model"]: row for row in summary if row["protocol"] == PROTOCOL}
    row = rows.get("personal", rows.get("global"))
    return None if row is None else dict(row)
