"""The base classes of objectives and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from raypfl.common.component import Component
from raypfl.common.errors import EvaluationError, IncompleteError
from raypfl.common.registry import Registry
from raypfl.learning.objectives.batch import Batch

OBJECTIVES = Registry("objective")
METRICS = Registry("metric")

KINDS = {
    "classes": "one class a sample, int64[N]",
    "labels": "several labels a sample, int8[N, L]",
    "numbers": "numbers, float32 or float64 [N] or [N, T]",
    "tokens": "a sequence of tokens a sample, int64[N, T]",
}
"""Kinds of targets."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Outputs of k models on a batch, from which metrics are computed. Subclasses add values that metrics share.

    Attributes
    ----------
    outputs : the outputs, ``[k, b, ...]``.
    targets : the targets, ``[k, b, ...]``.
    objective : the objective of the models.
    """

    outputs: Tensor
    targets: Tensor
    objective: Objective

    @cached_property
    def loss(self) -> Tensor:
        """The loss of each sample, ``[k, b]``."""
        return self.of_samples(self.objective.losses)

    def of_samples(self, function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...] = ()) -> Tensor:
        """Return ``function(outputs[n, ...], targets[n, ...])`` of all models' samples as ``[k, b, *shape]``.

        Raises
        ------
        EvaluationError : if the function, a method of the objective, does not return ``[n, *shape]``.
        """
        values: Any = function(self.outputs.flatten(0, 1), self.targets.flatten(0, 1))

        models_and_samples = self.targets.shape[:2]
        expected = [models_and_samples.numel(), *shape]
        if not isinstance(values, Tensor) or list(values.shape) != expected:
            returned = list(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise EvaluationError(
                f"{type(self.objective).__name__}.{function.__name__} returned {returned} for {expected[0]} samples; "
                f"it must return {expected}, a loss for each."
            )
        return values.unflatten(0, models_and_samples)


class Metric(Component):
    """A number that describes a model on test samples, computed from sums over the samples.

    Subclasses become frozen dataclasses; their fields are options. Most derive from :class:`SampleMean`.

    Attributes
    ----------
    name : the name of its column in the evaluations table and of its aggregate.
    heading : the heading in printed tables, with line breaks; empty: the name.
    phrase : the name in sentences; empty: `name`.
    higher_is_better : whether a higher value is better.
    percent : whether the value is a fraction, printed in %.
    shown : whether printed tables contain the metric.
    added : whether the aggregate is the sum over clients, not the mean.
    always : whether every tested model has a value. If not, aggregates skip clients without one.
    targets : the kind of targets, one of `KINDS`; empty: any.
    """

    name: ClassVar[str] = ""
    heading: ClassVar[str] = ""
    phrase: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = False
    shown: ClassVar[bool] = True
    added: ClassVar[bool] = False
    always: ClassVar[bool] = False
    targets: ClassVar[str] = ""

    def width(self, targets: int) -> int:
        """Return the number of sums, given the number of classes, labels, target numbers or tokens."""
        return 1

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        """Compute values ``[...]`` from sums ``float64[..., width]`` over ``samples[...]`` samples."""
        return sums[..., 0] / samples


class SampleMean(Metric):
    """The mean of :meth:`each` over samples."""

    always: ClassVar[bool] = True

    def each(self, scores: Scores) -> Tensor:
        """Return a number for each sample, ``[k, b]``."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define each(self, scores).")


class SampleSums(Metric):
    """A metric that :meth:`value` computes from several sums over samples."""

    def sums(self, scores: Scores) -> Tensor:
        """Return the terms of the sums for each sample, ``[k, b, width]``."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define sums(self, scores).")


class BinnedSums(Metric):
    """A metric that :meth:`value` computes from sums; each sample adds to only one of them."""

    def binned(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the index of the sum to which each sample adds, ``int64[k, b]``, and the term, ``[k, b]``."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define binned(self, scores).")


class OverAll(Metric):
    """A metric of all outputs together, such as an area under a curve. The test set is then evaluated in one piece."""

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the value for one model's outputs ``[n, ...]``, in the targets' units; NaN if it is undefined."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define of_all(self, outputs, targets).")


@METRICS.register("loss")
class Loss(SampleMean):
    """The mean loss of the objective."""

    name: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    shown: ClassVar[bool] = False

    def each(self, scores: Scores) -> Tensor:
        return scores.loss


class Objective(Component):
    """A loss and its metrics. An objective of your own defines at least the loss of each sample.

    Subclasses become frozen dataclasses; their fields are options of the setting ``objective``.

    Attributes
    ----------
    targets : the kind of targets, one of `KINDS`; empty: any.
    metrics : the metrics, in the order of their columns.
    primary : the name of the metric in pictures and progress. Spread and worst decile are computed for it, and it
        decides which round is best.
    columns : further columns of the evaluations table, which stay empty.
    weighs : whether `loss` is known to ignore padding. If not, it is tested before clients are trained together.
    """

    section: ClassVar[str] = "objective."

    targets: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = (Loss(),)
    primary: ClassVar[str] = "loss"
    columns: ClassVar[tuple[str, ...]] = ()
    weighs: ClassVar[bool] = False

    def outputs(self, targets: int) -> int:
        """Return the number of the network's outputs, given the number of classes, labels, target numbers or tokens."""
        return targets

    def takes(self, shape: tuple[int, ...], targets: int) -> bool:
        """Return whether a sample's outputs may have this shape; `targets` is as in :meth:`outputs`. By default any."""
        return True

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, ``[b]``, from outputs and targets ``[b, ...]``."""
        raise IncompleteError(f"{type(self).__name__} is not complete: define losses(self, outputs, targets).")

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return one client's loss on a batch, a scalar: by default the mean over its samples.

        Parameters
        ----------
        outputs : the network's outputs, ``[b, ...]``.
        batch : the batch, whose padding has weight 0 and must not count.
        """
        return batch.mean(self.losses(unrounded(outputs), batch.y))

    def features_of_samples(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the features ``[b, d]`` of each sample, from the inputs of the output layer."""
        return features

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Return the input of the metrics."""
        return Scores(outputs, targets, self)

    def in_units(self, outputs: Tensor) -> Tensor:
        """Return outputs in the units of the data set's targets, which a run's models give; by default as they are."""
        return outputs

    def advice_if_diverged(self, targets: Tensor) -> str:
        """Return a sentence on what else may be wrong when training diverges, besides the learning rate; or nothing.

        Parameters
        ----------
        targets : the training targets, ``[n, ...]``.
        """
        return ""


def unrounded(outputs: Tensor) -> Tensor:
    """Return bfloat16 outputs as float32, and others unchanged: rounding float64 to float32 would make ties."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs
