"""From what groups of clients sent up to rows of a table, and from rows to aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.evaluation.protocols import OWN, WEIGHTED
from raypfl.evaluation.scoring import weights
from raypfl.evaluation.tally import METRICS, class_weighted, metrics

COLUMNS = ("round", "client", "protocol", "model", *METRICS)
MODELS = ("personal", "global")
_OPTIONAL = ("ece", "auc", "left_out")


def tabulate(
    round: int, scores: Mapping[str, Tensor], clients: Sequence[int], protocols: Iterable[str]
) -> dict[str, list[Any]]:
    """Columns of the evaluations table, a row for each (protocol, model, client).

    Parameters
    ----------
    scores : as :func:`raypfl.evaluation.scoring.score` gives them, of all `clients`: ``Each`` in rows ``[C, ...]``,
        ``Sum`` added up. A client without samples to test on gets no row; where the global model is tested once for
        all, the row belongs to no client and has client -1.
    """
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for protocol in protocols:
        for model in MODELS:
            rows, owners = _rows(scores, model, protocol, clients)
            kept = rows[:, 0] > 0
            rows, owners = rows[kept], owners[kept]
            count = len(rows)
            values = {"round": [round] * count, "client": owners.tolist()}
            values |= {"protocol": [protocol] * count, "model": [model] * count}
            values |= {name: _plain(name, rows[:, i]) for i, name in enumerate(METRICS)}
            for name, column in values.items():
                columns[name] += column
    return columns


def summarise(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The aggregates of one round's rows, a dict for each (protocol, model).

    Keys: ``protocol``, ``model``; ``accuracy`` (mean over clients), ``std`` (population, over clients),
    ``worst_decile`` (mean of the worst tenth of the clients, at least one), ``weighted`` (by samples), ``loss`` (mean
    over clients); where they are defined, ``ece`` (mean over clients), ``auc`` and ``auc_std`` (mean and population
    standard deviation over the clients that have one), ``left_out`` (labels without an area, of all clients).
    """
    protocols, models = np.array(columns["protocol"]), np.array(columns["model"])
    numbers = {
        name: np.array(columns[name], dtype=float)
        for name in ("samples", "accuracy", "loss", *_OPTIONAL)
        if name in columns
    }
    summary = []
    for protocol in dict.fromkeys(columns["protocol"]):
        for model in MODELS:
            chosen = (protocols == protocol) & (models == model)
            if chosen.any():
                rows = {name: column[chosen] for name, column in numbers.items()}
                summary.append({"protocol": protocol, "model": model} | _aggregates(rows))
    return summary


def _aggregates(rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    accuracy = rows["accuracy"]
    worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
    values = {
        "accuracy": float(accuracy.mean()),
        "std": float(accuracy.std()),
        "worst_decile": float(worst.mean()),
        "weighted": float(np.average(accuracy, weights=rows["samples"])),
        "loss": float(rows["loss"].mean()),
    }
    known = {name: rows[name][~np.isnan(rows[name])] for name in _OPTIONAL if name in rows}
    for name, column in known.items():
        if column.size:
            values[name] = float(column.sum() if name == "left_out" else column.mean())
    if "auc" in values:
        values["auc_std"] = float(known["auc"].std())
    return values


def _rows(
    scores: Mapping[str, Tensor], model: str, protocol: str, clients: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Metrics ``float64[n, 6]`` and whose they are, ``int64[n]``."""
    everybody, nobody = np.asarray(clients, dtype=np.int64), np.array([-1])
    if model == "global" and protocol in WEIGHTED and "global/global" in scores:
        alpha = weights(protocol, scores["global/alpha"])
        return class_weighted(scores["global/global"][None], alpha).numpy(), everybody
    if (found := scores.get(f"{model}/{protocol}")) is None:
        return np.zeros((0, len(METRICS))), everybody[:0]
    if model == "global" and protocol not in OWN:
        return metrics(found[None]).numpy(), nobody
    return found.numpy(), everybody


def _plain(name: str, values: np.ndarray) -> list[Any]:
    if name == "samples":
        return values.astype(np.int64).tolist()
    if name not in _OPTIONAL:
        return values.tolist()
    column: list[Any] = values.tolist()
    for i in np.flatnonzero(np.isnan(values)).tolist():
        column[i] = None
    return column
