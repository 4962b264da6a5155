"""Runs as the numbers that are drawn and printed, over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypfl.results.contenders import Contender
from raypfl.results.units import Unit

if TYPE_CHECKING:
    from raypfl.runs import Result

MODELS = ("personal", "global")
Against = Literal["round", "megabytes", "seconds"]


@dataclass(frozen=True)
class Curve:
    """A quantity over a run, of several seeds: ``float64[n]`` each.

    Attributes
    ----------
    x : where, mean over the seeds. mean, low, high : the seeds' mean, least and greatest.
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
    phase : ``training``, or ``prediction``: what clients are given to be judged with.
    numbers : least and most that a client sends or gets at a time.
    bytes : of one message, mean. times : that it was sent, to or from one client, mean over seeds.
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


def judged(contender: Contender, protocol: str, model: str, against: Against = "round") -> Curve | None:
    """Mean of the primary metric over clients, in its unit, in the rounds in which all seeds were evaluated.

    None: there is no such model, or no such round.
    """
    runs = [_by_round(result, protocol, model) for result in contender.results]
    places = [_places(result, against) for result in contender.results]
    return _curve(runs, places)


def loss(contender: Contender) -> Curve | None:
    """Mean training loss over the cohort, in the rounds that all seeds did and in which anybody trained."""
    return _finite(contender, [(result.rounds["round"], result.rounds["loss"]) for result in contender.results])


def logged(contender: Contender, name: str) -> Curve | None:
    """A number that the method logged, in the rounds in which all seeds have a finite one."""
    mine = [result.logged.filter(pc.field("name") == name) for result in contender.results]
    return _finite(contender, [(table["round"], table["value"]) for table in mine])


def clients(contender: Contender, protocol: str, model: str) -> np.ndarray:
    """The primary metric of every client at the end, in its unit, ``float64[clients of all seeds]``."""
    return np.concatenate([np.empty(0), *(_final(result, protocol, model)[1] for result in contender.results)])


def pairs(contender: Contender, protocol: str) -> np.ndarray:
    """The same of the clients of all seeds, ``float64[n, 2]``: of the global model, of the personal one."""
    rows = []
    for result in contender.results:
        (ids, shared), (owners, own) = (_final(result, protocol, model) for model in ("global", "personal"))
        _, i, j = np.intersect1d(ids, owners, return_indices=True)
        rows.append(np.stack([shared[i], own[j]], axis=1))
    return np.concatenate(rows)


def seconds(result: Result) -> float:
    """Of all rounds."""
    return float(pc.sum(result.rounds["seconds"]).as_py() or 0)


def messages(contender: Contender) -> list[Message]:
    """The ledger by tensor, in the order in which messages are sent."""
    keys = ["phase", "exchange", "direction", "name"]
    whole = pa.concat_tables([result.ledger for result in contender.results])
    total = pc.multiply(whole["bytes"], pc.cast(whole["clients"], pa.int64()))
    whole = whole.append_column("total", total)
    wanted = [("numbers", "min"), ("numbers", "max"), ("total", "sum"), ("clients", "sum")]
    rows = whole.group_by(keys, use_threads=False).aggregate(wanted).to_pylist()
    seeds = len(contender.results)
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


def prediction(contender: Contender) -> tuple[float, float] | None:
    """kB of 10^3 bytes, up and down, that a client's model takes when it is judged; None: it takes no exchange."""
    sent = [message for message in messages(contender) if message.phase == "prediction"]
    up, down = (sum(one.bytes for one in sent if one.direction == way) / 1e3 for way in ("up", "down"))
    return (up, down) if sent else None


def _finite(contender: Contender, columns: Sequence[tuple[pa.ChunkedArray, pa.ChunkedArray]]) -> Curve | None:
    runs = []
    for rounds, values in columns:
        pairs = zip(rounds.to_pylist(), values.to_pylist(), strict=True)
        runs.append({number: value for number, value in pairs if np.isfinite(value)})
    return _curve(runs, [_places(result, "round") for result in contender.results])


def _curve(runs: Sequence[Mapping[int, float]], places: Sequence[Mapping[int, float]]) -> Curve | None:
    rounds = sorted(set.intersection(*(set(run) for run in runs)))
    if not rounds:
        return None
    values = np.array([[run[number] for number in rounds] for run in runs])  # [seeds, rounds]
    x = np.array([[place[number] for number in rounds] for place in places])
    return Curve(x.mean(0), values.mean(0), values.min(0), values.max(0))


def _places(result: Result, against: Against) -> dict[int, float]:
    """Where each round's end is, and where the run begins, which is the end of round 0."""
    rounds = result.rounds["round"].to_numpy()
    if against == "round":
        reached = rounds.astype(float)
    elif against == "seconds":
        reached = np.cumsum(result.rounds["seconds"].to_numpy())
    else:
        reached = np.cumsum(result.rounds["bytes_up"].to_numpy() + result.rounds["bytes_down"].to_numpy()) / 1e6
    return {0: 0.0, **dict(zip(rounds.tolist(), reached.tolist(), strict=True))}


def _by_round(result: Result, protocol: str, model: str) -> dict[int, float]:
    unit = Unit(result.experiment.measures.primary)
    name = unit.metric.name
    means = _rows(result, protocol, model).group_by("round", use_threads=False).aggregate([(name, "mean")]).to_pydict()
    return dict(zip(means["round"], unit.of(means[f"{name}_mean"]), strict=True))


def _final(result: Result, protocol: str, model: str) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the clients and how they did in the last evaluated round."""
    unit = Unit(result.experiment.measures.primary)
    last = _rows(result, protocol, model).filter(pc.field("round") == pc.max(result.evaluations["round"]))
    return last["client"].to_numpy(), unit.factor * last[unit.metric.name].to_numpy()


def _rows(result: Result, protocol: str, model: str) -> pa.Table:
    chosen = (pc.field("protocol") == protocol) & (pc.field("model") == model) & (pc.field("samples") > 0)
    return result.evaluations.filter(chosen & pc.field(result.experiment.measures.primary.name).is_valid())
