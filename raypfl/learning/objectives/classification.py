"""Classification: one class for each sample, by cross-entropy."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from raypfl.learning.objectives.base import (
    METRICS,
    OBJECTIVES,
    BinnedSums,
    Loss,
    Metric,
    Objective,
    SampleMean,
    Scores,
)

BINS = 15
"""Number of bins of the expected calibration error."""

COLUMNS = ("accuracy", "loss", "ece", "auc", "left_out")
"""Columns of the evaluations table, the same for one class and for several labels."""


class ClassScores(Scores):
    """Logits ``[k, b, C]`` and classes ``[k, b]``."""

    @cached_property
    def _largest(self) -> tuple[Tensor, Tensor]:
        """The largest logit, and its class."""
        return self.outputs.max(-1)

    @cached_property
    def _shifted(self) -> Tensor:
        """Logits minus the largest one."""
        return self.outputs - self._largest[0][..., None]

    @cached_property
    def _partition(self) -> Tensor:
        """The sum of the exponentials of shifted logits; its reciprocal is the largest probability."""
        # Terms below e^-80 do not change a sum of at least 1, and exp is ten times slower where results are denormal.
        return self._shifted.clamp_min(-80.0).exp_().sum(-1)

    @cached_property
    def right(self) -> Tensor:
        """1 where the class has the largest logit, else 0."""
        return (self._largest[1] == self.targets).to(self.outputs.dtype)

    @cached_property
    def loss(self) -> Tensor:
        if type(self.objective).losses is not Classification.losses:
            return super().loss
        # The same cross-entropy, from terms that the calibration error needs too.
        return self._partition.log() - self._shifted.gather(-1, self.targets[..., None])[..., 0]

    @cached_property
    def confidence(self) -> Tensor:
        """The probability of the largest logit."""
        return self._partition.reciprocal().nan_to_num_(0.0)


@METRICS.register("accuracy")
class Accuracy(SampleMean):
    """The fraction of correct predictions."""

    name: ClassVar[str] = "accuracy"
    percent: ClassVar[bool] = True

    def each(self, scores: Scores) -> Tensor:
        return scores.right  # type: ignore[attr-defined]


@METRICS.register("ece")
class CalibrationError(BinnedSums):
    """Expected calibration error, in 15 bins (Guo et al. 2017)."""

    name: ClassVar[str] = "ece"
    heading: ClassVar[str] = "ECE"
    phrase: ClassVar[str] = "expected calibration error"
    higher_is_better: ClassVar[bool] = False
    percent: ClassVar[bool] = True

    def width(self, targets: int) -> int:
        return BINS

    def binned(self, scores: Scores) -> tuple[Tensor, Tensor]:
        confidence = scores.confidence  # type: ignore[attr-defined]
        # Bin b is ((b - 1) / 15, b / 15].
        bins = (confidence * BINS).ceil_().clamp_(1, BINS).long().sub_(1)
        return bins, scores.right - confidence  # type: ignore[attr-defined]

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        return sums.abs().sum(-1) / samples


@OBJECTIVES.register("classification")
class Classification(Objective):
    """One class for each sample: mean cross-entropy of logits ``[b, classes]``."""

    targets: ClassVar[str] = "classes"
    metrics: ClassVar[tuple[Metric, ...]] = (Accuracy(), Loss(), CalibrationError())
    primary: ClassVar[str] = "accuracy"
    columns: ClassVar[tuple[str, ...]] = COLUMNS
    weighs: ClassVar[bool] = True

    def takes(self, shape: tuple[int, ...], targets: int) -> bool:
        return len(shape) == 1 and shape[0] >= self.outputs(targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Under vmap F.cross_entropy is decomposed in Python, which is slower.
        return -F.log_softmax(outputs, dim=-1).gather(-1, targets[..., None]).squeeze(-1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return ClassScores(outputs, targets, self)
