"""The tables in which a run records its rounds, evaluations, messages and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raypfl.engine.events import RoundFinished, SimulatedRound
from raypfl.federation.cohort import Cohort, round_record
from raypfl.federation.cohort_draw import CohortDraw
from raypfl.federation.ledger import LEDGER, Ledger
from raypfl.federation.logged import ANALYSIS, IMAGES, LOGGED, EarlierKinds, Logged, kinds
from raypfl.learning.privacy import SPENDING, Spending
from raypfl.learning.privacy.accounting import accounted
from raypfl.learning.privacy.settings import PrivacySettings
from raypfl.storage.checkpoints import read_table
from raypfl.storage.columns import Columns
from raypfl.storage.tables import RunTable, to_arrow

ROUNDS = {
    "round": "int32",
    "loss": "float64",
    "seconds": "float64",
    "bytes_up": "int64",
    "bytes_down": "int64",
    "clients": "int32",
    "dropped": "int32",
    "failed": "int32",
    "cohort": "int32 list",
}
"""Columns of the table of rounds, and their kinds."""

TIMED_ROUNDS = {
    **ROUNDS,
    "late": "int32",
    "simulated_seconds": "float64",
    "simulated_time": "float64",
    "joules": "float64",
}
"""The same if time is simulated."""

STALENESS = {"staleness": "int32 list"}
"""A further column if rounds are asynchronous: how late each reply of the cohort is."""


def columns_of_rounds(has_clock: bool, is_asynchronous: bool) -> dict[str, str]:
    """Return the columns of a run's table of rounds, and their kinds; `has_clock` : whether time is simulated."""
    columns = TIMED_ROUNDS if has_clock else ROUNDS
    return columns | STALENESS if is_asynchronous else columns


def with_privacy(tables: Mapping[str, pa.Table], settings: PrivacySettings) -> dict[str, pa.Table]:
    """Return a finished run's tables with the total privacy spent, if any, in place of the single spendings."""
    tables_by_name = dict(tables)
    spending = tables_by_name.pop("spending")
    if spending.num_rows:
        tables_by_name["privacy"] = pa.table(accounted(spending.to_pydict(), settings))
    return tables_by_name


