"""Distance of the global model to the ensemble of the clients' models, and the bound of its error that follows."""

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
from raypfl.learning.sample_pools import Pool
from raypfl.models.flat import FlatModel

TOLERANCE = 1e-6
"""Tolerance of an inequality, since probabilities are rounded in single precision."""


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
    every : number of rounds from one analysis to the next; the last round is always analysed.
    pool : name in ``data.pools`` of the pool for the distillation distance, the mean of |g - h|_1.
    labelled : name of a pool with the clients' labels, for errors and their bounds.
    samples : number of samples of each pool, the same in all rounds.
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

        labels = self.batch(view.pool(self.labelled)).y
        if labels.dim() > 1 or labels.is_floating_point() or bool((labels < 0).any()):
            raise ConfigError(
                f"analyses.distillation needs a pool whose labels are the clients' classes, and {self.labelled!r} has "
                "none. Name another pool in its option labelled, such as a share of the training samples: "
                "data.pools={validation: 0.1}."
            )

    def after_training(self, step: LocalStep) -> dict[str, Any]:
        return {
            "pool": self.logits(step.model, step.theta, step.pool(self.pool)),
            "labelled": self.logits(step.model, step.theta, step.pool(self.labelled)),
        }

    def after_round(self, view: AnalysedRound) -> None:
        model = view.task.model
        steps = [list(view.steps(client)) for client in view.clients]
        if view.after is None or not all(steps):
            return

        # Probabilities of the global model, g, and the ensemble's, h; see the class.
        with model.mode(train=False):
            global_on_pool = self.logits(model, view.after, view.pool(self.pool)).softmax(1)
            g = self.logits(model, view.after, view.pool(self.labelled)).softmax(1)
        logits_on_pool = _stack([observations[-1].arrays["pool"] for observations in steps], model.device)
        logits = _stack([observations[-1].arrays["labelled"] for observations in steps], model.device)
        h = logits.softmax(2).mean(0)
        y = self.batch(view.pool(self.labelled)).y

        bound = ErrorBound.of(g, h, y)
        view.log(
            distillation_distance=_distance(global_on_pool, logits_on_pool.softmax(2).mean(0)).mean(),
            distillation_distance_to_mean_logits=_distance(global_on_pool, logits_on_pool.mean(0).softmax(1)).mean(),
            ensemble_loss=bound.reference.mean(),
            global_error=bound.error.mean(),
            global_bound=bound.bound.mean(),
        )

        violations = bound.violations
        # A method with personal models trains twice in a round, the personal model first.
        if all(len(observations) > 1 for observations in steps):
            personal_logits = [observations[0].arrays["labelled"] for observations in steps]
            violations += self._log_personal(view, _stack(personal_logits, model.device), g, y)
        view.log(inequalities_violated=violations)

    def _log_personal(self, view: AnalysedRound, logits: Tensor, g: Tensor, y: Tensor) -> int:
        """Log how far personal models are from the global one; return how many inequalities do not hold.

        Parameters
        ----------
        logits : those of each client's personal model, ``[K, n, C]``.
        g, y : the global model's probabilities ``[n, C]``, and the labels ``[n]``.
        """
        bounds = [ErrorBound.of(p, g, y) for p in logits.softmax(2)]
        columns = {
            "personal_distance": torch.stack([bound.distance.mean() for bound in bounds]),
            "personal_error": torch.stack([bound.error.mean() for bound in bounds]),
            "personal_bound": torch.stack([bound.bound.mean() for bound in bounds]),
        }
        view.log(**{name: values.mean() for name, values in columns.items()})
        view.log_table("distillation", {"client": view.clients} | columns)
        return sum(bound.violations for bound in bounds)

    def batch(self, pool: Pool) -> Batch:
        """Return the samples of a pool on which models are compared."""
        count = min(self.samples, len(pool))
        return next(pool.batches(count, fraction=count / len(pool)).once(count))

    def logits(self, model: FlatModel, theta: Tensor, pool: Pool) -> Tensor:
        """Return the logits ``float64[n, C]`` of a model vector ``[P+B]`` in evaluation mode."""
        with torch.no_grad():
            return at_statistics(model, theta)(model.parameters(theta), self.batch(pool).x).double()


class ErrorBound(NamedTuple):
    """Bound of a model's error on each sample by its distance to another model, ``[n]`` each.

    Attributes
    ----------
    error : 1 where the model's class is wrong.
    loss : one minus the model's probability of the right class.
    reference : the other model's loss.
    distance : ``min(1, |.|_1)`` between both models' probabilities.
    """

    error: Tensor
    loss: Tensor
    reference: Tensor
    distance: Tensor

    @classmethod
    def of(cls, model: Tensor, other: Tensor, labels: Tensor) -> ErrorBound:
        """Compare two models by their probabilities ``[n, C]``."""
        error = (model.argmax(1) != labels).to(model.dtype)
        loss = 1 - model.gather(1, labels[:, None])[:, 0]
        reference = 1 - other.gather(1, labels[:, None])[:, 0]
        return cls(error, loss, reference, _distance(model, other).clamp_max(1))

    @property
    def bound(self) -> Tensor:
        """Bound of the error, ``[n]``."""
        return 2 * (self.reference + self.distance)

    @property
    def violations(self) -> int:
        """Number of samples for which one of the inequalities does not hold."""
        error_violated = self.error > 2 * self.loss + TOLERANCE
        loss_violated = self.loss > self.reference + self.distance + TOLERANCE
        return int((error_violated | loss_violated).sum())


def _distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(1)


def _stack(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.stack(arrays)).to(device)
