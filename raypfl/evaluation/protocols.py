"""How the models of a method are judged, client by client.

``local``: on the client's own test split. ``global``: on the union of all clients' test splits. Each with the personal
models and, where the method has one, with the global model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raypfl.messages import Each, plain
from raypfl.methods.base import Method

if TYPE_CHECKING:
    from raypfl.federation.clients import Clients

PROTOCOLS = ("local", "global")


def score(clients: Clients, method: Method, server: dict[str, Any], protocols: Iterable[str]) -> dict[str, Each]:
    """Correct answers, summed cross-entropy and samples of a group's clients, ``Each`` of ``float64[K, 3]``.

    Names are ``model/protocol``. The global model's ``global`` score follows from its ``local`` ones and is not
    computed.
    """
    scores: dict[str, Each] = {}
    if (personal := method.personal_model(clients, server)) is not None:
        if "local" in protocols:
            scores["personal/local"] = _rows(*clients.evaluate(personal))
        if "global" in protocols:
            everyone = clients.everyone("test")
            count = torch.full((len(clients),), len(everyone))
            scores["personal/global"] = _rows(*clients.evaluate_on(personal, everyone), count)
    if (shared := method.global_model(server)) is not None:
        scores["global/local"] = _rows(*clients.evaluate(shared))
    return scores


def _rows(*columns: torch.Tensor) -> Each:
    return Each(torch.stack([plain(c).double().cpu() for c in columns], dim=1), charged=False)


def tabulate(round: int, scores: Mapping[str, np.ndarray], protocols: Iterable[str]) -> dict[str, list[Any]]:
    """Columns of the evaluations table, a row for each (client, protocol, model).

    Parameters
    ----------
    scores : ``model/protocol -> float64[C, 3]`` of all clients. Clients without test samples get no ``local`` row; the
        global model's ``global`` row belongs to no client and has client -1.
    """
    columns: dict[str, list[Any]] = {
        n: [] for n in ("round", "client", "protocol", "model", "samples", "accuracy", "loss")
    }

    def add(client: int, protocol: str, model: str, row: np.ndarray) -> None:
        correct, loss, samples = row
        values = (round, client, protocol, model, int(samples), correct / samples, loss / samples)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)

    for name, rows in scores.items():
        model, protocol = name.split("/")
        if protocol in protocols:
            for client in np.flatnonzero(rows[:, 2]):
                add(int(client), protocol, model, rows[client])
        if model == "global" and "global" in protocols and rows[:, 2].any():
            add(-1, "global", "global", rows.sum(0))
    return columns


def summarise(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The aggregates of one round's rows, a dict for each (protocol, model).

    Keys: ``protocol``, ``model``; ``accuracy`` (mean over clients), ``std`` (population, over clients),
    ``worst_decile`` (mean of the worst tenth of the clients, at least one), ``weighted`` (by samples), ``loss`` (mean
    over clients).
    """
    summary = []
    protocols, models = np.array(columns["protocol"]), np.array(columns["model"])
    for protocol in PROTOCOLS:
        for model in ("personal", "global"):
            chosen = (protocols == protocol) & (models == model)
            if not chosen.any():
                continue
            accuracy, loss, samples = (
                np.array(columns[n], dtype=float)[chosen] for n in ("accuracy", "loss", "samples")
            )
            worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
            summary.append(
                {
                    "protocol": protocol,
                    "model": model,
                    "accuracy": float(accuracy.mean()),
                    "std": float(accuracy.std()),
                    "worst_decile": float(worst.mean()),
                    "weighted": float(np.average(accuracy, weights=samples)),
                    "loss": float(loss.mean()),
                }
            )
    return summary
