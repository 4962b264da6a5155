"""Which experiments have the same result."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raypfl.common.user_modules import digests_named_in
from raypfl.experiment.assignments import flatten, parse_assignments
from raypfl.experiment.checks.effects import assign_all
from raypfl.experiment.experiment import Experiment

ONLY_ROUNDING = ("engine", "training.channels_last")
"""Settings that change a result by rounding alone."""

WITHOUT_EFFECT = ("name", "output", "ray", "checkpoint", "tracking")
"""Sections and settings that change no result."""

_LOCATION = ("name", "output", "checkpoint.location")
"""Settings that say where a run is; with other ones it would not be found."""


def deciding_settings(experiment: Experiment) -> dict[str, Any]:
    """Return all settings that may change an experiment's result."""
    values = {key: value for key, value in experiment.to_dict().items() if key not in WITHOUT_EFFECT}

    data = {key: value for key, value in values["data"].items() if key not in ("cache", "download")}
    if data["root"]:
        data["root"] = str(Path(data["root"]).expanduser().absolute())

    engine = {key: value for key, value in values["engine"].items() if key not in ("backend", "cuda_graphs")}
    return values | {"data": data, "engine": engine}


def code_digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of the user's own code for each module that settings name, also within lists."""
    return digests_named_in(_values_in(settings))


def _values_in(settings: object) -> Iterator[object]:
    if isinstance(settings, Mapping):
        settings = list(settings.values())
    if isinstance(settings, list):
        for part in settings:
            yield from _values_in(part)
    else:
        yield settings


def differences(requested: Experiment, started: Experiment) -> list[str]:
    """Return the settings by which a started run differs in its result from the requested experiment.

    A setting that the request leaves open (``executor: auto``) does not count: the start has chosen its value.
    """
    chosen_at_start = []
    if requested.objective is None:
        chosen_at_start.append("objective")
    if requested.engine.executor in ("auto", "fastest"):
        chosen_at_start.append("engine.executor")
    if requested.training.channels_last is None:
        chosen_at_start.append("training.channels_last")
    if requested.model.needed_pools():
        chosen_at_start.append("model.weights")

    requested_settings = flatten(deciding_settings(requested))
    started_settings = flatten(deciding_settings(started))
    different = []
    for key in {**requested_settings, **started_settings}:
        is_chosen = any(is_in(key, section) for section in chosen_at_start)
        if requested_settings.get(key) != started_settings.get(key) and not is_chosen:
            different.append(key)
    return different


def harmless_changes(requested: Experiment, started: Experiment) -> list[str]:
    """Return the assignments with which a started run continues as requested, to the same result."""
    started_settings = flatten(started.to_dict())
    fixed = {*flatten(deciding_settings(requested)), *_LOCATION}
    changes = []
    for key, value in flatten(requested.to_dict()).items():
        if value != started_settings.get(key) and key not in fixed:
            changes.append(f"{key}={json.dumps(value)}")
    # Some may have no effect with what was chosen at the start, such as the executor.
    refused = assign_all(started.to_dict(), parse_assignments(changes))
    return [change for change in changes if tuple(change.partition("=")[0].split(".")) not in refused]


def is_in(key: str, section: str) -> bool:
    """Return whether a dotted key is `section` or lies within it."""
    return f"{key}.".startswith(f"{section}.")
