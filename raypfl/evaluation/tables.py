"""The evaluations table, from metrics that clients sent, and its aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.evaluation.masking import unmasked_name, with_masks
from raypfl.evaluation.measures import Measures
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.protocols import OWN, WEIGHTED, class_weights

MODELS = ("personal", "global")


def tabulate(
    measures: Measures,
    round: int,
    scores: Mapping[str, Tensor],
    clients: Sequence[int],
    protocols: Iterable[str],
    masks: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Columns of the evaluations table, with one row for each (protocol, model, client).

    A client without test samples has no row, and one without training samples no row of masked outputs. A global model
    that is evaluated once for all clients has client -1.

    Parameters
    ----------
    scores : results of :func:`raypfl.engine.scoring.score` for all `clients`: ``Each`` in rows ``[C, ...]``, ``Sum``
        added up.
    """
    columns: dict[str, list[Any]] = {name: [] for name in measures.kinds}
    for protocol in with_masks(protocols, masks):
        for model in MODELS:
            rows, owners = _rows(measures, scores, model, protocol, clients)
            kept = rows[:, 0] > 0
            rows, owners = rows[kept], owners[kept]
            count = len(rows)
            values = {"round": [round] * count, "client": owners.tolist()}
            values |= {"protocol": [protocol] * count, "model": [model] * count}
            values |= {name: rows[:, i].tolist() for i, name in enumerate(measures.columns)}
            values["samples"] = rows[:, 0].astype(int).tolist()
            for name, column in values.items():
                columns[name] += column
    return columns


def summarise(measures: Measures, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The aggregates of one round, a dict for each (protocol, model).

    Keys: ``protocol``, ``model``; for the primary metric, its name (mean over clients), ``std`` (population standard
    deviation over clients), ``worst_decile`` (mean of the worst tenth of the clients, at least one) and ``weighted``
    (mean by samples); for every other metric, its name (mean over clients, or sum if the metric says so). Clients for
    which a metric is undefined are left out; so is a metric that is undefined for all.
    """
    protocols, models = np.array(columns["protocol"]), np.array(columns["model"])
    numbers = {name: np.array(columns[name], dtype=float) for name in ("samples", *measures.metrics) if name in columns}
    summary = []
    for protocol in dict.fromkeys(columns["protocol"]):
        for model in MODELS:
            chosen = (protocols == protocol) & (models == model)
            if chosen.any():
                rows = {name: column[chosen] for name, column in numbers.items()}
                summary.append({"protocol": protocol, "model": model} | _aggregates(measures, rows))
    return summary


def _aggregates(measures: Measures, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    known = {
        name: np.ones(len(rows[name]), dtype=bool) if measures.always(name) else ~np.isnan(rows[name])
        for name in measures.metrics
        if name in rows
    }
    values = {}
    primary = measures.primary
    if known[primary.name].any():
        have = known[primary.name]
        each = rows[primary.name][have]
        from_worst = np.sort(each) if primary.higher_is_better else np.sort(each)[::-1]
        values = {
            primary.name: float(each.mean()),
            "std": float(each.std()),
            "worst_decile": float(from_worst[: max(1, len(each) // 10)].mean()),
            "weighted": float(np.average(each, weights=rows["samples"][have])),
        }
    for metric in measures.others:
        if metric.name in known and known[metric.name].any():
            column = rows[metric.name][known[metric.name]]
            values[metric.name] = float(column.sum() if metric.added else column.mean())
    return values


def _rows(
    measures: Measures, scores: Mapping[str, Tensor], model: str, protocol: str, clients: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Values ``float64[n, columns]`` and their clients ``int64[n]``."""
    everybody, nobody = np.asarray(clients, dtype=np.int64), np.array([-1])
    if model == "global" and protocol in WEIGHTED and "global/global" in scores:
        alpha = class_weights(protocol, scores["global/alpha"])
        return MetricSums(measures, by_class=True).class_weighted(
            scores["global/global"][None], alpha
        ).numpy(), everybody
    if (found := scores.get(f"{model}/{protocol}")) is None:
        return np.zeros((0, len(measures.columns))), everybody[:0]
    if model == "global" and unmasked_name(protocol) not in OWN:
        return MetricSums(measures).values(found[None]).numpy(), nobody
    return found.numpy(), everybody
