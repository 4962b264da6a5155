"""Language modelling: the next token, by cross-entropy."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.learning.objectives.base import METRICS, OBJECTIVES, Metric, Objective, SampleSums, Scores, unrounded
from raypfl.learning.objectives.batch import Batch


class TokenScores(Scores):
    """Logits ``[k, b, T, V]`` and tokens ``[k, b, T]``."""

    objective: NextToken

    @cached_property
    def real(self) -> Tensor:
        """1 for tokens and 0 for padding, ``[k, b, T]``."""
        return self.objective.real(self.targets).to(self.outputs.dtype)

    @cached_property
    def tokens(self) -> Tensor:
        """Number of tokens in each sequence, without padding, ``[k, b]``."""
        return self.real.sum(-1)

    @cached_property
    def surprise(self) -> Tensor:
        """Sum of the negative log-likelihoods in each sequence, ``[k, b]``."""
        surprises = self.of_samples(self.objective.surprises, self.targets.shape[2:])
        return (surprises * self.real).sum(-1)


class TokenMean(SampleSums):
    """A metric that is a mean over tokens, without padding."""

    def width(self, targets: int) -> int:
        return 2

    def total(self, scores: Scores) -> Tensor:
        """Return the sum over each sequence, ``[k, b]``."""
        raise NotImplementedError

    def sums(self, scores: Scores) -> Tensor:
        return torch.stack([self.total(scores), scores.tokens], -1)  # type: ignore[attr-defined]

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        return sums[..., 0] / sums[..., 1]


class TokenAccuracy(TokenMean):
    """The fraction of tokens that are predicted correctly."""

    name: ClassVar[str] = "accuracy"
    percent: ClassVar[bool] = True

    def total(self, scores: Scores) -> Tensor:
        right = scores.outputs.argmax(-1) == scores.targets
        return (right * scores.real).sum(-1)  # type: ignore[attr-defined]


class TokenLoss(TokenMean):
    """Mean negative log-likelihood of a token."""

    name: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    shown: ClassVar[bool] = False

    def total(self, scores: Scores) -> Tensor:
        return scores.surprise  # type: ignore[attr-defined]


@METRICS.register("perplexity")
class Perplexity(TokenLoss):
    """Exponential of the mean negative log-likelihood of a token."""

    name: ClassVar[str] = "perplexity"
    shown: ClassVar[bool] = True

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        return super().value(sums, samples).exp()


@OBJECTIVES.register("next-token")
class NextToken(Objective):
    """The next token at each position of a sequence: cross-entropy of logits ``[b, T, V]``, mean over the tokens.

    Attributes
    ----------
    padding : the target value that marks padding.
    """

    padding: int = -1

    targets: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (TokenAccuracy(), TokenLoss(), Perplexity())
    primary: ClassVar[str] = "accuracy"
    weighs: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "losses" in vars(cls) and "loss" not in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.losses would have no effect on training, which takes the mean over the tokens of a "
                "batch; define the loss of each token, surprises(self, outputs, targets)."
            )

    def real(self, targets: Tensor) -> Tensor:
        """Return whether a target is not padding, ``bool[..., T]``."""
        return targets != self.padding

    def surprises(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood of each token, ``[b, T]``; arbitrary for padding."""
        # Padding need not be a valid index of a logit.
        tokens = torch.where(self.real(targets), targets, 0)
        return -F.log_softmax(outputs, dim=-1).gather(-1, tokens[..., None]).squeeze(-1)

    def takes(self, shape: tuple[int, ...], targets: int) -> bool:
        return len(shape) == 2 and shape[1] >= self.outputs(targets)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        real = self.real(targets).to(outputs.dtype)
        return (self.surprises(outputs, targets) * real).sum(-1) / real.sum(-1).clamp_min(1)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        outputs = unrounded(outputs)
        counts = self.real(batch.y).to(outputs.dtype) * batch.weight[:, None]
        return (self.surprises(outputs, batch.y) * counts).sum() / counts.sum().clamp_min(1)

    def features_of_samples(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over a sequence's tokens, without padding, ``[b, d]`` of features ``[b, T, d]``."""
        real = self.real(targets).to(features.dtype)
        return (features * real[..., None]).sum(1) / real.sum(1).clamp_min(1)[:, None]

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        return TokenScores(outputs, targets, self)
