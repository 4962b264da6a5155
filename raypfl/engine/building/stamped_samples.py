"""Samples of which some carry the trigger of a backdoor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from raypfl.common.transfer import to_device
from raypfl.learning.batches import Samples


@dataclass(frozen=True)
class StampedSamples(Samples):
    """Images of which some get a trigger whenever they are read.

    Attributes
    ----------
    stamp : puts the trigger on images ``[n, C, H, W]``.
    is_stamped : which samples get it, ``bool[N]``.
    """

    stamp: Callable[[Tensor], Tensor] = field(kw_only=True)
    is_stamped: np.ndarray = field(kw_only=True)

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        images, labels = super().take(indices)
        chosen = self.is_stamped[indices]
        if chosen.any():
            where = to_device(chosen, images.device)
            images[where] = self.stamp(images[where])
        return images, labels

    def take_parts(self, indices: np.ndarray) -> Callable[[slice], tuple[Tensor, Tensor]]:
        return lambda part: self.take(indices[part])

    def all_stamped(self) -> StampedSamples:
        """Return the same samples, all with the trigger."""
        return replace(self, is_stamped=np.ones_like(self.is_stamped))
