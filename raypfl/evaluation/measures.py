"""By which metrics a run's models are judged: its objective's, and those that a person added."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from raypfl.objectives import Classification, Metric, Objective

OF_PRIMARY = ("std", "worst_decile", "weighted")
"""Further aggregates of the primary metric over clients."""


@dataclass(frozen=True)
class Measures:
    """Metrics by name, one of which is the primary one.

    Attributes
    ----------
    objective : what is learned. extra : a person's own metrics.
    targets : how many classes, labels, numbers or tokens there are.
    """

    objective: Objective = field(default_factory=Classification)
    extra: tuple[Metric, ...] = ()
    targets: int = 1

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """By name, in order."""
        return {metric.name: metric for metric in (*self.objective.metrics, *self.extra)}

    @property
    def primary(self) -> Metric:
        """The metric that is shown where there is room for one."""
        return self.metrics[self.objective.primary]

    @property
    def others(self) -> list[Metric]:
        """All but the primary one."""
        return [metric for metric in self.metrics.values() if metric is not self.primary]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Of the evaluations table."""
        return tuple(dict.fromkeys(("samples", *self.objective.columns, *self.metrics)))

    def always(self, name: str) -> bool:
        """Whether a metric has a value wherever a model was tested."""
        return name in self.metrics and self.metrics[name].always

    @property
    def kinds(self) -> dict[str, str]:
        """The whole evaluations table: what each column holds, see :mod:`raypfl.storage.columns`."""
        whose = {"round": "int32", "client": "int32", "protocol": "text", "model": "text", "samples": "int64"}
        return whose | {name: "float64" if self.always(name) else "float64 or none" for name in self.columns[1:]}

    @property
    def aggregates(self) -> tuple[str, ...]:
        """What a summary has of each protocol and model, as far as it is defined."""
        return (self.primary.name, *OF_PRIMARY, *(metric.name for metric in self.others))

    def of(self, aggregate: str) -> Metric:
        """The metric that an aggregate is of."""
        return self.primary if aggregate in OF_PRIMARY else self.metrics[aggregate]

    def lower_is_better(self, aggregate: str) -> bool:
        """Whether less of an aggregate is better; of a spread it always is."""
        return aggregate == "std" or not self.of(aggregate).higher_is_better
