"""The metrics of a run: those of its objective, and those that the user added."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from raypfl.learning.objectives import Classification, Metric, Objective

PRIMARY_AGGREGATES = ("std", "worst_decile", "weighted")
"""Further aggregates of the primary metric over clients."""


def is_tested_once(protocol: str, model: str) -> bool:
    """Return whether one model is tested on one test set, so that it has no spread over clients."""
    return model == "global" and (protocol == "global" or protocol.startswith("ood/"))


@dataclass(frozen=True)
class Measures:
    """The metrics of a run by name; one of them is primary.

    Attributes
    ----------
    extra : the metrics that the user added.
    targets : the number of classes, labels, target numbers or tokens.
    """

    objective: Objective = field(default_factory=Classification)
    extra: tuple[Metric, ...] = ()
    targets: int = 1

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by name, in the order of their columns."""
        return {metric.name: metric for metric in (*self.objective.metrics, *self.extra)}

    @property
    def primary(self) -> Metric:
        """The metric that is shown if there is room for only one."""
        return self.metrics[self.objective.primary]

    @property
    def secondary(self) -> list[Metric]:
        """All metrics except the primary one."""
        return [metric for metric in self.metrics.values() if metric is not self.primary]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Columns of the evaluations table with values of a model."""
        return tuple(dict.fromkeys(("samples", *self.objective.columns, *self.metrics)))

    def output_mismatch(self, outputs: Any) -> str:
        """Say why a network's outputs for a batch do not fit the targets; empty if they do.

        The text is the end of a sentence whose subject is the network.
        """
        if not isinstance(outputs, Tensor):
            return f"returns a {type(outputs).__name__}; in evaluation it must return a tensor [samples, ...]."
        shape = tuple(outputs.shape[1:])
        if self.objective.takes(shape, self.targets):
            return ""
        return (
            f"returns outputs of shape {shape} for a sample, which do not suit the targets ({self.objective.targets}: "
            f"{self.targets}). Its last layer must have as many outputs as the num_classes that it is called with, "
            f"{self.objective.outputs(self.targets)}."
        )

    def always(self, name: str) -> bool:
        """Return whether a metric has a value for every tested model."""
        return name in self.metrics and self.metrics[name].always

    @property
    def column_types(self) -> dict[str, str]:
        """All columns of the evaluations table and their types; see :mod:`raypfl.storage.columns`."""
        types = {"round": "int32", "client": "int32", "protocol": "text", "model": "text", "samples": "int64"}
        for name in self.columns[1:]:
            types[name] = "float64" if self.always(name) else "float64 or none"
        return types

    @property
    def aggregates(self) -> tuple[str, ...]:
        """Keys of a summary for each protocol and model, if they are defined."""
        return (self.primary.name, *PRIMARY_AGGREGATES, *(metric.name for metric in self.secondary))

    def metric_of(self, aggregate: str) -> Metric:
        """Return the metric behind an aggregate."""
        return self.primary if aggregate in PRIMARY_AGGREGATES else self.metrics[aggregate]

    def lower_is_better(self, aggregate: str) -> bool:
        """Return whether a lower value of an aggregate is better; always true for `std`."""
        return aggregate == "std" or not self.metric_of(aggregate).higher_is_better
