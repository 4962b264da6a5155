"""The table of named clients on the page, and alone: as CSV and as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from raypfl.common.errors import ConfigError, RaypflError
from raypfl.data import summarised
from raypfl.data.summary import Summary
from raypfl.results.display import latex
from raypfl.results.ranking.named_clients import MOST_CLIENTS, ClientTable, client_table
from raypfl.results.report import export
from raypfl.results.report.parts import Part
from raypfl.results.report.tables import protocol_name
from raypfl.results.units import deviation
from raypfl.runs.result import RunResult

_PER_CLIENT = ("local", "unseen", "pm_l", "pm_v", "val", "train")


def per_client_protocol(part: Part) -> str | None:
    """Return the first protocol that tests clients one by one; None: none of the part's runs has any."""
    protocols = {name for group in part.groups for name in group.protocols}
    return next((name for name in _PER_CLIENT if name in protocols), None)


def held_in(run: RunResult) -> Summary:
    """Return what the clients of a run held.

    Raises
    ------
    RaypflError : if the data cannot be loaded, or are no longer those of the run.
    """
    experiment = run.experiment
    data = experiment.load_data()
    if run.metadata["data"] != data.fingerprint:
        raise ConfigError("The data has changed since the run.")
    return summarised(data)


def table_of(part: Part, sizes: Sequence[int]) -> ClientTable | None:
    """Return the table of a part's named clients, by what its first run's clients train on; None: there is none."""
    protocol = per_client_protocol(part)
    if protocol is None:
        return None
    return client_table(part.candidates, protocol, part.baseline, sizes)


def caption(part: Part, table: ClientTable) -> str:
    """Return the sentences on the numbers of a part's table."""
    first = part.groups[0].results[0]
    unit = part.groups[0].unit
    text = f"Final {unit.phrase}{' in %' if unit.sign else ''} on {protocol_name(table.protocol)}"
    if any(len(group.results) > 1 for group in part.groups):
        text += f"; mean ± standard deviation over seeds. Numbers of samples are those of seed {first.experiment.seed}"
    if not table.compared:
        return f"{text}."
    difference = f"Difference{' in points' if unit.sign else ''}, seed by seed: {table.compared}."
    return f"{text}. {difference} Clients whose personal models gain most come first."


def as_csv(parts: Sequence[Part]) -> str:
    """Return a row for each named client of each part, with unrounded numbers.

    Raises
    ------
    ConfigError : if no part has a table of named clients.
    """
    rows = []
    for part, table in _tables(parts):
        for client in table.clients:
            row: dict[str, Any] = {
                "setting": export.setting_of(part.groups),
                "client": client.name,
                "training_samples": client.training_samples,
                "tested_samples": client.tested_samples,
                "tested_on": table.protocol,
                "metric": part.groups[0].unit.label,
            }
            for heading, seeds in zip(table.headings, client.scores, strict=True):
                row[heading] = fmean(seeds) if seeds else None
                row[f"{heading}_std_over_seeds"] = deviation(seeds) if len(seeds) > 1 else None
            if table.compared:
                row["compared"] = table.compared
            rows.append(row)
    return export.csv_text(rows)


def as_latex(parts: Sequence[Part]) -> str:
    """Return a table of each part's named clients.

    Raises
    ------
    ConfigError : if no part has a table of named clients.
    """
    tables = _tables(parts)
    texts = [latex.PREAMBLE]
    for number, (part, table) in enumerate(tables, start=1):
        headings = [latex.escaped(heading) for heading in ("client", *table.sample_headings, *table.headings)]
        lines = []
        for client in table.clients:
            cells = [*table.sample_cells(client), *map(str, table.cells(client))]
            lines.append([latex.escaped(client.name), *map(latex.number, cells)])
        label = "clients" if len(tables) == 1 else f"clients-{number}"
        text = f"{export.setting_of(part.groups)}. {caption(part, table)}"
        texts.append(latex.table(headings, [("", lines)], text, label))
    return "\n".join(texts)


def _tables(parts: Sequence[Part]) -> list[tuple[Part, ClientTable]]:
    tables = []
    for part in parts:
        try:
            sizes = held_in(part.groups[0].results[0]).sizes["train"].tolist()
        except RaypflError:
            sizes = []
        table = table_of(part, sizes)
        if table is not None:
            tables.append((part, table))
    if not tables:
        raise ConfigError(
            f"These runs have no table of clients: it needs up to {MOST_CLIENTS} clients that have names, each a name "
            "of its own and the same in all runs, and were tested one by one."
        )
    return tables
