"""Several labels for each sample, by binary cross-entropy."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.learning.objectives.base import METRICS, OBJECTIVES, Loss, Metric, Objective, OverAll, Scores
from raypfl.learning.objectives.classification import COLUMNS, Accuracy


class LabelScores(Scores):
    """Logits and labels ``[k, b, L]``."""

    @cached_property
    def right(self) -> Tensor:
        """The fraction of a sample's labels whose logit has the right sign."""
        return ((self.outputs > 0) == (self.targets > 0.5)).to(self.outputs.dtype).mean(-1)


class RightLabels(Accuracy):
    """The fraction of correctly predicted labels."""

    heading: ClassVar[str] = "right\nlabels"
    phrase: ClassVar[str] = "the share of right labels"


@METRICS.register("auc")
class MacroAUC(OverAll):
    """Mean over labels of the area under the ROC curve, without labels that have no positives or no negatives.

    The area is the probability that a positive scores above a negative; ties count half (Hanley and McNeil 1982).
    """

    name: ClassVar[str] = "auc"
    heading: ClassVar[str] = "AUC"
    phrase: ClassVar[str] = "macro AUC"
    percent: ClassVar[bool] = True
    targets: ClassVar[str] = "labels"

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        areas = []
        for score, target in zip(outputs.unbind(1), targets.unbind(1), strict=True):
            positive = target > 0.5
            positives = score[positive]
            negatives = score[~positive].sort().values
            if len(positives) and len(negatives):
                # The negatives below each positive, and those below or equal: twice the wins, in which ties are half.
                below = torch.searchsorted(negatives, positives)
                below_or_equal = torch.searchsorted(negatives, positives, right=True)
                twice_wins = (below + below_or_equal).double().sum()
                areas.append(float(twice_wins) / (2 * len(positives) * len(negatives)))
        return sum(areas) / len(areas) if areas else float("nan")


@METRICS.register("left_out")
class LabelsLeftOut(OverAll):
    """The number of labels without positives or without negatives, for which the area is undefined."""

    name: ClassVar[str] = "left_out"
    shown: ClassVar[bool] = False
    added: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = False
    targets: ClassVar[str] = "labels"

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        positive = (targets > 0.5).sum(0)
        return float(((positive == 0) | (positive == len(targets))).sum())


@OBJECTIVES.register("multi-label")
class MultiLabel(Objective):
    """Several labels for each sample: binary cross-entropy of logits ``[b, L]``, mean over samples and labels."""

    targets: ClassVar[str] = "labels"
    metrics: ClassVar[tuple[Metric, ...]] = (RightLabels(), Loss(), MacroAUC(), LabelsLeftOut())
    primary: ClassVar[str] = "auc"
    columns: ClassVar[tuple[str, ...]] = COLUMNS
    weighs: ClassVar[bool] = True

    def takes(self, shape: tuple[int, ...], targets: int) -> bool:
        return shape == (self.outputs(targets),)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (F.softplus(outputs) - targets.to(outputs.dtype) * outputs).mean(-1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return LabelScores(outputs, targets, self)