class RunTables:
    """The tables of a run, and the traffic of its finished rounds.

    Parameters
    ----------
    evaluations : the columns of the evaluations table, and their kinds.
    saved : the tables of a checkpoint, by name, to begin with; None: all tables are empty.
    columns : the columns of the table of rounds, and their kinds.
    """

    def __init__(
        self,
        evaluations: Mapping[str, str],
        saved: Mapping[str, RunTable] | None = None,
        columns: Mapping[str, str] = ROUNDS,
    ):
        kinds_by_table = {
            "rounds": columns,
            "evaluations": evaluations,
            "ledger": LEDGER,
            "logged": LOGGED,
            "images": IMAGES,
            "spending": SPENDING,
        }
        self.by_name = {name: RunTable(Columns(table_kinds)) for name, table_kinds in kinds_by_table.items()}
        self.by_name |= saved or {}
        self._bytes_up = 0
        self._bytes_down = 0
        self._joules = 0.0

    def count_costs(self, checkpoints: str) -> None:
        """Add up traffic and energy of all finished rounds; the older rows are read from the checkpoints' files.

        Raises
        ------
        CheckpointError : if a file is missing or damaged.
        """
        rounds = read_table(checkpoints, self.by_name["rounds"])
        self._bytes_up = sum(rounds["bytes_up"].to_pylist())
        self._bytes_down = sum(rounds["bytes_down"].to_pylist())
        if "joules" in rounds.column_names:
            self._joules = sum(rounds["joules"].to_pylist())

    def add_round(
        self, number: int, cohort: Cohort, cohort_draw: CohortDraw, seconds: float, ledger: Ledger
    ) -> RoundFinished:
        """Record a finished round, and return its event."""
        loss_of_client, logged = round_record(cohort)
        losses = [loss_of_client[client] for client in cohort.ids if client in loss_of_client]
        bytes_up = ledger.total("up", number)
        bytes_down = ledger.total("down", number)
        self._bytes_up += bytes_up
        self._bytes_down += bytes_down
        self._joules += cohort_draw.joules
        finished = RoundFinished(
            round=number,
            loss=float(np.mean(losses)) if losses else math.nan,
            seconds=seconds,
            bytes_up=bytes_up,
            bytes_down=bytes_down,
            clients=int(cohort.present.sum()),
            dropped=len(cohort_draw.dropped),
            failed=len(cohort.failed),
            bytes_up_total=self._bytes_up,
            bytes_down_total=self._bytes_down,
            simulated=self._simulated(cohort_draw),
            logged=logged,
        )

        row = {**vars(finished), "cohort": cohort.ids, "staleness": cohort_draw.staleness}
        if finished.simulated is not None:
            simulated = finished.simulated
            row["late"] = simulated.late
            row["simulated_seconds"] = simulated.seconds
            row["simulated_time"] = simulated.time
            row["joules"] = simulated.joules
        rounds = self.by_name["rounds"].waiting
        rounds.append(**{name: row[name] for name in rounds.kinds})
        self.add_logged(number, logged)
        self.add_spending(number, "training", cohort.spent)
        return finished

    def _simulated(self, cohort_draw: CohortDraw) -> SimulatedRound | None:
        """Return a round in simulated time, if time is simulated."""
        if "simulated_time" not in self.by_name["rounds"].waiting.kinds:
            return None
        return SimulatedRound(
            seconds=cohort_draw.seconds,
            time=cohort_draw.ends,
            joules=cohort_draw.joules,
            joules_total=self._joules,
            late=len(cohort_draw.late),
        )

    def add_logged(self, number: int, logged: Logged) -> None:
        """Record what method and analyses logged in a round."""
        for name, value in logged.values.items():
            self.by_name["logged"].waiting.append(round=number, name=name, value=value)
        for name, png in logged.images.items():
            self.by_name["images"].waiting.append(round=number, name=name, png=png)
        for name, columns in logged.tables.items():
            empty = RunTable(Columns({"round": "int32", **kinds(columns)}))
            table = self.by_name.setdefault(f"{ANALYSIS}{name}", empty)
            num_rows = len(next(iter(columns.values())))
            table.waiting.extend({"round": [number] * num_rows, **columns})

    def add_evaluations(self, columns: Mapping[str, Sequence[Any]]) -> None:
        """Record an evaluation."""
        self.by_name["evaluations"].waiting.extend(columns)

    def add_spending(self, number: int, phase: str, spent: Sequence[Spending]) -> None:
        """Record what a round's ``training`` or ``prediction`` spent of clients' privacy."""
        for row in spent:
            self.by_name["spending"].waiting.append(round=number, phase=phase, **row._asdict())

    def logged_kinds(self) -> EarlierKinds:
        """Return the kinds of the columns of all tables that were logged so far."""
        kinds_by_table = {}
        for name, table in self.by_name.items():
            if name.startswith(ANALYSIS):
                column_kinds = {column: kind for column, kind in table.waiting.kinds.items() if column != "round"}
                kinds_by_table[name.removeprefix(ANALYSIS)] = column_kinds
        return kinds_by_table

    def whole(self, checkpoints: str) -> dict[str, pa.Table]:
        """Return all tables with all their rows; the older rows are read from the checkpoints' files.

        Raises
        ------
        CheckpointError : if a file is missing or damaged.
        """
        return {name: read_table(checkpoints, table) for name, table in self.by_name.items()}

    def waiting(self) -> dict[str, pa.Table]:
        """Return all tables, with only the rows that are newer than the last checkpoint."""
        return {name: to_arrow(table.waiting) for name, table in self.by_name.items()}
