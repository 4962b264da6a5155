"""What an attack makes of the training samples of malicious clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from raypfl.data import FederatedData
from raypfl.engine.building.stamped_samples import StampedSamples
from raypfl.federation.robustness import Attack, Backdoor, LabelAttack
from raypfl.federation.robustness.attacks import poisoned_labels
from raypfl.learning.batches import Samples


@dataclass(frozen=True)
class Poison:
    """Changes of a data set.

    Attributes
    ----------
    labels : the labels of all samples, ``int64[N]``.
    backdoor : the attack whose trigger some images get; None: no image changes.
    is_stamped : which images get it, ``bool[N]``.
    white : the value of a full pixel.
    """

    labels: np.ndarray
    backdoor: Backdoor | None
    is_stamped: np.ndarray
    white: float

    def poisoned(self, samples: Samples) -> Samples:
        """Return samples, which have the labels already, with the trigger on some of the images."""
        if self.backdoor is None:
            return samples
        return StampedSamples(
            samples.inputs,
            samples.labels,
            samples.gain,
            samples.offset,
            samples.augmentation,
            stamp=partial(self.backdoor.stamp, white=self.white),
            is_stamped=self.is_stamped,
        )


def poison_for(attack: Attack | None, data: FederatedData, is_malicious: np.ndarray, seed: int) -> Poison | None:
    """Return what the attack makes of the training samples of malicious clients, ``bool[num_clients]``, if anything."""
    clients = np.flatnonzero(is_malicious).tolist()
    if isinstance(attack, LabelAttack):
        samples = np.concatenate([data.indices(client, "train") for client in clients])
        labels = poisoned_labels(attack, data.labels, samples, data.num_classes, seed)
        return Poison(labels, None, np.zeros(len(labels), dtype=bool), data.scale)
    if not isinstance(attack, Backdoor):
        return None

    stamped = np.concatenate([attack.chosen(data.labels, data.indices(client, "train"), seed) for client in clients])
    is_stamped = np.zeros(len(data.labels), dtype=bool)
    is_stamped[stamped] = True
    return Poison(np.where(is_stamped, attack.target, data.labels), attack, is_stamped, data.scale)
