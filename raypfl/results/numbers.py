"""The numbers of runs over their seeds: curves over rounds, clients one by one, costs, messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.evaluation.tables import MODELS
from raypfl.results.run_groups import RunGroup
from raypfl.results.units import Unit
from raypfl.runs.result import RunResult

Axis = Literal["round", "megabytes", "seconds", "simulated_seconds", "kilojoules"]
"""What is counted: ``simulated_seconds`` and ``kilojoules`` are of the clients' devices, in simulated time."""


@dataclass(frozen=True)
class Curve:
    """A quantity over the rounds that all seeds have, ``float64[n]`` each.

    Attributes
    ----------
    x : position on the axis, mean over the seeds.
    mean, low, high : mean, least and greatest of the seeds.
    """

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class ClientScores:
    """A run's scores by client: ids ``int[n]``, values ``float64[n]``, and their weights in the mean, ``[n]``."""

    clients: np.ndarray
    values: np.ndarray
    weights: np.ndarray

    @property
    def is_of_one_test(self) -> bool:
        """Whether it is the score of one model on one test set, which is no client's."""
        return self.clients.tolist() == [-1]


@dataclass(frozen=True)
class MessageCost:
    """The cost of one named message, over all of its clients and rounds.

    Attributes
    ----------
    exchange : number of the exchange within a round, from 1.
    direction : ``down`` or ``up``.
    phase : ``training``, or ``prediction`` for what clients are sent to be evaluated with.
    numbers : least and most numbers that one message holds.
    bytes : size of one message, mean.
    times : messages of all clients, mean over seeds.
    megabytes : total size in units of 10^6 bytes, mean over seeds.
    """

    name: str
    exchange: int
    direction: str
    phase: str
    numbers: tuple[int, int]
    bytes: float
    times: float
    megabytes: float


def metric_curves(groups: Sequence[RunGroup], protocol: str, against: Axis = "round") -> dict[tuple[int, str], Curve]:
    """Return the `metric_curve` of all groups and models that have one, by the group's index and the model."""
    curves = {}
    for i, group in enumerate(groups):
        for model in MODELS:
            curve = metric_curve(group, protocol, model, against)
            if curve is not None:
                curves[i, model] = curve
    return curves


def metric_curve(group: RunGroup, protocol: str, model: str, against: Axis = "round") -> Curve | None:
    """Return the mean of the primary metric over clients, in its unit, in the rounds in which all seeds were evaluated.

    None: there is no such model, or no such round.
    """
    name = group.measures.primary.name
    columns = []
    for result in group.results:
        rows = evaluated_rows(result, protocol, model)
        means = rows.group_by("round", use_threads=False).aggregate([(name, "mean")])
        columns.append((means["round"], pc.multiply(means[f"{name}_mean"], group.unit.factor)))
    return _curve(group, columns, against)


def loss_curve(group: RunGroup) -> Curve | None:
    """Return the mean training loss of the cohort, in the rounds that all seeds did and in which anybody trained."""
    return _curve(group, [(result.rounds["round"], result.rounds["loss"]) for result in group.results])


def logged_curve(group: RunGroup, name: str) -> Curve | None:
    """Return a number that was logged, in the rounds in which all seeds that logged it have a finite one."""
    results = []
    columns = []
    for result in group.results:
        table = result.logged.filter(pc.field("name") == name)
        if table.num_rows:
            results.append(result)
            columns.append((table["round"], table["value"]))
    return _curve(replace(group, results=tuple(results)), columns) if results else None


def clients_from_worst(group: RunGroup, protocol: str) -> np.ndarray:
    """Return the final primary metric of every client with the model that it uses, from worst to best, in its unit:
    ``float64[clients of all seeds]``."""
    model = group.deployed(protocol)
    values = np.sort(np.concatenate([client_scores(result, protocol, model).values for result in group.results]))
    return values if group.unit.metric.higher_is_better else values[::-1]


def clients_with_both(group: RunGroup, protocol: str) -> np.ndarray:
    """Return the final primary metric of every client with the global and with its personal model: ``float64[n, 2]``,
    of clients that have both."""
    rows = []
    for result in group.results:
        of_global = client_scores(result, protocol, "global")
        of_personal = client_scores(result, protocol, "personal")
        _, i, j = np.intersect1d(of_global.clients, of_personal.clients, return_indices=True)
        rows.append(np.stack([of_global.values[i], of_personal.values[j]], axis=1))
    return np.concatenate(rows)


def client_scores(result: RunResult, protocol: str, model: str, best: bool = False) -> ClientScores:
    """Return the clients' primary metric, in its unit.

    Parameters
    ----------
    best : whether to take the round that validation data chose, instead of the mean over the last rounds.
    """
    rounds = [result.best_round] if best else result.last_rounds
    return scores_of(result, protocol, model, result.experiment.measures.primary.name, rounds)


def scores_of(result: RunResult, protocol: str, model: str, value: str, rounds: Sequence[int | None]) -> ClientScores:
    """Return a run's scores by client, means over these rounds, in their unit.

    Parameters
    ----------
    value : a metric; or ``weighted``, the primary metric with clients' test samples as weights.
    """
    measures = result.experiment.measures
    is_weighted = value == "weighted"
    name = measures.primary.name if is_weighted else value
    rows = evaluated_rows(result, protocol, model, name).filter(pc.field("round").isin(rounds))

    means = rows.group_by("client", use_threads=False).aggregate([(name, "mean"), ("samples", "mean")])
    values = Unit(measures.metric_of(value)).factor * means[f"{name}_mean"].to_numpy()
    weights = means["samples_mean"].to_numpy() if is_weighted else np.ones(len(values))
    return ClientScores(means["client"].to_numpy(), values, weights)


