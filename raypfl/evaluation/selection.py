"""The best round, and when to stop, by validation data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from raypfl.evaluation.tables import summarise
from raypfl.settings import EvaluationSettings

PROTOCOL = "val"
LOWER_IS_BETTER = ("loss", "ece", "std")


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


def select(values: Mapping[int, float], settings: EvaluationSettings) -> Selection:
    """The best of the evaluated rounds.

    Parameters
    ----------
    values : round -> its :func:`validation_value`, ascending; NaN is never best.
    """
    sign = -1 if lower_is_better(settings) else 1
    known = {round: sign * value for round, value in values.items() if value == value}
    if not known:
        return Selection(None, None, len(values))
    best = max(known, key=lambda round: (known[round], -round))
    return Selection(best, values[best], sum(round > best for round in values))


def validation_value(summary: Sequence[Mapping[str, Any]], settings: EvaluationSettings) -> float | None:
    """The metric on the clients' own validation splits in a round's summary; None if it was not validated.

    The personal models decide where the method makes any, else the global one. Nothing else is looked at.
    """
    rows = {row["model"]: row for row in summary if row["protocol"] == PROTOCOL}
    row = rows.get("personal", rows.get("global"))
    return None if row is None else row.get(settings.metric, float("nan"))


def validation_values(evaluations: Mapping[str, Sequence[Any]], settings: EvaluationSettings) -> dict[int, float]:
    """Round -> :func:`validation_value`, from the columns of the evaluations table."""
    rows: dict[int, list[int]] = {}
    for i, (round, protocol) in enumerate(zip(evaluations["round"], evaluations["protocol"], strict=True)):
        if protocol == PROTOCOL:
            rows.setdefault(round, []).append(i)
    values = {}
    for round, chosen in sorted(rows.items()):
        summary = summarise({name: [column[i] for i in chosen] for name, column in evaluations.items()})
        values[round] = validation_value(summary, settings)
    return {round: value for round, value in values.items() if value is not None}


def lower_is_better(settings: EvaluationSettings) -> bool:
    """As the settings say or, if they leave it open, as the metric has it."""
    return settings.metric in LOWER_IS_BETTER if settings.mode == "auto" else settings.mode == "min"
