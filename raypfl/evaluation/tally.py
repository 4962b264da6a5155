"""Sums over test samples, from which a model's metrics follow; those of the parts of a test set add up to the whole's.

A tally has a row for each model, ``float64[K, W]``: samples, right answers, loss, AUC times samples, labels left out of
it, the gap of each calibration bin and, if it is kept by class, samples, right answers and loss of each class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from raypfl.federation.testing import Answers

METRICS = ("samples", "accuracy", "loss", "ece", "auc", "left_out")
"""Columns of :func:`metrics`; see ``docs/evaluation.md`` for what they are."""

BINS = 15
_SAMPLES, _RIGHT, _LOSS, _AUC, _LEFT_OUT, _GAPS = range(6)
_BY_CLASS = _GAPS + BINS


def tally(answers: Iterable[Answers], rows: int, classes: int = 0) -> Tensor:
    """The tally ``float64[rows, W]`` of all answers, a row for each model, or for each owner of the samples.

    Parameters
    ----------
    classes : keep it by class too, of so many; 0: do not. For samples of one class each alone.
    """
    sums: Tensor | None = None
    labelled: list[Answers] = []
    for part in answers:
        if sums is None:
            sums = _empty(rows, classes, part.outputs.device)
        if part.y.dim() == part.outputs.dim():
            labelled.append(part)
            _add_labels(sums, part)
        else:
            _add_classes(sums, part, classes)
    if sums is None:
        return _empty(rows, classes, torch.device("cpu"))
    if labelled:
        sums[:, _GAPS:_BY_CLASS] = torch.nan
        _add_auc(sums, labelled)
    else:
        sums[:, _AUC : _LEFT_OUT + 1] = torch.nan
    return sums


def metrics(sums: Tensor) -> Tensor:
    """``float64[..., 6]``, the columns of `METRICS`, of tallies ``[..., W]``; all but `samples` NaN without samples."""
    count = sums[..., _SAMPLES]
    gaps = sums[..., _GAPS:_BY_CLASS].abs().sum(-1)
    means = [total / count for total in (sums[..., _RIGHT], sums[..., _LOSS], gaps, sums[..., _AUC])]
    return torch.stack([count, *means, sums[..., _LEFT_OUT]], dim=-1)


def class_weighted(sums: Tensor, alpha: Tensor) -> Tensor:
    """The columns of `METRICS` if a sample of class c weighs ``alpha[..., c]``, from tallies by class ``[..., W]``.

    `samples` are those of a weight above 0. (Dai et al. 2023, acc_i of section 5)
    """
    count, right, loss = sums[..., _BY_CLASS:].unflatten(-1, (3, -1)).unbind(-2)
    total = (alpha * count).sum(-1)
    weighed = (count * (alpha > 0)).sum(-1)
    unknown = torch.full_like(total, torch.nan)
    means = [(alpha * part).sum(-1) / total for part in (right, loss)]
    return torch.stack([weighed, *means, unknown, unknown, unknown], dim=-1)


def _empty(rows: int, classes: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, _BY_CLASS + 3 * classes, dtype=torch.float64, device=device)


def _add_classes(sums: Tensor, part: Answers, classes: int) -> None:
    logits = _unrounded(part.outputs)
    y = part.y.expand(logits.shape[:2])
    top, guess = logits.max(-1)
    right = (guess == y).to(logits.dtype)
    below = logits - top[..., None]
    # What is below e^-80 adds nothing to 1, and exp takes ten times as long where its results are denormal.
    odds = below.clamp_min(-80.0).exp_().sum(-1)
    loss = odds.log() - below.gather(-1, y[..., None])[..., 0]
    confidence = odds.reciprocal_().nan_to_num_(0.0)
    # Bin b is ((b - 1) / 15, b / 15], and a confidence of 0 is in none.
    bins = (confidence * BINS).ceil_().clamp_(1, BINS).long().add_(_GAPS - 1)
    rows = torch.stack([torch.ones_like(loss), right, loss, right - confidence])
    rows = (rows if part.weight is None else rows * part.weight).double()
    _add(sums[part.models], part.owners, rows[:3])
    _add_at(sums[part.models], part.owners, bins, rows[3])
    for i, values in enumerate(rows[:3] if classes else []):
        _add_at(sums[part.models], part.owners, y + (_BY_CLASS + i * classes), values)


def _add_labels(sums: Tensor, part: Answers) -> None:
    logits = _unrounded(part.outputs)
    y = part.y.to(logits.dtype).expand(logits.shape)
    right = ((logits > 0) == (y > 0.5)).to(logits.dtype).mean(-1)
    loss = F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean(-1)
    rows = torch.stack([torch.ones_like(loss), right, loss])
    _add(sums[part.models], part.owners, (rows if part.weight is None else rows * part.weight).double())


def _unrounded(outputs: Tensor) -> Tensor:
    """In the precision that sums are taken in; single or double is left as it is, since rounding makes ties."""
    return outputs.float() if outputs.dtype == torch.bfloat16 else outputs


def _add(sums: Tensor, owners: Tensor | None, values: Tensor) -> None:
    """Add ``values[n, k, b]`` to the first n columns."""
    if owners is None:
        sums[:, : len(values)] += values.sum(-1).T
    else:
        sums[:, : len(values)].index_add_(0, owners, values[:, 0].T)


def _add_at(sums: Tensor, owners: Tensor | None, columns: Tensor, values: Tensor) -> None:
    """Add ``values[k, b]`` to the columns ``columns[k, b]``."""
    if owners is None:
        sums.scatter_add_(1, columns, values)
    else:
        sums.index_put_((owners, columns[0]), values[0], accumulate=True)


def _add_auc(sums: Tensor, parts: list[Answers]) -> None:
    every = range(len(sums))
    for k in every:
        chosen = [_of(k, part) for part in parts if k in every[part.models]]
        scores, targets = (torch.cat(tensors) for tensors in zip(*chosen, strict=True)) if chosen else (None, None)
        if scores is not None and targets is not None and len(scores):
            area, left_out = macro_auc(scores, targets)
            sums[k, _AUC] = area * sums[k, _SAMPLES]
            sums[k, _LEFT_OUT] = left_out


def _of(k: int, part: Answers) -> tuple[Tensor, Tensor]:
    """Row k's scores and targets ``[n, L]``."""
    row = 0 if part.owners is not None else k - part.models.start
    scores, targets = _unrounded(part.outputs[row]), part.y.expand(part.outputs.shape)[row]
    if part.owners is not None:
        real = part.owners == k
    elif part.weight is not None:
        real = part.weight[row] > 0
    else:
        return scores, targets
    return scores[real], targets[real]


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