def seconds(result: RunResult) -> float:
    """Return the duration of all rounds, each as long as the median one, as `positions` does."""
    return float(positions(result, "seconds")[-1])


def runs_together(group: RunGroup) -> int:
    """Return how many runs advanced together in the process of the group's runs, at most; 1: each was on its own."""
    counts = []
    for result in group.results:
        # The metadata are those of the last start: a resume may have gone on alone.
        starts = [entry.get("metadata", {}) for entry in result.history]
        counts += [start.get("together", 1) for start in [*starts, result.metadata]]
    return max(counts)


def has_simulated_time(group: RunGroup) -> bool:
    """Return whether the devices of all of a group's runs had simulated time."""
    return all("simulated_time" in result.rounds.column_names for result in group.results)


def messages(group: RunGroup) -> list[MessageCost]:
    """Return the ledger by tensor, in the order in which messages are sent."""
    ledger = pa.concat_tables([result.ledger for result in group.results])
    ledger = ledger.append_column("total", pc.multiply(ledger["bytes"], pc.cast(ledger["clients"], pa.int64())))
    aggregates = [("numbers", "min"), ("numbers", "max"), ("total", "sum"), ("clients", "sum")]
    by_tensor = ledger.group_by(["phase", "exchange", "direction", "name"], use_threads=False)
    rows = by_tensor.aggregate(aggregates).to_pylist()
    rows.sort(key=lambda row: (row["phase"] == "prediction", row["exchange"], row["direction"]))

    seeds = len(group.results)
    return [
        MessageCost(
            name=row["name"],
            exchange=row["exchange"] + 1,
            direction=row["direction"],
            phase=row["phase"],
            numbers=(row["numbers_min"], row["numbers_max"]),
            bytes=row["total_sum"] / max(row["clients_sum"], 1),
            times=row["clients_sum"] / seeds,
            megabytes=row["total_sum"] / seeds / 1e6,
        )
        for row in rows
    ]


def prediction_traffic(group: RunGroup) -> tuple[float, float] | None:
    """Return the kB (10^3 bytes) up and down for evaluating one client's model; None: it needs no exchange.

    They are means over all evaluated clients, since one that was never trained may need more exchanges than others.
    """
    predictions = [message for message in messages(group) if message.phase == "prediction"]
    if not predictions:
        return None

    # Every client takes part in the first exchange.
    evaluated_clients = max(message.times for message in predictions)
    megabytes = {"up": 0.0, "down": 0.0}
    for message in predictions:
        megabytes[message.direction] += message.megabytes
    return 1e3 * megabytes["up"] / evaluated_clients, 1e3 * megabytes["down"] / evaluated_clients


def _curve(
    group: RunGroup, columns: Sequence[tuple[pa.ChunkedArray, pa.ChunkedArray]], against: Axis = "round"
) -> Curve | None:
    """Return a curve from rounds and values of each seed, without NaN and infinite values."""
    seeds: list[Mapping[int, float]] = []
    for rounds, values in columns:
        pairs = zip(rounds.to_pylist(), values.to_pylist(), strict=True)
        seeds.append({round: value for round, value in pairs if np.isfinite(value)})

    shared = sorted(set.intersection(*map(set, seeds)))
    if not shared:
        return None

    # Both are [seeds, rounds].
    x = np.array([positions(result, against)[shared] for result in group.results])
    y = np.array([[seed[round] for round in shared] for seed in seeds])
    return Curve(x.mean(0), y.mean(0), y.min(0), y.max(0))


def positions(result: RunResult, against: Axis) -> np.ndarray:
    """Return where each round ends on an axis: ``float64[rounds + 1]``, by the round's number; round 0 is at 0.

    Rounds whose records were lost with a damaged table are as if they had cost nothing.
    """
    rounds = result.rounds["round"].to_numpy()
    by_round = np.zeros(result.round + 1)
    if against == "round":
        return np.arange(len(by_round), dtype=float)

    if against == "simulated_seconds":
        totals = result.rounds["simulated_time"].to_numpy()
    elif against == "kilojoules":
        totals = np.cumsum(result.rounds["joules"].to_numpy()) / 1e3
    elif against == "seconds":
        # Each round counts as the median one. Their sum would make the first method of a comparison look slow: its
        # first rounds trace the network, beside imports.
        durations = result.rounds["seconds"].to_numpy()
        median = np.median(durations) if len(durations) else 0.0
        totals = median * np.arange(1, len(durations) + 1)
    else:
        totals = np.cumsum(result.rounds["bytes_up"].to_numpy() + result.rounds["bytes_down"].to_numpy()) / 1e6
    by_round[rounds] = totals
    return np.maximum.accumulate(by_round)


def evaluated_rows(result: RunResult, protocol: str, model: str, metric: str = "") -> pa.Table:
    """Return a row for each round and client with test data and a value of the metric, by default the primary one."""
    chosen = (pc.field("protocol") == protocol) & (pc.field("model") == model) & (pc.field("samples") > 0)
    return result.evaluations.filter(chosen & pc.field(metric or result.experiment.measures.primary.name).is_valid())
