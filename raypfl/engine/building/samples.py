"""Samples as the clients' network sees them: normalised, on its device, from a store or fetched client by client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from raypfl.common import streams
from raypfl.common.transfer import to_device
from raypfl.data import ClientData, FederatedData
from raypfl.data.datasets import DescribedData
from raypfl.engine.building.data_outline import DataOutline
from raypfl.engine.building.poison import Poison
from raypfl.learning.augmentation import Augmentation
from raypfl.learning.batches import Samples
from raypfl.learning.sample_pools import Pools
from raypfl.models import FlatModel


def samples_for(
    data: ClientData | DataOutline,
    model: FlatModel,
    augmentation: Sequence[Augmentation],
    room: float,
    poison: Poison | None = None,
) -> Samples:
    """Return the samples for the model's device, on which they are kept if they take at most `room` bytes.

    `poison` : what an attack makes of them; None: nothing.
    """
    gain, offset = normalisation(data, model)
    if not isinstance(data, FederatedData):
        nothing = np.zeros(0)
        return _FetchedSamples(nothing, nothing, gain, offset, augmentation, data=data)

    inputs = data.inputs
    labels = data.labels if poison is None else poison.labels
    samples = Samples(inputs, labels, gain, offset, augmentation)
    if model.device.type != "cpu" and inputs.nbytes + labels.nbytes <= room:
        resident_inputs = torch.from_numpy(np.array(inputs)).to(model.device)
        resident_labels = torch.from_numpy(np.array(labels)).to(model.device)
        samples = replace(samples, inputs=resident_inputs, labels=resident_labels)
    return samples if poison is None else poison.poisoned(samples)


def pools_for(data: ClientData | DataOutline, samples: Samples, seed: int) -> Pools:
    """Return the data's pools, which are read from `samples`; one from elsewhere may be normalised by itself.

    `seed` : seed of the pools' batches.
    """
    moments = data.pool_moments if isinstance(data, FederatedData) else {}
    samples_by_pool = {}
    for name, (mean, std) in moments.items():
        gain, offset = _affine(data, mean, std, samples.gain)
        samples_by_pool[name] = replace(samples, gain=gain, offset=offset)
    return Pools(samples, pool_indices(data), samples_by_pool, seed)


def pool_indices(data: ClientData | DataOutline) -> dict[str, np.ndarray]:
    """Return the sample numbers of each pool, by name; an outline has no pools."""
    if isinstance(data, DataOutline):
        return {}
    return {name: data.pool(name) for name in data.pools}


def normalisation(data: ClientData | DataOutline, model: FlatModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``gain, offset``, ``[C, 1, 1]`` or ``[features]``, by which networks see ``inputs * gain + offset``."""
    return _affine(data, data.mean, data.std, torch.empty(0, dtype=model.dtype, device=model.device))


def _affine(
    data: ClientData | DataOutline, mean: np.ndarray, std: np.ndarray, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gain = 1.0 / (data.scale * std.astype(np.float64))
    offset = -mean.astype(np.float64) / std
    axes = (-1, 1, 1) if len(data.input_shape) == 3 else (-1,)
    return torch.from_numpy(gain).to(like).reshape(axes), torch.from_numpy(offset).to(like).reshape(axes)


@dataclass(frozen=True)
class _FetchedSamples(Samples):
    """Samples that are fetched client by client; none are kept on the device."""

    data: DescribedData | DataOutline = field(kw_only=True)

    def take(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        # A population may seed torch to generate its samples.
        with streams.forked(self.gain.device):
            x, y = self.data.take(indices)
        return to_device(x, self.gain.device), to_device(y, self.gain.device)

    def labels_of(self, indices: np.ndarray) -> torch.Tensor:
        return self.take(indices)[1]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.data.input_shape
