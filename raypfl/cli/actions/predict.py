"""`raypfl predict`: predictions for the rows of a file, by the models of a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from raypfl.common.counting import counted, series
from raypfl.common.errors import ConfigError, listed
from raypfl.learning.objectives import METRICS
from raypfl.results.units import Unit
from raypfl.trained import predictions
from raypfl.trained.models import TrainedModels

_MOST_NAMED = 5


def predict(run: Path, rows: Path, client: str | None, use_global: bool, out: Path, as_json: bool) -> None:
    """Write the predictions for the rows of a file, and print what they are and which models made them."""
    predictions.refuse_other_endings(out)
    if out.exists() and rows.exists() and out.samefile(rows):
        raise ConfigError(f"{out} has the rows; name another file for the predictions.")

    if run.is_file():
        predicted = predictions.predict(run, rows, client=client, use_global=use_global)
        models_text = f"the model in {run}"
    else:
        models = TrainedModels.of_run(run)
        predicted = predictions.predict(models, rows, client=_name_or_number(client, models), use_global=use_global)
        models_text = _models_text(predicted.clients, models)
    file = predicted.save(out)

    if as_json:
        facts = {
            "rows": predicted.table.num_rows,
            "clients": predicted.clients,
            "tested": predicted.tested,
            "metrics": predicted.metrics,
            "columns": predicted.columns,
            "file": str(file),
        }
        print(json.dumps(facts, indent=2))
        return

    count = counted(predicted.table.num_rows, "row")
    lines = [f"{count} of {rows.name}, predicted by {models_text}."]
    lines.append(f"{predicted.target}: {_values_text(predicted.table[predictions.PREDICTED].to_numpy())}.")
    if predicted.metrics:
        units = {name: Unit(METRICS.get(name)()) for name in predicted.metrics}
        scores = [
            f"{unit.phrase} {unit.text(unit.of([predicted.metrics[name]])[0])}{unit.sign}"
            for name, unit in units.items()
        ]
        lines.append(f"On the {counted(predicted.tested, 'row')} with {predicted.target}: {', '.join(scores)}.")
    noun = "column" if len(predicted.columns) == 1 else "columns"
    lines.append(f"{file} has these rows and the new {noun} {series(predicted.columns)}.")
    Console().print(Text("\n".join(lines)), soft_wrap=True)


def _name_or_number(client: str | None, models: TrainedModels) -> int | str | None:
    """Return the client with this name or, if there is none, with this number."""
    is_name = models.client_names is not None and client in models.client_names.names
    return int(client) if client is not None and client.isdecimal() and not is_name else client


def _models_text(clients: list[int] | None, models: TrainedModels) -> str:
    if clients is None:
        return "the global model"
    names = models.client_names or [f"client {client}" for client in range(models.num_clients)]
    named = listed((names[client] for client in clients), _MOST_NAMED)
    if len(clients) == 1:
        return f"the personal model of {named}"
    return f"the personal models of {len(clients)} clients, {named}"


def _values_text(values: np.ndarray) -> str:
    """Summarise predictions: the counts of the most frequent classes, or the range of numbers."""
    if values.dtype.kind == "f":
        return f"from {values.min():g} to {values.max():g}, {values.mean():g} on average"
    classes, counts = np.unique(values.astype(str), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return listed((f"{classes[i]} in {counted(int(counts[i]), 'row')}" for i in order), _MOST_NAMED)
