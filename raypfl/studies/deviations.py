"""How what was run departs from the protocol of what was published, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypfl.runs import Result
from raypfl.studies.cells import Cell, Choice
from raypfl.studies.description import Study

_NO_MATTER = {
    "": ("name", "seed", "output", "engine", "ray", "checkpoint", "tracking", "failures"),
    "data": ("root", "cache", "download", "image", "label", "files"),
    "training": ("channels_last",),
    "evaluation": ("every", "protocols", "batch_size"),
}
"""What decides where, how fast and how often something is done, but not what."""

_AXES = ((1, "down"), (2, "across"), (0, "methods"))
_PARTS = {"methods": "methods", "down": "blocks", "across": "groups of columns"}


def deviations(
    study: Study, choice: Choice, cells: Sequence[Cell], planned: Sequence[Cell], results: Mapping[int, Result]
) -> list[str]:
    """A sentence for every departure; none if the whole table was measured as published.

    Parameters
    ----------
    study : with the published table, whose cells `planned` are, all of them.
    choice : of what is asked for.
    cells, results : that were run, and what came of those that are finished.
    """
    return [
        *_extent(study, choice),
        *_settings(cells, planned),
        *_seeds(cells, planned),
        *_left(cells, results),
    ]


def _extent(study: Study, choice: Choice) -> list[str]:
    lines = []
    for axis, name in _PARTS.items():
        whole, chosen = getattr(study, axis), getattr(choice, axis)
        left_out = [label for label in whole if label not in chosen]
        if left_out:
            lines.append(f"{len(whole) - len(left_out)} of {len(whole)} {name}: without {', '.join(left_out)}.")
        strange = [label for label in chosen if label not in whole]
        if strange:
            lines.append(f"{', '.join(strange)}: not in the published table.")
    return lines


def _settings(cells: Sequence[Cell], planned: Sequence[Cell]) -> list[str]:
    published = _of_first_seed(planned)
    here = {place: values for place, values in _of_first_seed(cells).items() if place in published}
    changed: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    for place, values in here.items():
        for path in dict.fromkeys([*values, *published[place]]):
            ours, theirs = (_shown(some.get(path)) for some in (values, published[place]))
            if ours != theirs:
                changed.setdefault((path, ours, theirs), []).append(place)
    return [
        f"{path} is {ours}, not {theirs}{_scope(where, list(here))}." for (path, ours, theirs), where in changed.items()
    ]


def _of_first_seed(cells: Sequence[Cell]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The settings in each place, in order, by their dotted paths."""
    first: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        first.setdefault(cell.place, cell)
    return {place: _flat(cell.experiment.to_dict()) for place, cell in first.items()}


def _scope(places: list[tuple[str, str, str]], all_places: list[tuple[str, str, str]]) -> str:
    """Where something holds: everywhere, at some labels of one axis, or in so many of the places."""
    if len(places) == len(all_places):
        return ""
    for axis, _ in _AXES:
        labels = {place[axis] for place in places}
        if sum(place[axis] in labels for place in all_places) == len(places):
            named = dict.fromkeys(place[axis] for place in all_places if place[axis] in labels)
            return f" ({', '.join(named)})"
    return f" (in {len(places)} of {len(all_places)} rows of results)"


def _seeds(cells: Sequence[Cell], planned: Sequence[Cell]) -> list[str]:
    ours, theirs = ({cell.experiment.seed for cell in some} for some in (cells, planned))
    if len(ours) == len(theirs):
        return []
    return [f"{len(ours)} seed{'s' * (len(ours) > 1)}, not {len(theirs)}."]


def _left(cells: Sequence[Cell], results: Mapping[int, Result]) -> list[str]:
    lines = []
    if left := len(cells) - len(results):
        lines.append(f"{left} of {len(cells)} cells are not finished; what they would say is missing from the means.")
    short = [f"{cells[i].label} after {result.round}" for i, result in results.items() if _is_short(result)]
    if short:
        lines.append(f"Stopped early: {'; '.join(short)} rounds.")
    return lines


def _is_short(result: Result) -> bool:
    return result.round < result.experiment.rounds


def _flat(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key in _NO_MATTER.get(section, ()):
            continue
        path = f"{section}.{key}" if section else key
        flat |= _flat(value, path) if isinstance(value, dict) and not section else {path: value}
    return flat


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
