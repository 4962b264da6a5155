"""Deviations of the runs from the published protocol, as sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypfl.common.counting import counted
from raypfl.experiment.assignments import flatten
from raypfl.experiment.identity import is_in
from raypfl.runs.result import RunResult
from raypfl.studies.cells import Position, StudyCell, by_position, label_of_seeds
from raypfl.studies.description import Study

_NO_DEVIATION = {
    "": ("name", "seed", "output", "engine", "ray", "checkpoint", "tracking", "failures"),
    "data": ("root", "cache", "download", "image", "label", "files"),
    "training": ("channels_last",),
    "evaluation": ("every", "protocols", "masks", "batch_size"),
}
"""Settings, by section, that decide where, how fast and how often something is done, but not what is done."""

_LOCATION_OF_POOL = ("root", "download", "label", "files")
_POOLS = "data.pools."
_LEFT_OUT = "left out"

SIZES = (
    "rounds",
    "data.pools",
    "partition",
    "cohort",
    "model",
    "training.epochs",
    "training.steps",
    "training.batch_size",
)
"""Settings, and sections, that decide how large a run is; with others than published, levels cannot be compared."""

_AXES = {"methods": "methods", "down": "blocks", "across": "groups of columns"}


def deviations(
    reference: Study,
    study: Study,
    cells: Sequence[StudyCell],
    planned: Sequence[StudyCell],
    results: Mapping[int, RunResult],
    diverged: Sequence[int] = (),
) -> list[str]:
    """Return a sentence for every deviation; none if the whole table was measured as published.

    Parameters
    ----------
    reference : the study with the published table.
    study : the study that was requested.
    cells : the cells that were run, as described: what a search has set in them is no deviation of its own.
    planned : all cells of the published table.
    results : the results of the finished `cells`, by index.
    diverged : the indices of those that diverged.
    """
    return [
        *_extent(reference, study),
        *_settings(cells, planned),
        *_search(reference, study),
        *_without_choice(study, cells),
        *_seeds(cells, planned),
        *_unfinished(cells, results, diverged),
    ]


def size_settings(cells: Sequence[StudyCell], planned: Sequence[StudyCell]) -> list[str]:
    """Return the settings among `SIZES` that differ from the published ones in some cell."""
    differing = {path for path, _, _ in _positions_by_difference(cells, planned)}
    return sorted(path for path in differing if any(is_in(path, size) for size in SIZES))


def _seeds(cells: Sequence[StudyCell], planned: Sequence[StudyCell]) -> list[str]:
    measured = len({cell.experiment.seed for cell in cells})
    published = len({cell.experiment.seed for cell in planned})
    if measured == published:
        return []
    return [f"{counted(measured, 'seed')}, not {published}."]


def _extent(reference: Study, study: Study) -> list[str]:
    lines = []
    for axis, name in _AXES.items():
        published = getattr(reference, axis)
        selected = getattr(study, axis)

        left_out = [label for label in published if label not in selected]
        if left_out:
            count = len(published) - len(left_out)
            # Some labels have a comma: "2 classes, FashionMNIST".
            lines.append(f"Only {count} of {len(published)} {name}; left out: {'; '.join(left_out)}.")

        added = [label for label in selected if label not in published]
        if added:
            lines.append(f"{', '.join(added)}: not in the published table.")
    return lines


def _search(reference: Study, study: Study) -> list[str]:
    if study.search is None:
        return [] if reference.search is None else ["No settings are searched."]
    if reference.search is None:
        return [f"Settings are searched, with {counted(study.search.trials, 'trial')} for each method."]

    lines = []
    for name, value in study.search:
        published_value = getattr(reference.search, name)
        if value != published_value:
            lines.append(f"search.{name} is {_as_text(value)}, not {_as_text(published_value)}.")
    return lines


def _without_choice(study: Study, cells: Sequence[StudyCell]) -> list[str]:
    """Return a sentence on the positions of the table for which a search chose no settings, so that nothing was run."""
    chosen = by_position(cells)
    names = [" · ".join(filter(None, position)) for position in study.positions if position not in chosen]
    return [f"No trial has a score, so that nothing was run: {'; '.join(names)}."] if names else []


def _settings(cells: Sequence[StudyCell], planned: Sequence[StudyCell]) -> list[str]:
    published = by_position(planned)
    measured = [position for position in by_position(cells) if position in published]
    lines = []
    for (path, measured_text, published_text), positions in _positions_by_difference(cells, planned).items():
        scope = _scope(positions, measured)
        instead = "" if measured_text == _LEFT_OUT else f", not {published_text}"
        lines.append(f"{path} is {measured_text}{instead}{scope}.")
    return lines


def _positions_by_difference(
    cells: Sequence[StudyCell], planned: Sequence[StudyCell]
) -> dict[tuple[str, str, str], list[Position]]:
    """Return where settings differ from the published ones, by (path, measured, published) as texts.

    Many positions often share one difference.
    """
    published = _protocols(planned)
    measured = {position: values for position, values in _protocols(cells).items() if position in published}

    positions_of: dict[tuple[str, str, str], list[Position]] = {}
    for position, measured_values in measured.items():
        published_values = published[position]
        differences = {}
        for path in dict.fromkeys([*measured_values, *published_values]):
            pool = _pool_of(path)
            if pool and not any(_pool_of(other) == pool for other in measured_values):
                differences[pool, _LEFT_OUT, ""] = True
                continue
            measured_text = _as_text(measured_values.get(path))
            published_text = _as_text(published_values.get(path))
            if measured_text != published_text:
                differences[path, measured_text, published_text] = True
        for difference in differences:
            positions_of.setdefault(difference, []).append(position)
    return positions_of


def _pool_of(path: str) -> str:
    """Return the path of the pool to which a setting belongs; empty: it belongs to none."""
    if not path.startswith(_POOLS):
        return ""
    return _POOLS + path.removeprefix(_POOLS).partition(".")[0]


def _protocols(cells: Sequence[StudyCell]) -> dict[Position, dict[str, Any]]:
    """Return the settings that belong to the protocol at each position, from its first seed."""
    return {position: _protocol(cell.experiment.to_dict()) for position, (cell, *_) in by_position(cells).items()}


def _protocol(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that belong to the protocol, by dotted path."""
    protocol = {key: value for key, value in values.items() if key not in _NO_DEVIATION[""]}
    for section in _NO_DEVIATION.keys() & protocol.keys():
        excluded = _NO_DEVIATION[section]
        protocol[section] = {key: value for key, value in protocol[section].items() if key not in excluded}

    pools = {}
    for name, pool in protocol["data"]["pools"].items():
        pools[name] = pool
        if isinstance(pool, dict):
            pools[name] = {key: value for key, value in pool.items() if key not in _LOCATION_OF_POOL}
    weights = protocol["model"]["weights"]
    # A name such as IMAGENET1K_V1, or a file.
    named = {"weights": weights and Path(weights).name}
    return flatten({**protocol, "data": {**protocol["data"], "pools": pools}, "model": {**protocol["model"], **named}})


