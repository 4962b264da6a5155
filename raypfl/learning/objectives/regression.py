"""Regression: one or more numbers for each sample, by squared error."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.common.limits import POSITIVE
from raypfl.learning.objectives.base import (
    METRICS,
    OBJECTIVES,
    Loss,
    Metric,
    Objective,
    SampleMean,
    SampleSums,
    Scores,
    unrounded,
)
from raypfl.learning.objectives.batch import Batch

STANDARDISE = "The targets are large numbers; standardise them: "
"""The beginning of the advice after diverged training; the setting follows."""

_LARGE = 10.0
"""Targets with at least this mean or deviation may be too large for training to converge."""


class NumberScores(Scores):
    """Outputs and targets, ``[k, b, T]``."""

    objective: Regression

    @cached_property
    def target_rows(self) -> Tensor:
        """The targets, ``[k, b, T]``."""
        return rows_of(self.targets, self.outputs)

    @cached_property
    def errors(self) -> Tensor:
        """Prediction minus target, ``[k, b, T]``, in the units of the data set."""
        return self.objective.in_units(self.outputs) - self.target_rows


@METRICS.register("mse")
class MeanSquaredError(SampleMean):
    """Mean squared error."""

    name: ClassVar[str] = "mse"
    heading: ClassVar[str] = "MSE"
    phrase: ClassVar[str] = "mean squared error"
    higher_is_better: ClassVar[bool] = False

    def each(self, scores: Scores) -> Tensor:
        return scores.errors.square().mean(-1)  # type: ignore[attr-defined]


@METRICS.register("mae")
class MeanAbsoluteError(SampleMean):
    """Mean absolute error."""

    name: ClassVar[str] = "mae"
    heading: ClassVar[str] = "MAE"
    phrase: ClassVar[str] = "mean absolute error"
    higher_is_better: ClassVar[bool] = False

    def each(self, scores: Scores) -> Tensor:
        return scores.errors.abs().mean(-1)  # type: ignore[attr-defined]


@METRICS.register("r2")
class Determination(SampleSums):
    """Coefficient of determination, mean over a sample's numbers. Undefined if all samples have the same target."""

    name: ClassVar[str] = "r2"
    heading: ClassVar[str] = "R²"
    phrase: ClassVar[str] = "coefficient of determination"

    def width(self, targets: int) -> int:
        return 3 * targets

    def sums(self, scores: Scores) -> Tensor:
        # In single precision, squares of large numbers lose their differences.
        targets = scores.target_rows.double()  # type: ignore[attr-defined]
        errors = scores.errors.double()  # type: ignore[attr-defined]
        return torch.cat([errors.square(), targets, targets.square()], -1)

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        residual, total, squares = sums.unflatten(-1, (3, -1)).unbind(-2)
        count = samples[..., None]
        variation = squares - total.square() / count
        # Equal targets leave no more than rounding errors in the difference.
        varies = variation > 1e-12 * squares
        return torch.where(varies, 1 - residual / variation, torch.nan).mean(-1)


@OBJECTIVES.register("regression")
class Regression(Objective):
    """One or more numbers for each sample: squared error of outputs ``[b, T]``.

    Attributes
    ----------
    reduction : ``mean`` over samples and numbers, or half the ``sum`` over both, as in analyses of gradient descent.
    mean, std : the network learns ``(target - mean) / std``. The loss is in these units; metrics are in the units of
        the data set.
    """

    reduction: Literal["mean", "sum"] = "mean"
    mean: float = 0.0
    std: Annotated[float, POSITIVE] = 1.0

    targets: ClassVar[str] = "numbers"
    metrics: ClassVar[tuple[Metric, ...]] = (MeanSquaredError(), Loss(), MeanAbsoluteError(), Determination())
    primary: ClassVar[str] = "mse"
    weighs: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "losses" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.losses would get targets in the data set's units and outputs in the network's, since "
                "objective.mean and std scale the targets; define losses_of_numbers(self, outputs, targets), which "
                "gets both in the network's."
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("mean", "sum"):
            raise ConfigError(f"objective.reduction is {self.reduction!r}; it must be 'mean' or 'sum'.")

    def takes(self, shape: tuple[int, ...], targets: int) -> bool:
        return shape == (self.outputs(targets),)

    def losses_of_numbers(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each number, ``[b, T]``, from outputs and targets ``[b, T]`` in the network's units."""
        return (outputs - targets).square()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scaled_targets = (rows_of(targets, outputs) - self.mean) / self.std
        losses = self.losses_of_numbers(outputs, scaled_targets)
        return losses.mean(-1) if self.reduction == "mean" else losses.sum(-1) / 2

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = self.losses(unrounded(outputs), batch.y)
        return batch.mean(losses) if self.reduction == "mean" else (losses * batch.weight).sum()

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return NumberScores(outputs, targets, self)

    def in_units(self, outputs: Tensor) -> Tensor:
        return outputs * self.std + self.mean

    def advice_if_diverged(self, targets: Tensor) -> str:
        std, mean = map(float, torch.std_mean(targets.double(), correction=0))
        is_small = max(abs(mean), std) < _LARGE
        if (self.mean, self.std) != (0, 1) or is_small or std == 0:
            return ""
        return f"{STANDARDISE}{standardising(mean, std)}"


def standardising(mean: float, std: float) -> str:
    """Return the setting that standardises targets, as one types it, with four digits of each number."""
    # Not 3e+05, which YAML takes for text.
    numbers = [np.format_float_positional(float(f"{value:.4g}"), trim="-") for value in (mean, std)]
    return "'objective={{name: regression, mean: {}, std: {}}}'".format(*numbers)


def rows_of(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets ``[..., b]`` or ``[..., b, T]`` as ``[..., b, T]``, with the dtype of the outputs."""
    return targets.reshape(*targets.shape, *[1] * (outputs.dim() - targets.dim())).to(outputs.dtype)
