"""The events of a run that is over, read from its folder, for those that did not hear them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc

from raypfl.engine.events import Evaluated, Event, RoundFinished, RunFinished, RunStarted, SimulatedRound
from raypfl.experiment import Experiment
from raypfl.federation.logged import Logged
from raypfl.runs.records import recorded_end
from raypfl.runs.result import RunResult


def tracked(experiment: Experiment, uri: str | None = None) -> Experiment:
    """Return an experiment with tracking on, at this tracking URI of MLflow; None: at its own."""
    changes = ["tracking.mlflow=true"]
    if uri:
        changes.append(f"tracking.uri={json.dumps(uri)}")
    return experiment.override(changes)


def events_of(result: RunResult, uri: str | None = None) -> Iterator[Event]:
    """Yield the events of a tracked run, except checkpoints and warnings.

    `uri` : MLflow's tracking URI; None: that of the experiment.
    """
    yield RunStarted(
        run=result.run_dir.name,
        run_dir=str(result.run_dir.resolve()),
        experiment=tracked(result.experiment, uri),
        metadata=result.metadata,
        first_round=0,
    )

    evaluated_rounds = set(pc.unique(result.evaluations["round"]).to_pylist())
    if 0 in evaluated_rounds:
        yield Evaluated(0, result.summary(0))

    bytes_up = 0
    bytes_down = 0
    joules = 0.0
    for row in result.rounds.to_pylist():
        # Lists of clients and of the age of their models, which no event has.
        row.pop("cohort")
        row.pop("staleness", None)
        bytes_up += row["bytes_up"]
        bytes_down += row["bytes_down"]
        logged = _logged(result, row["round"])
        simulated = None
        if "simulated_time" in row:
            joules += row["joules"]
            simulated = SimulatedRound(
                seconds=row.pop("simulated_seconds"),
                time=row.pop("simulated_time"),
                joules=row.pop("joules"),
                joules_total=joules,
                late=row.pop("late"),
            )
        yield RoundFinished(
            **row, bytes_up_total=bytes_up, bytes_down_total=bytes_down, simulated=simulated, logged=logged
        )
        if row["round"] in evaluated_rounds:
            yield Evaluated(row["round"], result.summary(row["round"]))

    yield RunFinished(**recorded_end(result.run_dir), tables=result.tables)


def _logged(result: RunResult, round: int) -> Logged:
    """Return what the method logged in a round, except its tables, which come whole at the end."""
    in_round = pc.field("round") == round
    values = result.logged.filter(in_round).to_pylist()
    images = result.images.filter(in_round).to_pylist()
    return Logged(
        values={row["name"]: row["value"] for row in values},
        images={row["name"]: Path(row["file"]).read_bytes() for row in images},
    )
