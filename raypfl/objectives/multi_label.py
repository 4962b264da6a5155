"""Several labels a sample, by binary cross-entropy."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.objectives.base import METRICS, OBJECTIVES, Loss, Metric, Objective, OverAll, Scores
from raypfl.objectives.classification import COLUMNS, Accuracy


class LabelScores(Scores):
    """Logits and labels ``[k, b, L]``."""

    @cached_property
    def right(self) -> Tensor:
        """The share of a sample's labels whose logit has the right sign."""
        return ((self.outputs > 0) == (self.targets > 0.5)).to(self.outputs.dtype).mean(-1)

    @cached_property
    def loss(self) -> Tensor:
        wanted = self.targets.to(self.outputs.dtype)
        return F.binary_cross_entropy_with_logits(self.outputs, wanted, reduction="none").mean(-1)


class RightLabels(Accuracy):
    """The share of labels on the right side."""

    heading: ClassVar[str] = "right\nlabels"
    words: ClassVar[str] = "the share of right labels"


@METRICS.register("auc")
class MacroAUC(OverAll):
    """Mean over labels of the area under the ROC curve."""

    name: ClassVar[str] = "auc"
    heading: ClassVar[str] = "AUC"
    words: ClassVar[str] = "macro AUC"
    percent: ClassVar[bool] = True

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        return macro_auc(outputs, targets)[0]


@METRICS.register("left_out")
class LabelsLeftOut(OverAll):
    """Labels without positives or without negatives among the samples, which have no area."""

    name: ClassVar[str] = "left_out"
    shown: ClassVar[bool] = False
    added: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = False

    def of_all(self, outputs: Tensor, targets: Tensor) -> float:
        positive = (targets > 0.5).sum(0)
        return float(((positive == 0) | (positive == len(targets))).sum())


@OBJECTIVES.register("multi-label")
class MultiLabel(Objective):
    """Several labels a sample: binary cross-entropy of logits ``[b, L]``, mean over samples and labels."""

    targets: ClassVar[str] = "labels"
    metrics: ClassVar[tuple[Metric, ...]] = (RightLabels(), Loss(), MacroAUC(), LabelsLeftOut())
    primary: ClassVar[str] = "auc"
    columns: ClassVar[tuple[str, ...]] = COLUMNS
    weighs: ClassVar[bool] = True

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (F.softplus(outputs) - targets.to(outputs.dtype) * outputs).mean(-1)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return LabelScores(outputs, targets, self)


def macro_auc(scores: Tensor, targets: Tensor) -> tuple[float, int]:
    """Mean over labels of the area under the ROC curve; labels without positives or without negatives are left out.

    The area is the chance that a positive scores above a negative, ties counting half (Hanley and McNeil 1982).

    Parameters
    ----------
    scores : ``[n, L]``. targets : ``[n, L]``, positive above one half.

    Returns
    -------
    The mean, NaN if no label is left, and the number of labels left out.
    """
    areas = []
    for score, target in zip(scores.unbind(1), targets.unbind(1), strict=True):
        positive = target > 0.5
        above, below = score[positive], score[~positive].sort().values
        if len(above) and len(below):
            wins = torch.searchsorted(below, above) + torch.searchsorted(below, above, right=True)
            areas.append(float(wins.double().sum()) / (2 * len(above) * len(below)))
    return (sum(areas) / len(areas) if areas else float("nan")), scores.shape[1] - len(areas)
