"""The table of named clients: how good each method's models are for each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from raypfl.results.numbers import client_scores
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import TableCell, over_seeds

_MOST_CLIENTS = 60
_Model = tuple[RunGroup, str]
"""A method's ``personal`` or ``global`` model."""


@dataclass(frozen=True)
class ClientTable:
    """A row for each client: name, training samples, and a cell for each heading.

    Attributes
    ----------
    compared : the two models of the last column, in words; empty: there is no such column.
    """

    headings: list[str]
    rows: list[tuple[str, str, list[TableCell]]]
    compared: str = ""


def client_table(
    groups: Sequence[RunGroup], protocol: str, baseline: str | None, sizes: Sequence[int]
) -> ClientTable | None:
    """Return the table, clients that gain most by personal models first; None without 60 names or fewer, each of one
    client and the same in all runs.

    Parameters
    ----------
    groups : the best of them may be named; partly untrained global models are compared with nothing.
    baseline : label of the method that the best personal models are compared with; None, or of a single group: the
        best global model.
    sizes : each client's training samples; empty: unknown.
    """
    names = _shared_names(groups)
    if not names:
        return None
    if len(groups) == 1:
        baseline = None

    models = [(group, group.deployed(protocol)) for group in groups if group.scores(protocol)]
    compared = _compared(groups, models, protocol, baseline)
    models += [model for model in compared if model not in models]
    scores = [_scores(group, protocol, model) for group, model in models]

    unit = groups[0].unit
    digits = unit.digits(value for by_client in scores for seeds in by_client.values() for value in seeds.values())
    headings = [f"{group.label}, {model}" for group, model in models]
    rows = []
    for client, name in enumerate(names):
        by_model = [by_client.get(client, {}) for by_client in scores]
        cells = [over_seeds(list(seeds.values()), digits) for seeds in by_model]
        gain = math.nan
        if compared:
            personal, reference = (by_model[models.index(model)] for model in compared)
            gains = [personal[seed] - reference[seed] for seed in personal if seed in reference]
            gain = fmean(gains) if gains else math.nan
            cells.append(_signed(over_seeds(gains, digits), gain, digits))
        samples = f"{sizes[client]:,}" if len(sizes) else "–"
        rows.append((unit.order(gain), (name, samples, cells)))
    rows.sort(key=lambda row: row[0])

    if not compared:
        return ClientTable(headings, [row for _, row in rows])
    words = " minus ".join(f"{group.label}, {model}" for group, model in compared)
    return ClientTable([*headings, "difference"], [row for _, row in rows], words)


def _shared_names(groups: Sequence[RunGroup]) -> list[str]:
    """The names of the clients by number; empty if there are too many, or a name is not of one client in all runs."""
    all_names = [result.client_names for group in groups for result in group.results]
    first = next(iter(all_names), None)
    if first is None or len(first) > _MOST_CLIENTS or len(set(first)) < len(first):
        return []
    if any(names is None or list(names) != list(first) for names in all_names):
        return []
    return list(first)


def _compared(
    groups: Sequence[RunGroup], models: Sequence[_Model], protocol: str, baseline: str | None
) -> list[_Model]:
    """Return the best personal models and what they are compared with; empty if there is either alone."""
    references = [(group, model) for group, model in models if group.label == baseline]
    if baseline is None:
        in_use = [(group, model) for group, model in models if model == "global"]
        references = in_use or [(group, "global") for group in groups if group.scores(protocol, "global")]
        references = [(group, model) for group, model in references if not group.leaves_untrained]
    personal = [(group, model) for group, model in models if model == "personal" and group.label != baseline]
    if not personal or not references:
        return []

    def order(model: _Model) -> tuple[bool, float]:
        group, kind = model
        return group.unit.order(fmean(group.scores(protocol, kind)))

    return [min(personal, key=order), min(references, key=order)]


def _scores(group: RunGroup, protocol: str, model: str) -> Mapping[int, Mapping[int, float]]:
    """Return the final primary metric by client and seed, in its unit."""
    scores: dict[int, dict[int, float]] = {}
    for result in group.results:
        clients, values = client_scores(result, protocol, model)
        for client, value in zip(clients.tolist(), values.tolist(), strict=True):
            scores.setdefault(client, {})[result.experiment.seed] = value
    return scores


def _signed(cell: TableCell, mean: float, digits: int) -> TableCell:
    """Return the cell with its mean's sign; never -0.0."""
    return cell if math.isnan(mean) else replace(cell, mean=f"{round(mean, digits) + 0.0:+,.{digits}f}")
