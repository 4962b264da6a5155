"""The table of named clients: how good each method's models are for each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from raypfl.results.numbers import client_scores, evaluated_rows
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import TableCell, number_text, over_seeds

MOST_CLIENTS = 60
"""Most clients of whom there is a table."""

_Model = tuple[RunGroup, str]
"""A method's ``personal`` or ``global`` model."""


@dataclass(frozen=True)
class NamedClient:
    """A client's row.

    Attributes
    ----------
    training_samples, tested_samples : numbers of its samples in the first run; None: unknown.
    scores : for each heading of the table, one number for each seed, in the metric's unit.
    """

    name: str
    training_samples: int | None
    tested_samples: int | None
    scores: list[list[float]]


@dataclass(frozen=True)
class ClientTable:
    """A row for each client.

    Attributes
    ----------
    headings : of the scores: a method's models, then, if models are compared, the difference.
    digits : decimals of the scores.
    compared : the two models of the last column, in words; empty: there is no such column.
    """

    protocol: str
    headings: list[str]
    clients: list[NamedClient]
    digits: int
    compared: str = ""

    sample_headings = ("training samples", "tested samples")

    def sample_cells(self, client: NamedClient) -> list[str]:
        """Return a client's numbers of samples as they are printed."""
        counts = (client.training_samples, client.tested_samples)
        return ["–" if count is None else f"{count:,}" for count in counts]

    def cells(self, client: NamedClient) -> list[TableCell]:
        """Return a client's scores as they are printed, the difference with its sign."""
        cells = [over_seeds(seeds, self.digits) for seeds in client.scores]
        if self.compared and client.scores[-1]:
            mean = number_text(fmean(client.scores[-1]), self.digits, "+")
            cells[-1] = replace(cells[-1], mean=mean)
        return cells


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
    tested = _tested_samples(models[0], protocol) if models else {}

    unit = groups[0].unit
    digits = unit.digits(value for by_client in scores for seeds in by_client.values() for value in seeds.values())
    clients = []
    for number, name in enumerate(names):
        by_model = [by_client.get(number, {}) for by_client in scores]
        columns = [list(by_seed.values()) for by_seed in by_model]
        gain = math.nan
        if compared:
            personal, reference = (by_model[models.index(model)] for model in compared)
            gains = [personal[seed] - reference[seed] for seed in personal if seed in reference]
            gain = fmean(gains) if gains else math.nan
            columns.append(gains)
        training_samples = sizes[number] if len(sizes) else None
        clients.append((unit.order(gain), NamedClient(name, training_samples, tested.get(number), columns)))
    clients.sort(key=lambda pair: pair[0])

    headings = [f"{group.label}, {model}" for group, model in models]
    words = " minus ".join(f"{group.label}, {model}" for group, model in compared)
    if compared:
        headings.append("difference")
    return ClientTable(protocol, headings, [client for _, client in clients], digits, words)


def _shared_names(groups: Sequence[RunGroup]) -> list[str]:
    """Return clients' names by number; empty if there are too many, or a name is not of one client in all runs."""
    all_names = [result.client_names for group in groups for result in group.results]
    first = next(iter(all_names), None)
    if first is None or len(first) > MOST_CLIENTS or len(set(first)) < len(first):
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
        of_run = client_scores(result, protocol, model)
        for client, value in zip(of_run.clients.tolist(), of_run.values.tolist(), strict=True):
            scores.setdefault(client, {})[result.experiment.seed] = value
    return scores


def _tested_samples(model: _Model, protocol: str) -> dict[int, int]:
    """The number of samples with which the first seed's model was tested, by client."""
    group, kind = model
    rows = evaluated_rows(group.results[0], protocol, kind)
    return dict(zip(rows["client"].to_pylist(), rows["samples"].to_pylist(), strict=True))
