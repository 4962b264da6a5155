"""The mini-batches of a group's local training, and what its steps draw and add to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.group import ClientGroup
from raypfl.common.errors import ClientError, MethodError, PrivacyError
from raypfl.devices import RequestedTraining
from raypfl.learning.optimizers import SampleRule
from raypfl.learning.privacy import NoisySum, PrivateTraining
from raypfl.learning.sample_order import SampleOrder, epoch_order, sampled_order, sampling_rates
from raypfl.learning.settings import TrainingSettings


class LocalTraining(NamedTuple):
    """A local training that is about to begin.

    Attributes
    ----------
    keys : the keys ``int64[K]`` of the draws of networks and losses.
    privacy : the record of the privacy that the training spends; None: it is not private.
    rule : the rule that adds noise; None: the training is not private.
    """

    order: SampleOrder
    keys: Tensor
    privacy: PrivateTraining | None = None
    rule: SampleRule | None = None


def prepare_training(
    group: ClientGroup, epochs: int | None, steps: int | None, batch_size: int | None, stream: str
) -> LocalTraining:
    """Prepare a local training; None stands for the experiment's settings.

    Each private training of a round has its own batches and noise.

    Raises
    ------
    ClientError : if batch norm would see a batch of one sample.
    """
    context = group.context
    if context.requested is not None:
        context.requested.append(RequestedTraining(group.ids, group.exchange[1], epochs, steps, batch_size))

    size, epochs, steps = training_length(context.training, epochs, steps, batch_size)
    if not context.privacy.protects_samples:
        order = _whole_epochs(group, size, epochs, steps, stream)
        return LocalTraining(order, group.draws(stream))

    function, exchange = group.exchange
    number = 1 + sum(group.ids == training.ids for training in group.private_trainings)
    stream = f"{stream} {exchange} {number}"
    sizes = group.samples("train").sizes
    smallest = context.training.smallest_batch
    drawn_order = sampled_order(group.keys("batches" + stream), sizes, size, epochs, steps, smallest)
    order = _with_augmentation(group, _limited_to_work(group, drawn_order), stream)

    spent = PrivateTraining(f"{function} {number}", group.ids, sampling_rates(sizes, size), order.steps)
    group.private_trainings.append(spent)
    privacy = context.privacy
    return LocalTraining(order, group.draws(stream), spent, NoisySum(privacy.clip, privacy.deviation, size))


def training_length(
    settings: TrainingSettings, epochs: int | None, steps: int | None, batch_size: int | None
) -> tuple[int, int, int | None]:
    """Return batch size, epochs and steps of a training; None stands for the settings'.

    Raises
    ------
    MethodError : if one of them is no whole number, or too small.
    """
    for name, number, least in (("epochs", epochs, 0), ("steps", steps, 0), ("batch_size", batch_size, 1)):
        if number is not None and not (isinstance(number, int | np.integer) and number >= least):
            raise MethodError(f"{name} of a local training is {number}; it must be a whole number, at least {least}.")

    if epochs is None and steps is None:
        epochs = settings.epochs
        steps = settings.steps
    if epochs is None:
        epochs = 1
    return batch_size or settings.batch_size, epochs, steps


def refuse_moved_statistics(before: Tensor, after: Tensor) -> None:
    """Raise a PrivacyError if a private training changed the network's statistics ``[K, B]``: they get no noise."""
    # Comparing waits for a GPU, so skip it without statistics.
    if before.numel() and not torch.equal(before, after):
        raise PrivacyError(
            "Training moved statistics of the network, such as running means, which depend on the samples and "
            "get no noise, so privacy.noise would not hold. Choose a network without them (norm: group), or freeze "
            "what has them."
        )


def _whole_epochs(group: ClientGroup, size: int, epochs: int, steps: int | None, stream: str) -> SampleOrder:
    """Return the mini-batches of a training that is not private, which visits all samples in each epoch."""
    samples = group.samples("train")
    keys = group.keys("batches" + stream)
    smallest = group.context.training.smallest_batch
    order = epoch_order(keys, samples.sizes, min(size, samples.width), epochs, steps, smallest)
    order = _limited_to_work(group, order)

    has_lone_sample = (order.counts == 1).any(1)
    if group.model.normalises_vectors and has_lone_sample.any():
        with_lone_sample = np.flatnonzero(has_lone_sample)
        raise ClientError(
            f"Client {group.ids[with_lone_sample[0]]} has a batch of one sample, over which the network's batch "
            "norm is undefined. Set training.smallest_batch to 2, which leaves it out, or choose another "
            "training.batch_size, or a network with group norm.",
            clients=[group.ids[k] for k in with_lone_sample],
            repeatable=True,
        )
    return _with_augmentation(group, order, stream)


def _limited_to_work(group: ClientGroup, order: SampleOrder) -> SampleOrder:
    """Return the steps that clients have the time to do."""
    return order if group.work is None else order.limited(group.work)


def _with_augmentation(group: ClientGroup, order: SampleOrder, stream: str) -> SampleOrder:
    augmentations = group.context.samples.augmentation
    if not augmentations:
        return order
    draws_per_image = sum(augmentation.draws for augmentation in augmentations)
    return order.with_draws(group.keys("augmentation" + stream), draws_per_image)
