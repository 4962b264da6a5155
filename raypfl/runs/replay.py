"""The events of a finished run, from its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.compute as pc

from raypfl.federation.logged import Logged
from raypfl.runs.result import SUMMARY
from raypfl.server.events import Evaluated, Event, RoundFinished, RunFinished, RunStarted

if TYPE_CHECKING:
    from raypfl.runs import Result


def events_of(result: Result, uri: str | None = None) -> Iterator[Event]:
    """The events of a tracked run, except checkpoints and warnings.

    `uri` : MLflow's tracking URI; None: that of the experiment.
    """
    changes = ["tracking.mlflow=true", *([f"tracking.uri={json.dumps(uri)}"] if uri else [])]
    yield RunStarted(
        result.run_dir.name,
        str(result.run_dir.resolve()),
        result.experiment.override(changes),
        result.metadata,
        0,
    )
    judged = set(pc.unique(result.evaluations["round"]).to_pylist())
    if 0 in judged:
        yield Evaluated(0, result.summary(0))
    sent = {way: [*accumulate(result.rounds[f"bytes_{way}"].to_pylist())] for way in ("up", "down")}
    for i, row in enumerate(result.rounds.to_pylist()):
        del row["cohort"]
        logged = _logged(result, row["round"])
        yield RoundFinished(**row, bytes_up_total=sent["up"][i], bytes_down_total=sent["down"][i], logged=logged)
        if row["round"] in judged:
            yield Evaluated(row["round"], result.summary(row["round"]))
    end = json.loads((result.run_dir / SUMMARY).read_text())
    yield RunFinished(**end, tables=result.tables)


def _logged(result: Result, round: int) -> Logged:
    """What the method logged in a round, except its tables, which come whole at the end."""
    values, images = (table.filter(pc.field("round") == round).to_pylist() for table in (result.logged, result.images))
    return Logged(
        values={row["name"]: row["value"] for row in values},
        images={row["name"]: Path(row["file"]).read_bytes() for row in images},
    )
