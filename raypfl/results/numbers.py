"""The numbers of runs over their seeds: curves over rounds, clients one by one, costs, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.results.compared import RunGroup
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

Axis = Literal["round", "megabytes", "seconds"]


@dataclass(frozen=True)
class Curve:
    """A quantity over the rounds that all seeds have, ``float64[n]`` each.

    Attributes
    ----------
    x : where, mean over the seeds. mean, low, high : mean, least and greatest of the seeds.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Message:
    """What one named message costs, over all of its clients and rounds.

    Attributes
    ----------
    exchange : within a round, from 1. direction : ``down`` or ``up``.
    phase : ``training``, or ``prediction``: what clients are sent to be evaluated with.
    numbers : least and most that one message holds.
    bytes : of one message, mean. times : messages of all clients, mean over seeds.
    megabytes : in all, of 10^6 bytes, mean over seeds.
    """

    name: str
    exchange: int
    direction: str
    phase: str
    numbers: tuple[int, int]
    bytes: float
    times: float
    megabytes: float


def metric_curves(compared: Sequence[RunGroup], protocol: str, against: Axis = "round") -> dict[tuple[int, str], Curve]:
    """`metric_curve` of all that have one, by the index of the group and the model."""
    keys = [(i, model) for i in range(len(compared)) for model in ("personal", "global")]
    return {key: curve for key in keys if (curve := metric_curve(compared[key[0]], protocol, key[1], against))}


def metric_curve(group: RunGroup, protocol: str, model: str, against: Axis = "round") -> Curve | None:
    """Mean of the primary metric over clients, in its unit, in the rounds in which all seeds were evaluated.

    None: there is no such model, or no such round.
    """
    name = group.measures.primary.name
    tables = [
        _rows(result, protocol, model).group_by("round", use_threads=False).aggregate([(name, "mean")])
        for result in group.results
    ]
    columns = [(table["round"], pc.multiply(table[f"{name}_mean"], group.unit.factor)) for table in tables]
    return _curve(group, columns, against)


def loss_curve(group: RunGroup) -> Curve | None:
    """Mean training loss of the cohort, in the rounds that all seeds did and in which anybody trained."""
    return _curve(group, [(result.rounds["round"], result.rounds["loss"]) for result in group.results])


def logged_curve(group: RunGroup, name: str) -> Curve | None:
    """A number that the method logged, in the rounds in which all seeds have a finite one."""
    tables = [result.logged.filter(pc.field("name") == name) for result in group.results]
    return _curve(group, [(table["round"], table["value"]) for table in tables])


def clients_from_worst(group: RunGroup, protocol: str) -> np.ndarray:
    """The final primary metric of every client with the model that it uses, in its unit, from the worst to the best:
    ``float64[clients of all seeds]``."""
    model = group.deployed(protocol)
    values = np.sort(np.concatenate([client_scores(result, protocol, model)[1] for result in group.results]))
    return values if group.unit.metric.higher_is_better else values[::-1]


def clients_with_both(group: RunGroup, protocol: str) -> np.ndarray:
    """The final primary metric of every client with the global and with its personal model: ``float64[n, 2]``."""
    rows = []
    for result in group.results:
        (ids, shared), (owners, own) = (client_scores(result, protocol, model) for model in ("global", "personal"))
        _, i, j = np.intersect1d(ids, owners, return_indices=True)
        rows.append(np.stack([shared[i], own[j]], axis=1))
    return np.concatenate(rows)


def client_scores(result: RunResult, protocol: str, model: str, best: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Ids ``int[n]`` of the clients, and their primary metric ``float64[n]`` in its unit.

    `best` : in the round that validation data chose, instead of the mean over the last rounds.
    """
    unit = Unit(result.experiment.measures.primary)
    rounds = [result.best_round] if best else result.last_rounds
    rows = _rows(result, protocol, model).filter(pc.field("round").isin(rounds))
    name = unit.metric.name
    if len(rounds) > 1:
        rows = rows.group_by("client", use_threads=False).aggregate([(name, "mean")])
        name = f"{name}_mean"
    return rows["client"].to_numpy(), unit.factor * rows[name].to_numpy()


def seconds(result: RunResult) -> float:
    """Of all rounds."""
    return float(pc.sum(result.rounds["seconds"]).as_py() or 0)


def messages(group: RunGroup) -> list[Message]:
    """The ledger by tensor, in the order in which messages are sent."""
    ledger = pa.concat_tables([result.ledger for result in group.results])
    ledger = ledger.append_column("total", pc.multiply(ledger["bytes"], pc.cast(ledger["clients"], pa.int64())))
    wanted = [("numbers", "min"), ("numbers", "max"), ("total", "sum"), ("clients", "sum")]
    rows = ledger.group_by(["phase", "exchange", "direction", "name"], use_threads=False).aggregate(wanted).to_pylist()
    seeds = len(group.results)
    return [
        Message(
            name=row["name"],
            exchange=row["exchange"] + 1,
            direction=row["direction"],
            phase=row["phase"],
            numbers=(row["numbers_min"], row["numbers_max"]),
            bytes=row["total_sum"] / max(row["clients_sum"], 1),
            times=row["clients_sum"] / seeds,
            megabytes=row["total_sum"] / seeds / 1e6,
        )
        for row in sorted(rows, key=lambda row: (row["phase"] == "prediction", row["exchange"], row["direction"]))
    ]


def prediction_traffic(group: RunGroup) -> tuple[float, float] | None:
    """kB of 10^3 bytes, up and down, that evaluating one client's model takes; None: it takes no exchange."""
    sent = [message for message in messages(group) if message.phase == "prediction"]
    up, down = (sum(one.bytes for one in sent if one.direction == way) / 1e3 for way in ("up", "down"))
    return (up, down) if sent else None


def _curve(
    group: RunGroup, columns: Sequence[tuple[pa.ChunkedArray, pa.ChunkedArray]], against: Axis = "round"
) -> Curve | None:
    """From rounds and values of each seed; NaN and infinite values have no place in it."""
    seeds: list[Mapping[int, float]] = []
    for rounds, values in columns:
        pairs = zip(rounds.to_pylist(), values.to_pylist(), strict=True)
        seeds.append({number: value for number, value in pairs if np.isfinite(value)})
    shared = sorted(set.intersection(*map(set, seeds)))
    if not shared:
        return None
    y = np.array([[seed[number] for number in shared] for seed in seeds])  # [seeds, rounds]
    x = np.array([_positions(result, against)[shared] for result in group.results])
    return Curve(x.mean(0), y.mean(0), y.min(0), y.max(0))


def _positions(result: RunResult, against: Axis) -> np.ndarray:
    """Where each round ends on an axis: ``float64[rounds + 1]``, by the round's number; round 0 is at 0."""
    if against == "round":
        return np.arange(result.rounds.num_rows + 1, dtype=float)
    names, scale = (["seconds"], 1.0) if against == "seconds" else (["bytes_up", "bytes_down"], 1e6)
    spent = sum(result.rounds[name].to_numpy() for name in names)
    return np.append(0.0, np.cumsum(spent) / scale)


def _rows(result: RunResult, protocol: str, model: str) -> pa.Table:
    chosen = (pc.field("protocol") == protocol) & (pc.field("model") == model) & (pc.field("samples") > 0)
    return result.evaluations.filter(chosen & pc.field(result.experiment.measures.primary.name).is_valid())
