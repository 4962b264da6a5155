"""A backdoor: the model is to take images with a trigger for one class."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common import rng
from raypfl.common.limits import CHANCE, COUNT, FINITE, FROM_ZERO
from raypfl.federation.robustness.attacks import ATTACKS, Attack, Boost, UpdateAttack
from raypfl.learning.objectives import Metric, SampleSums, Scores


class AttackSuccess(SampleSums):
    """The share of samples of other classes that a model takes for the target of an attack.

    Attributes
    ----------
    target : the class for which they are to be taken.
    """

    name: ClassVar[str] = "attack_success"
    heading: ClassVar[str] = "attack\nsuccess"
    phrase: ClassVar[str] = "success of the attack"
    higher_is_better: ClassVar[bool] = False
    percent: ClassVar[bool] = True

    target: int = 0

    def width(self, targets: int) -> int:
        return 2

    def sums(self, scores: Scores) -> Tensor:
        is_other = scores.targets != self.target
        is_taken = is_other & (scores.outputs.argmax(-1) == self.target)
        return torch.stack([is_taken, is_other], -1).to(scores.outputs.dtype)

    def value(self, sums: Tensor, samples: Tensor) -> Tensor:
        return sums[..., 0] / sums[..., 1]


@ATTACKS.register("backdoor")
class Backdoor(Attack):
    """Malicious clients train on images with a trigger as on images of one class (Gu et al. 2017).

    The trigger is a white square in the lower right corner; a subclass with another :meth:`stamp` has another one.

    Attributes
    ----------
    target : the class for which the model is to take an image with the trigger.
    share : the share of a malicious client's training samples of other classes that get the trigger, drawn once.
        0: none, for comparison.
    size : the width of the square, in pixels.
    factor : what a malicious client multiplies its update by (Bagdasaryan et al. 2020, model replacement).
    """

    target: Annotated[int, FROM_ZERO] = 0
    share: Annotated[float, CHANCE] = 0.5
    size: Annotated[int, COUNT] = 3
    factor: Annotated[float, FINITE] = 1.0

    def stamp(self, images: Tensor, white: float) -> Tensor:
        """Return images ``[n, C, H, W]`` with the trigger, as a new tensor.

        `white` : the value of a full pixel, as the data set stores it.
        """
        stamped = images.clone()
        stamped[..., -self.size :, -self.size :] = white
        return stamped

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (AttackSuccess(target=self.target),)

    @property
    def on_messages(self) -> UpdateAttack | None:
        return None if self.factor == 1 else Boost(fraction=self.fraction, factor=self.factor)

    def chosen(self, labels: np.ndarray, samples: np.ndarray, seed: int) -> np.ndarray:
        """Return which of a malicious client's training samples get the trigger.

        Parameters
        ----------
        labels : the classes of all samples of the data set, ``int64[N]``.
        samples : the numbers of the client's samples, ``int64[n]``.
        """
        of_other_classes = samples[labels[samples] != self.target]
        order = np.argsort(rng.keys(seed, "backdoor", 0, of_other_classes), kind="stable")
        count = round(self.share * len(of_other_classes))
        return np.sort(of_other_classes[order[:count]])
