"""Settings of local training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

import numpy as np

from raypfl.common.conditions import needs, needs_some, unless
from raypfl.learning.optimizers import SGD, LocalOptimizer

_sgd = cache(SGD)  # It checks its functions when it is made, so not in every round.


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """A client's local training, unless its method chooses otherwise.

    Attributes
    ----------
    epochs : number of passes over the client's data.
    steps : number of SGD steps, in place of `epochs`; batches continue from one epoch into the next. None: `epochs`.
    batch_size : number of samples per step; the last batch of an epoch may be smaller.
    smallest_batch : smallest number of samples in an epoch's last batch; a smaller one is left out, unless it is the
        client's only batch. Batch norm needs 2 where it normalises vectors or single pixels.
    optimizer : ``sgd``, another registered optimizer, or your own: ``adam``, ``{name: adamw, beta2: 0.99}``,
        ``module:Name``. Its state (momentum, moments) starts at zero in every round.
    momentum : momentum of SGD, as in ``torch.optim.SGD``.
    nesterov : whether SGD uses Nesterov momentum, as in ``torch.optim.SGD``.
    lr : learning rate of the optimizer, as in ``torch.optim``.
    weight_decay : weight decay of the optimizer, as in ``torch.optim``.
    clip_norm : largest norm of a client's gradient, which is scaled down to it; None: no clipping.
    schedule : schedule of the learning rate over rounds: ``constant``; ``exponential`` (times `decay` per round);
        ``cosine`` (toward 0 after the last round); ``step`` (times `gamma` after each round in `milestones`).
    decay : factor of the learning rate per round, with the schedule ``exponential``.
    milestones : rounds after which the learning rate is multiplied by `gamma`, with the schedule ``step``.
    gamma : factor of the learning rate at each milestone, with the schedule ``step``.
    warmup_rounds : number of rounds in which the learning rate rises linearly to its scheduled value.
    precision : ``fp32`` (in full, also on GPUs), ``tf32`` (GPUs round the factors of matrix products and convolutions
        to 10 bits), ``bf16`` (autocast; weights stay fp32) or ``fp64``.
    channels_last : whether image batches have the channels-last memory format where clients train one by one. The
        network must support it (``x.flatten(1)``, not ``x.view(len(x), -1)``). None: chosen for two-dimensional
        convolutions if it works, or by the timing of ``engine.executor=fastest``.
    """

    epochs: Annotated[int, unless("steps")] = 1
    steps: int | None = None
    batch_size: int = 10
    smallest_batch: int = 1
    lr: float = 0.1
    optimizer: LocalOptimizer | Literal["sgd"] = "sgd"
    momentum: Annotated[float, needs("optimizer", "sgd")] = 0.0
    nesterov: Annotated[bool, needs("optimizer", "sgd"), needs_some("momentum")] = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    schedule: Literal["constant", "exponential", "cosine", "step"] = "constant"
    decay: Annotated[float, needs("schedule", "exponential")] = 1.0
    milestones: Annotated[tuple[int, ...], needs("schedule", "step")] = ()
    gamma: Annotated[float, needs("schedule", "step")] = 0.1
    warmup_rounds: int = 0
    precision: Literal["fp32", "tf32", "bf16", "fp64"] = "fp32"
    channels_last: bool | None = None

    @property
    def local_optimizer(self) -> LocalOptimizer:
        """The optimizer with its hyperparameters."""
        if isinstance(self.optimizer, LocalOptimizer):
            return self.optimizer
        return _sgd(momentum=self.momentum, nesterov=self.nesterov)

    def learning_rate(self, round: int, rounds: int) -> float:
        """Return the learning rate under the schedule after `round` of `rounds` rounds."""
        lr = self.lr
        if self.schedule == "exponential":
            lr *= self.decay**round
        elif self.schedule == "cosine":
            lr *= 0.5 * (1 + float(np.cos(np.pi * round / rounds)))
        elif self.schedule == "step":
            lr *= self.gamma ** sum(round >= milestone for milestone in self.milestones)
        if round < self.warmup_rounds:
            lr *= (round + 1) / self.warmup_rounds
        return lr
