"""A column of a study's table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raypfl.experiment.checks.validation import FilePart


class MetricColumn(FilePart):
    """A column of the table.

    Attributes
    ----------
    protocol, model : protocol and model of the rows of an evaluation; ``deployed`` is the personal model where the
        method has one, else the global one.
    value : aggregate of these rows: a metric, or ``weighted``, ``worst_decile`` or ``std`` of the primary metric; None:
        the primary metric. Shares are shown in percent.
    choose : the ``last`` evaluated round; the one that ``validation`` data chose; or the one that is best by this very
        value on ``test`` data, which is too high a value, and what some papers print.
    last : number of last evaluated rounds over which the value is averaged, if they are not chosen otherwise; None: as
        many as ``evaluation.last`` of the run.
    spread : number after the ±: the standard deviation over the ``seeds``, or over the ``clients``.
    cost : what a run spends: rounds, megabytes in both directions, or its devices' simulated seconds or kilojoules.
    target : the column is the `cost` until the primary metric, mean over clients, is first as good as this, in its
        unit: 90 for 90 %.
    budget : the column is of the last evaluated round after which a run has spent at most this `cost`.
    down : blocks in which the column is measured; None: all.
    """

    protocol: str
    model: Literal["personal", "global", "deployed"] = "personal"
    value: str | None = None
    choose: Literal["last", "validation", "test"] = "last"
    last: int | None = Field(default=None, ge=1)
    spread: Literal["seeds", "clients"] = "seeds"
    cost: Literal["round", "megabytes", "simulated_seconds", "kilojoules"] | None = None
    target: float | None = None
    budget: float | None = Field(default=None, gt=0)
    down: list[str] | None = None

    def is_of(self, block: str) -> bool:
        """Return whether the column is measured in a block of rows."""
        return self.down is None or block in self.down
