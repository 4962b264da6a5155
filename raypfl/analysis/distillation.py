"""How close the global model is to the ensemble of the clients' models, and what its error can be at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.analysis.base import ANALYSES, AnalysedRound, Analysis, LocalStep
from raypfl.analysis.ntk import at_statistics
from raypfl.common.errors import ConfigError
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.pool import Pool
from raypfl.models.flat import FlatModel

TOLERANCE = 1e-6
"""Of an inequality, for the rounding of probabilities in single precision."""


@ANALYSES.register("distillation")
class Distillation(Analysis):
    """The quantities of PerAda's generalization bounds (Xie et al. 2024, Theorems 1 and 2), on samples of two pools.

    With the probabilities g of the global model, h_m of the models that the round's m clients sent, their mean h, and
    p_m of the personal models, for each sample with label y:

        1[argmax g != y] <= 2 (1 - g_y),    1 - g_y <= (1 - h_y) + min(1, |g - h|_1)

    and the same with p_m in place of g and g in place of h. The sent model is that of a client's last training in the
    round, the personal one that of its first, if there are two.

    Attributes
    ----------
    every : rounds between two that are analysed; the last one always is.
    pool : of ``data.pools``: where the distillation distance, the mean of |g - h|_1, is measured.
    labelled : another one, with the clients' labels: where errors and their bounds are measured.
    samples : of each pool, the same in all rounds.
    """

    every: int = 1
    pool: str = "auxiliary"
    labelled: str = "validation"
    samples: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise ConfigError(f"analyses.distillation has samples {self.samples}; it must be 1 or more.")

    def needed_pools(self) -> tuple[str, ...]:
        return self.pool, self.labelled

    def start(self, view: AnalysedRound) -> None:
        if view.after is None:
            raise ConfigError(
                f"analyses.distillation compares the global model with the clients', but {type(view.method).__name__} "
                "has none. Choose another method, or leave the analysis out."
            )
        labels = self.of(view.pool(self.labelled)).y
        if labels.dim() > 1 or labels.is_floating_point() or bool((labels < 0).any()):
            raise ConfigError(
                f"analyses.distillation needs classes of the clients' for the pool {self.labelled!r}. Name another "
                "pool as its option labelled, such as a share of the training samples: data.pools={validation: 0.1}."
            )

    def after_training(self, step: LocalStep) -> dict[str, Any]:
        return {name: self.logits(step.model, step.theta, step.pool(getattr(self, name))) for name in _POOLS}

    def after_round(self, view: AnalysedRound) -> None:
        steps, model = [list(view.steps(client)) for client in view.clients], view.task.model
        if view.after is None or not all(steps):
            return
        with model.mode(train=False):
            ours = {name: self.logits(model, view.after, view.pool(getattr(self, name))).softmax(1) for name in _POOLS}
        sent = {name: _stacked([seen[-1].arrays[name] for seen in steps], model.device) for name in _POOLS}
        g, h, y = ours["labelled"], sent["labelled"].softmax(2).mean(0), self.of(view.pool(self.labelled)).y
        bound = Bound.of(g, h, y)
        view.log(
            distillation_distance=_distance(ours["pool"], sent["pool"].softmax(2).mean(0)).mean(),
            distillation_distance_to_mean_logits=_distance(ours["pool"], sent["pool"].mean(0).softmax(1)).mean(),
            ensemble_loss=bound.reference.mean(),
            global_error=bound.error.mean(),
            global_bound=bound.bound.mean(),
        )
        violated = bound.violated
        if all(len(seen) > 1 for seen in steps):
            logits = _stacked([seen[0].arrays["labelled"] for seen in steps], model.device)
            own = [Bound.of(p, g, y) for p in logits.softmax(2)]
            columns = {
                "personal_distance": torch.stack([one.distance.mean() for one in own]),
                "personal_error": torch.stack([one.error.mean() for one in own]),
                "personal_bound": torch.stack([one.bound.mean() for one in own]),
            }
            violated += sum(one.violated for one in own)
            view.log(**{name: values.mean() for name, values in columns.items()})
            view.log_table("distillation", {"client": view.clients} | columns)
        view.log(inequalities_violated=violated)

    def of(self, pool: Pool) -> Batch:
        """The samples of a pool that are looked at."""
        count = min(self.samples, len(pool))
        return next(pool.batches(count, fraction=count / len(pool)).once(count))

    def logits(self, model: FlatModel, theta: Tensor, pool: Pool) -> Tensor:
        """``float64[n, C]`` of a model vector ``[P+B]`` in evaluation mode."""
        with torch.no_grad():
            return at_statistics(model, theta)(model.parameters(theta), self.of(pool).x).double()


_POOLS = ("pool", "labelled")


class Bound(NamedTuple):
    """What a model's error on each sample is at most, given how it differs from another, ``[n]`` each.

    Attributes
    ----------
    error : 1 where the model's class is wrong. loss : one minus its probability of the right class.
    reference : the other's loss. distance : ``min(1, |.|_1)`` between both.
    """

    error: Tensor
    loss: Tensor
    reference: Tensor
    distance: Tensor

    @classmethod
    def of(cls, model: Tensor, other: Tensor, labels: Tensor) -> Bound:
        """Of two models' probabilities ``[n, C]``."""
        loss, reference = (1 - p.gather(1, labels[:, None])[:, 0] for p in (model, other))
        error = (model.argmax(1) != labels).to(model.dtype)
        return cls(error, loss, reference, _distance(model, other).clamp_max(1))

    @property
    def bound(self) -> Tensor:
        """Of the error."""
        return 2 * (self.reference + self.distance)

    @property
    def violated(self) -> int:
        """Samples for which one of the inequalities does not hold."""
        first, second = self.error > 2 * self.loss + TOLERANCE, self.loss > self.reference + self.distance + TOLERANCE
        return int((first | second).sum())


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(1)


def _stacked(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device)
