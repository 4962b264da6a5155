"""How the runs depart from the published protocol, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypfl.experiment.assignments import flatten
from raypfl.runs.result import RunResult
from raypfl.studies.cells import StudyCell
from raypfl.studies.description import Study

_NO_DEVIATION = {
    "": ("name", "seed", "output", "engine", "ray", "checkpoint", "tracking", "failures"),
    "data": ("root", "cache", "download", "image", "label", "files"),
    "training": ("channels_last",),
    "evaluation": ("every", "protocols", "masks", "batch_size"),
}
"""Settings, by section, that decide where, how fast and how often something is done, but not what."""

_AXES = {"methods": "methods", "down": "blocks", "across": "groups of columns"}

Position = tuple[str, str, str]


def deviations(
    reference: Study,
    study: Study,
    cells: Sequence[StudyCell],
    planned: Sequence[StudyCell],
    results: Mapping[int, RunResult],
) -> list[str]:
    """A sentence for every departure; none if the whole table was measured as published.

    Parameters
    ----------
    reference : with the published table; `planned` are all of its cells.
    study : what was asked for. cells, results : what was run, and the results of the finished ones by their index.
    """
    ours, theirs = ({cell.experiment.seed for cell in some} for some in (cells, planned))
    seeds = f"{len(ours)} seed{'s' * (len(ours) > 1)}, not {len(theirs)}."
    return [
        *_extent(reference, study),
        *_settings(cells, planned),
        *([seeds] if len(ours) != len(theirs) else []),
        *_unfinished(cells, results),
    ]


def _extent(reference: Study, study: Study) -> list[str]:
    lines = []
    for axis, name in _AXES.items():
        published, selected = getattr(reference, axis), getattr(study, axis)
        if left_out := [label for label in published if label not in selected]:
            count = len(published) - len(left_out)
            lines.append(f"{count} of {len(published)} {name}: without {', '.join(left_out)}.")
        if added := [label for label in selected if label not in published]:
            lines.append(f"{', '.join(added)}: not in the published table.")
    return lines


def _settings(cells: Sequence[StudyCell], planned: Sequence[StudyCell]) -> list[str]:
    published = _of_first_seed(planned)
    here = {position: values for position, values in _of_first_seed(cells).items() if position in published}
    changed: dict[tuple[str, str, str], list[Position]] = {}
    for position, values in here.items():
        for path in dict.fromkeys([*values, *published[position]]):
            ours, theirs = (_shown(some.get(path)) for some in (values, published[position]))
            if ours != theirs:
                changed.setdefault((path, ours, theirs), []).append(position)
    return [
        f"{path} is {ours}, not {theirs}{_scope(where, list(here))}." for (path, ours, theirs), where in changed.items()
    ]


def _of_first_seed(cells: Sequence[StudyCell]) -> dict[Position, dict[str, Any]]:
    """The settings that count at each position, by their dotted paths."""
    first: dict[Position, StudyCell] = {}
    for cell in cells:
        first.setdefault(cell.position, cell)
    return {position: _protocol(cell.experiment.to_dict()) for position, cell in first.items()}


def _protocol(values: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in _NO_DEVIATION[""]}
    for section in _NO_DEVIATION.keys() & kept.keys():
        kept[section] = {key: value for key, value in kept[section].items() if key not in _NO_DEVIATION[section]}
    return flatten(kept)


def _scope(positions: list[Position], everywhere: list[Position]) -> str:
    """Where something holds: everywhere, at some labels of one axis, or in so many of the positions."""
    if len(positions) == len(everywhere):
        return ""
    for axis in (1, 2, 0):  # down, across, methods
        labels = {position[axis] for position in positions}
        if sum(position[axis] in labels for position in everywhere) == len(positions):
            named = dict.fromkeys(position[axis] for position in everywhere if position[axis] in labels)
            return f" ({', '.join(named)})"
    return f" (in {len(positions)} of {len(everywhere)} rows of results)"


def _unfinished(cells: Sequence[StudyCell], results: Mapping[int, RunResult]) -> list[str]:
    lines = []
    if left := len(cells) - len(results):
        lines.append(f"{left} of {len(cells)} cells are not finished, so the means do not include them.")
    short = [(i, one.round) for i, one in results.items() if one.round < one.experiment.rounds]
    if short:
        lines.append(f"Stopped early: {'; '.join(f'{cells[i].label} after {count}' for i, count in short)} rounds.")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
