"""Settings that moved from ``cohort`` to ``devices``: refused where set, moved where old runs recorded them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOW_OF_DEVICES = ("dropout", "availability")
"""Settings of the section cohort that became settings of devices."""


def moved_to_devices(cohort: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each setting of `cohort` that is set although it moved."""
    lines = []
    if cohort.get("dropout"):
        lines.append("cohort.dropout has become devices.dropout; set that instead.")
    if cohort.get("availability") is not None:
        lines.append(
            "cohort.availability has become devices.availability, a model with a name; set that instead, such as "
            "devices.availability={name: uniform, low: 0.2, high: 0.9}."
        )
    return lines


def move_to_devices(values: dict[str, Any]) -> None:
    """Move settings that an old run recorded to their present places, in place."""
    cohort = dict(values.get("cohort") or {})
    dropout = cohort.pop("dropout", 0.0)
    chances = cohort.pop("availability", None)
    if "cohort" in values:
        values["cohort"] = cohort
    if dropout or chances is not None:
        availability = None if chances is None else {"name": "uniform", **chances}
        values["devices"] = {"dropout": dropout, "availability": availability}
