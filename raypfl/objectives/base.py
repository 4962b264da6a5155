"""What is learned, and how models are judged: the loss of a batch, and metrics with their names and directions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

import torch
from torch import Tensor

from raypfl.common.registry import Registry

if TYPE_CHECKING:
    from raypfl.objectives.batch import Batch

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
    """What some models say of a batch, as metrics look at it; an objective may add what several metrics need.

    Attributes
    ----------
    outputs : of the network, ``[k, b, ...]`` for k models.
    targets : ``[k, b, ...]``.
    objective : what the models learn.
    """

    outputs: Tensor
    targets: Tensor
    objective: Objective

    @cached_property
    def loss(self) -> Tensor:
        """Of each sample, ``[k, b]``."""
        return self.objective.losses(self.outputs, self.targets)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Metric:
    """A number about a model on test samples, from sums that add up over batches and over parts of a test set.

    Subclasses become frozen dataclasses, whose fields are options. Most derive from :class:`SampleMean`.

    Attributes
    ----------
    name : of its column in the evaluations table, and of its aggregate.
    heading : in printed tables, with line breaks; empty: the name.
    words : in sentences; empty: the name.
    higher_is_better : its direction.
    percent : whether it is a share, and printed in %.
    shown : whether printed tables have it.
    added : whether clients' values are added up; else their mean is taken.
    always : whether every model that was tested has a value; else some may have none, which is then left out.
    """

    name: ClassVar[str] = ""
    heading: ClassVar[str] = ""
    words: ClassVar[str] = ""
    higher_is_better: ClassVar[bool] = True
    percent: ClassVar[bool] = False
    shown: ClassVar[bool] = True
    added: ClassVar[bool] = False
    always: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    def width(self, targets: int) -> int:
        """How many sums it needs where there are so many classes, labels, numbers or tokens."""
        return 1

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        """From sums ``float64[..., width]`` over ``samples[...]`` samples to its values ``[...]``."""
        return sums[..., 0] / samples


Metric = dataclass(frozen=True, kw_only=True)(Metric)  # type: ignore[misc]


class SampleMean(Metric):
    """The mean over samples of what :meth:`each` gives."""

    always: ClassVar[bool] = True

    def each(self, scores: Scores) -> Tensor:
        """A number for each sample, ``[k, b]``."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define each(self, scores).")


class SampleSums(Metric):
    """Follows by :meth:`value` from several sums over samples."""

    def sums(self, scores: Scores) -> Tensor:
        """What to add up of each sample, ``[k, b, width]``."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define sums(self, scores).")


class BinnedSums(Metric):
    """Follows by :meth:`value` from sums of which each sample adds to one alone."""

    def binned(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """To which of the sums each sample adds, ``int64[k, b]``, and what, ``[k, b]``."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define binned(self, scores).")


class OverAll(Metric):
    """Needs all outputs of a model at once, as an area under a curve does; a test set is then tested in one piece."""

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        """Of one model's outputs ``[n, ...]`` on n samples; NaN: there is none."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define of_all(self, outputs, targets).")


@METRICS.register("loss")
class Loss(SampleMean):
    """The objective itself."""

    name: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    shown: ClassVar[bool] = False

    def each(self, scores: Scores) -> Tensor:
        return scores.loss


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Objective:
    """What is learned. One of your own says at least the loss of each sample.

    Subclasses become frozen dataclasses, whose fields are options of the setting ``objective``.

    Attributes
    ----------
    targets : the kind of targets that it is for, of `KINDS`; empty: any.
    metrics : by which models are judged, in the order of their columns.
    primary : the metric that pictures and progress show, of which spread and worst decile are, and by which the best
        round is chosen.
    columns : further columns of the evaluations table, which stay empty.
    weighs : whether `loss` is known to leave padding out; else that is tried before clients are trained together.
    """

    targets: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = (Loss(),)
    primary: ClassVar[str] = "loss"
    columns: ClassVar[tuple[str, ...]] = ()
    weighs: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)

    def outputs(self, targets: int) -> int:
        """How many outputs the network has for so many classes, labels, numbers or tokens."""
        return targets

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of each sample: ``[..., b]`` from outputs and targets ``[..., b, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} is not complete: define losses(self, outputs, targets).")

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """One client's loss on a batch, a scalar: by default the mean over its samples.

        Parameters
        ----------
        outputs : ``[b, ...]``, of the network. batch : of which padding has weight 0 and must not count.
        """
        return batch.mean(self.losses(unrounded(outputs), batch.y))

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """What metrics are computed from."""
        return Scores(outputs, targets, self)


Objective = dataclass(frozen=True, kw_only=True)(Objective)  # type: ignore[misc]


def unrounded(outputs: Tensor) -> Tensor:
    """In the precision that sums are taken in; single or double is left as it is, since rounding makes ties."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs
