"""The evaluations table, from the clients' metrics, and its aggregates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from raypfl.evaluation.masking import unmasked_name, with_masks
from raypfl.evaluation.metric_sums import MetricSums
from raypfl.evaluation.protocols import OWN_SPLITS, WEIGHTED, class_weights
from raypfl.evaluation.run_metrics import Measures

MODELS = ("personal", "global")


def tabulate(
    measures: Measures,
    round: int,
    scores: Mapping[str, Tensor],
    clients: Sequence[int],
    protocols: Iterable[str],
    masks: Sequence[str] = (),
) -> dict[str, list[Any]]:
    """Return the columns of the evaluations table, with a row for each (protocol, model, client).

    A client without test samples has no row, and one without training samples no row of masked outputs. A global model
    that is evaluated once for all clients has client -1.

    `scores` : the results of :func:`raypfl.engine.scoring.score` for all `clients`: ``Each`` in rows ``[C, ...]``,
    ``Sum`` added up.
    """
    columns: dict[str, list[Any]] = {name: [] for name in measures.column_types}
    for protocol in with_masks(protocols, masks):
        for model in MODELS:
            rows, owners = _rows(measures, scores, model, protocol, clients)
            has_samples = rows[:, 0] > 0
            rows = rows[has_samples]
            count = len(rows)

            columns["round"] += [round] * count
            columns["client"] += owners[has_samples].tolist()
            columns["protocol"] += [protocol] * count
            columns["model"] += [model] * count
            columns["samples"] += rows[:, 0].astype(int).tolist()
            # The first of these columns is `samples`.
            for i, name in enumerate(measures.columns[1:], 1):
                columns[name] += rows[:, i].tolist()
    return columns


def summarise(measures: Measures, columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the aggregates of one round, a dict for each (protocol, model).

    Keys: ``protocol``, ``model``; for the primary metric, its name (mean over clients), ``std`` (population standard
    deviation over clients), ``worst_decile`` (mean of the worst tenth of the clients, at least one) and ``weighted``
    (mean by samples); for every other metric, its name (mean over clients, or sum if the metric says so). Clients for
    which a metric is undefined are left out; so is a metric that is undefined for all.
    """
    protocols = np.array(columns["protocol"])
    models = np.array(columns["model"])
    numbers = {}
    for name in ("samples", *measures.metrics):
        if name in columns:
            numbers[name] = np.array(columns[name], dtype=float)

    summary = []
    for protocol in dict.fromkeys(columns["protocol"]):
        for model in MODELS:
            selected = (protocols == protocol) & (models == model)
            if selected.any():
                rows = {name: column[selected] for name, column in numbers.items()}
                summary.append({"protocol": protocol, "model": model} | _aggregates(measures, rows))
    return summary


def _aggregates(measures: Measures, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the aggregates of columns over clients; metrics without any value have none."""
    defined = {}
    for name in measures.metrics:
        if name in rows:
            # If a metric always has a value, its NaN is a result, not a missing value.
            defined[name] = np.ones(len(rows[name]), bool) if measures.always(name) else ~np.isnan(rows[name])

    aggregates = {}
    primary = measures.primary
    if defined[primary.name].any():
        values = rows[primary.name][defined[primary.name]]
        samples = rows["samples"][defined[primary.name]]
        from_worst = np.sort(values) if primary.higher_is_better else np.sort(values)[::-1]
        aggregates = {
            primary.name: float(values.mean()),
            "std": float(values.std()),
            "worst_decile": float(from_worst[: max(1, len(values) // 10)].mean()),
            "weighted": float(np.average(values, weights=samples)),
        }

    for metric in measures.secondary:
        if metric.name in defined and defined[metric.name].any():
            values = rows[metric.name][defined[metric.name]]
            aggregates[metric.name] = float(values.sum() if metric.added else values.mean())
    return aggregates


def _rows(
    measures: Measures, scores: Mapping[str, Tensor], model: str, protocol: str, clients: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return values ``float64[n, columns]`` and their clients ``int64[n]``."""
    all_clients = np.asarray(clients, dtype=np.int64)
    if model == "global" and protocol in WEIGHTED and "global/global" in scores:
        alpha = class_weights(protocol, scores["global/alpha"])
        sums = scores["global/global"][None]
        return MetricSums(measures, by_class=True).class_weighted(sums, alpha).numpy(), all_clients

    score = scores.get(f"{model}/{protocol}")
    if score is None:
        return np.zeros((0, len(measures.columns))), all_clients[:0]
    if model == "global" and unmasked_name(protocol) not in OWN_SPLITS:
        return MetricSums(measures).values(score[None]).numpy(), np.array([-1])
    return score.numpy(), all_clients
