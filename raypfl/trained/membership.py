"""Membership inference: how well an attacker with a run's global model tells training samples from others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.common import rng
from raypfl.common.errors import ConfigError
from raypfl.engine.prepared import Prepared
from raypfl.learning.executor import Executor
from raypfl.learning.loss import LocalLoss
from raypfl.learning.objectives import Classification
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import Update
from raypfl.learning.settings import TrainingSettings
from raypfl.models.flat import FlatModel
from raypfl.runs.result import RunResult

_EVALUATION_BATCH = 512


@dataclass(frozen=True)
class Membership:
    """Accuracies of two attacks, each at its best threshold, on equally many members and non-members; 0.5: no leak.

    Attributes
    ----------
    loss : the accuracy of the attack by the model's loss (Yeom et al. 2018).
    likelihood : the accuracy of the attack by likelihood ratio, LiRA (Carlini et al. 2022): how likely the model's
        confidence is among models trained with the sample, against models trained without it, with one variance for
        each kind; None: not made.
    samples : the number of training samples, and of others.
    """

    loss: float
    likelihood: float | None
    samples: int


def membership(result: RunResult, shadows: int = 0, epochs: int = 20) -> Membership:
    """Attack the final global model of a run.

    Members are the clients' training samples, others their test samples.

    Parameters
    ----------
    shadows : the number of models for the likelihood ratios, each trained on a random half of all these samples by the
        run's local optimizer; 0: no likelihood ratios.
    epochs : the number of epochs of that training.

    Raises
    ------
    ConfigError : if the method has no global model, targets are not classes, or there are too few shadow models.
    """
    experiment = result.experiment
    theta = experiment.global_model(result.server_state())
    if theta is None or not isinstance(experiment.objective, Classification):
        raise ConfigError(f"{result.run_dir} has no global model of classes to attack; choose a run that has one.")
    if shadows and shadows < 4:
        raise ConfigError(f"shadows is {shadows}; likelihood ratios need at least 4 models, or 0 for none.")

    prepared = Prepared(experiment, experiment.load_data())
    context = prepared.context
    model = prepared.model
    draws = rng.generator(experiment.seed, "membership")

    splits = [context.union(split) for split in ("train", "test")]
    count = min(map(len, splits))
    x, y = context.samples.take(np.concatenate([draws.permutation(split)[:count] for split in splits]))
    x = context.samples.normalise(x)
    member = torch.arange(2 * count) < count
    loss = _losses(model, theta, x, y)
    if not shadows:
        return Membership(_best_accuracy(-loss, member), None, count)

    in_training = torch.from_numpy(np.stack([draws.permutation(2 * count) < count for _ in range(shadows)]))
    confidences = []
    for number, chosen in enumerate(in_training):
        batches = _batches(x[chosen], y[chosen], experiment.training.batch_size, epochs, draws)
        shadow = _train(model, rng.key(experiment.seed, "shadow", number), experiment.training, batches)
        confidences.append(_confidence(_losses(model, shadow, x, y)))
    ratio = _log_ratio(torch.stack(confidences), in_training, _confidence(loss))
    return Membership(_best_accuracy(-loss, member), _best_accuracy(ratio, member), count)


def _train(model: FlatModel, key: int, training: TrainingSettings, batches: Iterable[Batch]) -> Tensor:
    """Train a new model by the local optimizer, with the first learning rate; return its vector."""
    theta = model.init(key % 2**31)
    lr = training.lr

    def loss(p: Tensor, batch: Batch) -> Tensor:
        return batch.mean(F.cross_entropy(model(p, batch.x), batch.y, reduction="none"))

    update = Update(training.local_optimizer, lr, training.weight_decay, training.clip_norm)
    draws = torch.tensor(key % 2**31)
    for _ in Executor(model).train_one(LocalLoss(model, loss), theta, batches, update, lambda _: lr, draws, {}):
        pass
    return theta


def _losses(model: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad(), model.mode(train=False):
        outputs = torch.cat([model(theta, part) for part in x.split(_EVALUATION_BATCH)])
    return F.cross_entropy(outputs.double(), y, reduction="none")


def _confidence(losses: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of the probability p of the right class."""
    return -losses - torch.log(-torch.expm1(-losses.clamp_min(1e-12)))


def _log_ratio(confidences: Tensor, in_training: Tensor, observed: Tensor) -> Tensor:
    """Return ``log N(observed | with) - log N(observed | without)`` for each sample.

    Parameters
    ----------
    confidences : ``[S, n]``, the confidence of each shadow model in each sample.
    in_training : ``bool[S, n]``, whether the shadow model was trained with the sample.
    observed : ``[n]``, the confidence of the attacked model.
    """
    ratio = torch.zeros_like(observed)
    for sign, mask in ((1, in_training), (-1, ~in_training)):
        number = mask.sum(0).clamp_min(1)
        mean = (confidences * mask).sum(0) / number
        variance = ((confidences - mean).square() * mask).sum() / mask.sum()
        ratio -= sign * ((observed - mean).square() / variance.clamp_min(1e-12) + variance.clamp_min(1e-12).log()) / 2
    return ratio


def _best_accuracy(scores: Tensor, member: Tensor) -> float:
    """Return the accuracy of the best threshold; samples with scores above it are taken for members."""
    order = scores.argsort(descending=True)
    gain = torch.where(member[order], 1, -1).cumsum(0)
    is_last_of_equal = torch.cat([scores[order][1:] != scores[order][:-1], torch.tensor([True])])
    non_members = int((~member).sum())
    return (non_members + max(0, int(gain[is_last_of_equal].max()))) / len(member)


def _batches(x: Tensor, y: Tensor, size: int, epochs: int, draws: np.random.Generator) -> Iterator[Batch]:
    for _ in range(epochs):
        for part in torch.from_numpy(draws.permutation(len(x))).split(size):
            yield Batch(x[part], y[part], torch.ones(len(part), dtype=x.dtype))
