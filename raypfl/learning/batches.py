"""Samples of a group of clients, and the mini-batches that are made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.common.transfer import to_device
from raypfl.learning.augmentation import Augmentation, augmented
from raypfl.learning.objectives.batch import Batch, spread_over_labels
from raypfl.learning.sample_order import SampleOrder

NORMALISE_ONCE_LIMIT = 2**21
"""Samples of at most this many numbers are normalised once for all batches; more would not fit into a CPU cache."""


def rows_at(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]`` for positions of any shape; of images, several times as fast."""
    return values.index_select(0, index.flatten()).view(*index.shape, *values.shape[1:])


def device_data_budget(device: torch.device, share: float, gpus: float) -> float:
    """Return the bytes of data that may stay on an actor's device; unlimited on the CPU, where data are memory-mapped.

    Parameters
    ----------
    share : the share of a GPU's memory for the data of all actors on it.
    gpus : the number of GPUs that the actor reserves; of several it uses one.
    """
    if device.type == "cpu":
        return math.inf
    return torch.cuda.get_device_properties(device).total_memory * share * min(gpus, 1.0)


@dataclass(frozen=True)
class Samples:
    """The samples of a data set, and how batches of them are normalised and augmented.

    Attributes
    ----------
    inputs : the images ``uint8[N, C, H, W]``: a read-only, memory-mapped NumPy array, from which groups and batches are
        copied to the device; or a tensor on the device.
    labels : the labels, ``int64[N]`` or ``int8[N, L]``.
    gain, offset : the normalisation ``uint8 * gain + offset``, ``[C, 1, 1]``.
    augmentation : the augmentations of the images that SGD steps on; other images are never augmented.
    """

    inputs: np.ndarray | Tensor
    labels: np.ndarray | Tensor
    gain: Tensor
    offset: Tensor
    augmentation: Sequence[Augmentation] = ()

    @property
    def resident(self) -> int:
        """Number of bytes of the samples on the device."""
        return sum(array.nbytes for array in (self.inputs, self.labels) if isinstance(array, Tensor))

    def take(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return inputs ``uint8[n, C, H, W]`` and labels ``int64[n]`` of the samples ``indices[n]``, on the device."""
        return self._rows(self.inputs, indices), self._rows(self.labels, indices)

    def take_parts(self, indices: np.ndarray) -> Callable[[slice], tuple[Tensor, Tensor]]:
        """Return ``take(part)``, :meth:`take` of the samples ``indices[part]``.

        If the samples are on the device, so are the indices, which then get there once for all parts.
        """
        inputs = self.inputs
        labels = self.labels
        if isinstance(inputs, np.ndarray) or isinstance(labels, np.ndarray):
            return lambda part: self.take(indices[part])
        positions = to_device(np.array(indices), self.gain.device)
        return lambda part: (inputs[positions[part]], labels[positions[part]])

    def labels_of(self, indices: np.ndarray) -> Tensor:
        """Return the labels ``int64[n]`` of the samples ``indices[n]``, on the device, without reading inputs."""
        return self._rows(self.labels, indices)

    def _rows(self, array: np.ndarray | Tensor, indices: np.ndarray) -> Tensor:
        device = self.gain.device
        if isinstance(array, np.ndarray):
            return to_device(np.asarray(array[indices]), device)
        # A copy, since the indices may be in read-only memory.
        return array[to_device(np.array(indices), device)]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def normalise(self, x: Tensor) -> Tensor:
        """Return inputs in floating point, as networks see them; tokens are returned unchanged."""
        if x.dtype == torch.int64:
            return x
        return torch.addcmul(self.offset, x.to(self.gain.dtype), self.gain)

    def augmented(self, batch: Batch, draws: Tensor | None) -> Batch:
        """Augment a batch's images by ``draws[..., b, D]``; None leaves them unchanged."""
        return batch if draws is None else batch._replace(x=augmented(batch.x, self.augmentation, draws, self.offset))


class GroupSamples:
    """One split of a group's clients, gathered once, client after client.

    Parameters
    ----------
    indices : the numbers of each client's samples, ``int64[n]`` per client.

    Attributes
    ----------
    sizes : each client's number of samples, ``int64[K]``.
    width : the largest of these numbers.
    """

    def __init__(self, samples: Samples, indices: list[np.ndarray]):
        self._source = samples
        self._normalised: Tensor | None = None
        self.sizes = np.array([len(client_indices) for client_indices in indices], dtype=np.int64)
        self.width = int(self.sizes.max(initial=0))
        self._starts = self.sizes.cumsum() - self.sizes
        self.x, self.y = samples.take(np.concatenate(indices))

    @property
    def normalises_once(self) -> bool:
        """Whether all samples are normalised once, not in every step."""
        return self.x.numel() <= NORMALISE_ONCE_LIMIT

    def normalised(self) -> Tensor:
        """Return all samples as the network sees them."""
        if self._normalised is None:
            self._normalised = self._source.normalise(self.x)
        return self._normalised

    def client(self, k: int, index: Tensor | None = None) -> Batch:
        """Return client k's samples at ``index[b]`` (positions in its own list; None: all), without padding."""
        rows = self._rows(k)
        x = self.x[rows]
        y = self.y[rows]
        if index is not None:
            x = rows_at(x, index)
            y = rows_at(y, index)
        return Batch(self._source.normalise(x), y, torch.ones(len(y), dtype=self._source.gain.dtype, device=y.device))

    def subset(self, k: int, count: int) -> Batch:
        """Return at most `count` of client k's samples, spread over its labels, the largest label included."""
        return self.client(k, spread_over_labels(self.y[self._rows(k)], count))

    def steps(self, k: int, order: SampleOrder, normalise_once: bool = True) -> Callable[[int], Batch]:
        """Return ``batch(s)``, client k's batch in step s, without padding.

        The order goes to the device here, once for all steps.

        `normalise_once` : whether to normalise all the client's samples here, if that is cheaper than in every step.
        """
        device = self.y.device
        index = to_device(order.index[k], device)
        draws = None if order.draws is None else to_device(order.draws[k], device)
        counts = order.counts[k].tolist()
        visits_all = sum(counts) >= self.sizes[k]
        fits_cache = self.sizes[k] * self.x[0].numel() <= NORMALISE_ONCE_LIMIT
        normalised = self.client(k) if normalise_once and visits_all and fits_cache else None

        def batch(s: int) -> Batch:
            count = counts[s]
            step_index = index[s, :count]
            if normalised is None:
                plain = self.client(k, step_index)
            else:
                x = rows_at(normalised.x, step_index)
                plain = Batch(x, rows_at(normalised.y, step_index), normalised.weight[:count])
            return self._source.augmented(plain, None if draws is None else draws[s, :count])

        return batch

    def stacked(self, clients: np.ndarray, order: SampleOrder) -> StackedBatches:
        """Return the batches of the `clients`, positions in the group, padded and stacked."""
        device = self.y.device
        is_sample = np.arange(order.index.shape[-1]) < order.counts[clients][:, :, None]
        rows = to_device(self._starts[clients][:, None, None] + order.index[clients], device)
        weight = to_device(is_sample, device).to(self._source.gain.dtype)
        draws = None if order.draws is None else to_device(order.draws[clients], device)
        # The samples of joined groups are normalised already, however many they are.
        normalised = self.normalised() if self.normalises_once else self._normalised
        x = self.x if normalised is None else normalised
        return StackedBatches(self._source, x, self.y, rows, weight, draws, is_normalised=normalised is not None)

    def _rows(self, k: int) -> slice:
        start = int(self._starts[k])
        return slice(start, start + int(self.sizes[k]))


@dataclass(frozen=True)
class StackedBatches:
    """The batches of a group's clients in all steps.

    Attributes
    ----------
    source : how samples are normalised and augmented.
    x, y : the clients' samples, ``[n, ...]`` and ``int64[n]``.
    rows : the positions in `x` of each batch's samples, ``int64[K, S, b]``; those of padding are arbitrary.
    weight : the samples' weights, ``[K, S, b]``, 0 for padding.
    draws : the numbers that augment each sample, ``[K, S, b, D]``; None: no augmentation.
    is_normalised : whether `x` is normalised already.
    """

    source: Samples
    x: Tensor
    y: Tensor
    rows: Tensor
    weight: Tensor
    draws: Tensor | None
    is_normalised: bool

    FREE_AXES: ClassVar[Mapping[str, int]] = {"x": 0, "y": 0, "rows": 1, "weight": 1}
    """Axes of `tensors` along which they are only indexed."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of which batches without augmentation are made, by name."""
        normalisation = {"gain": self.source.gain, "offset": self.source.offset}
        return {"x": self.x, "y": self.y, "rows": self.rows, "weight": self.weight, **normalisation}

    def __call__(self, which: slice | Tensor, s: int | Tensor, width: int | None = None) -> Batch:
        """Return the batches of some clients in step s, padded and stacked, ``[k, b, ...]``.

        Parameters
        ----------
        which : a slice of the clients, or ``int64[k]`` positions among them on the device.
        s : a number, or ``int64[1]`` on the device, which is not read there.
        width : the most samples of each batch; None: all.
        """

        def in_step(values: Tensor) -> Tensor:
            if isinstance(s, Tensor):
                return values[which].index_select(1, s)[:, 0, :width]
            return values[which, s, :width]

        index = in_step(self.rows)
        x = rows_at(self.x, index)
        normalised = x if self.is_normalised else self.source.normalise(x)
        batch = Batch(normalised, rows_at(self.y, index), in_step(self.weight))
        return self.source.augmented(batch, None if self.draws is None else in_step(self.draws))


class StepBatches:
    """The batches of some clients in one step, built on first use: one by one, or padded and stacked."""

    def __init__(self, alone: Callable[[], list[Batch]], padded: Callable[[], Batch]):
        self._make_alone = alone
        self._make_padded = padded

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.alone)

    @cached_property
    def alone(self) -> list[Batch]:
        """A batch for each client, without padding."""
        return self._make_alone()

    @cached_property
    def padded(self) -> Batch:
        """One batch ``[k, b, ...]``; clients with fewer samples than the largest have rows of weight 0."""
        return self._make_padded()


Batches = list[Batch] | StepBatches
