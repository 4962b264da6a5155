"""Which experiments have the same result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raypfl.experiment.assignments import flatten
from raypfl.experiment.experiment import Experiment

_NO_EFFECT = ("name", "output", "ray", "checkpoint", "tracking")
_STAYS = ("name", "output", "checkpoint.location")
"""Where a run is: no change of it continues the run."""


def deciding_settings(experiment: Experiment) -> dict[str, Any]:
    """Everything in a description that may change its result."""
    values = {key: value for key, value in experiment.to_dict().items() if key not in _NO_EFFECT}
    data = {key: value for key, value in values["data"].items() if key not in ("cache", "download")}
    engine = {key: value for key, value in values["engine"].items() if key != "backend"}
    if data["root"]:
        data["root"] = str(Path(data["root"]).expanduser().absolute())
    return values | {"data": data, "engine": engine}


def differences(asked: Experiment, begun: Experiment) -> list[str]:
    """The settings of a begun run by which its result is not the one asked for; what was left open may be settled."""
    wanted, there = flatten(deciding_settings(asked)), flatten(deciding_settings(begun))
    settled = []
    if asked.objective is None:
        settled.append("objective")
    if asked.engine.executor in ("auto", "fastest"):
        settled.append("engine.executor")
    if asked.training.channels_last is None:
        settled.append("training.channels_last")
    if asked.model.needed_pools():
        settled.append("model.weights")
    return [
        key
        for key in {**wanted, **there}
        if wanted.get(key) != there.get(key) and not any(is_in(key, one) for one in settled)
    ]


def harmless_changes(asked: Experiment, begun: Experiment) -> list[str]:
    """Assignments with which a started run continues as requested now, with the same result."""
    wanted, there = flatten(asked.to_dict()), flatten(begun.to_dict())
    kept = {*flatten(deciding_settings(asked)), *_STAYS}
    return [
        f"{key}={json.dumps(value)}" for key, value in wanted.items() if value != there.get(key) and key not in kept
    ]


def is_in(key: str, section: str) -> bool:
    """Whether a dotted key is this section's, or is it."""
    return f"{key}.".startswith(f"{section}.")