def _scope(positions: list[Position], all_positions: list[Position]) -> str:
    """Say where a deviation holds: everywhere (empty text), at some labels of an axis, or at how many positions."""
    if len(positions) == len(all_positions):
        return ""
    for axis in (1, 2, 0):  # down, across, methods
        labels = {position[axis] for position in positions}
        at_labels = [position for position in all_positions if position[axis] in labels]
        if len(at_labels) == len(positions):
            names = dict.fromkeys(position[axis] for position in at_labels)
            return f" ({', '.join(names)})"
    return f" (in {len(positions)} of {len(all_positions)} rows of results)"


def _unfinished(cells: Sequence[StudyCell], results: Mapping[int, RunResult], diverged: Sequence[int]) -> list[str]:
    lines = []
    if diverged:
        names = map(label_of_seeds, by_position(cells[i] for i in diverged).values())
        lines.append(f"Diverged, and in no mean: {'; '.join(names)}.")
    unfinished = len(cells) - len(results) - len(diverged)
    if unfinished:
        lines.append(f"{unfinished} of {len(cells)} cells are not finished, so the means do not include them.")

    stopped_early = []
    for i, result in results.items():
        if result.round < result.experiment.rounds:
            stopped_early.append(f"{cells[i].label} after {counted(result.round, 'round')}")
    if stopped_early:
        lines.append(f"Stopped early: {'; '.join(stopped_early)}.")
    return lines


def _as_text(value: Any) -> str:
    if value is None:
        return "the default"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
