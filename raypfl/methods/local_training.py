"""What several methods share: penalties, perturbations, mean gradients, server steps, fine-tuning, and passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.objectives.base import Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD, Perturb
from raypfl.models.flat import FlatModel


def proximal(strength: float) -> Callable[[Tensor, Batch, Tensor], Tensor]:
    """Return the penalty ``strength/2 ||p - anchor||^2``; pass `anchor` to ``clients.sgd`` by name."""

    def penalty(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
        return strength / 2 * (p - anchor).square().sum()

    return penalty


def ascent(rho: float, normalised: bool = True, scale: Callable[[Tensor], Tensor] | None = None) -> Perturb | None:
    """Return the perturbation ``rho T^2 g / ||T g||`` for ``clients.sgd``, with g the gradient at the model.

    Parameters
    ----------
    rho : the length of the perturbation; 0 gives None, so that no second gradient is computed.
    normalised : whether to divide by the norm, which is over all trained parameters.
    scale : the function ``T(p)`` of parameters ``[..., P]``; None: 1.
    """
    if rho == 0:
        return None

    def perturb(p: Tensor, gradient: Tensor) -> Tensor:
        factors = 1.0 if scale is None else scale(p)
        scaled = factors * gradient
        length = rho
        if normalised:
            # A gradient of zero gives no perturbation.
            length = rho / scaled.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return length * factors * scaled

    return perturb


def extrapolated(theta: Tensor, mean: Tensor, rate: float, model: FlatModel) -> Tensor:
    """Return ``theta + rate (mean - theta)``, with the statistics of `mean`; at a rate of 1, `mean` itself."""
    if rate == 1:
        return mean
    parameters = model.parameters(theta)
    moved = parameters + rate * (model.parameters(mean) - parameters)
    return torch.cat([moved, model.buffers(mean)])


def required_sgd(clients: Clients) -> SGD:
    """Return the optimizer of local training.

    Raises
    ------
    ConfigError : if it is not SGD.
    """
    optimizer = clients.training.local_optimizer
    if type(optimizer) is not SGD:
        name = type(optimizer).__name__
        raise ConfigError(
            f"The method's local steps are those of SGD; it needs training.optimizer=sgd, but it is {name}."
        )
    return optimizer


def gradient_weights(clients: Clients) -> Tensor:
    """Return the sum ``[K]`` of the weights with which local SGD's gradients move a model, over the learning rate.

    Without momentum it is the number of steps. With momentum, an earlier gradient moves the model further than a later
    one, so it has a larger weight.

    Raises
    ------
    ConfigError : if the optimizer is not SGD; the moves of others are not sums of gradients.
    """
    sgd = required_sgd(clients)

    # How far the model moves if all gradients are the same.
    total_weight = unmarked(clients.num_steps())
    rho = sgd.momentum
    if rho:
        # A gradient with r steps left moves the model by lr (1 + rho + ... + rho^(r - 1)), with Nesterov up to rho^r.
        steps = total_weight
        total_weight = (steps - rho ** (1 + sgd.nesterov) * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return total_weight


def discrepancy(objective: Objective, batch: Batch, a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of two models' features, inputs of the output layer, of a batch.

    The estimate is the biased one, over all pairs; the kernel is ``sum_s exp(-||x - y||^2 / 2s)`` for s of 10, 15, 20
    and 50.
    """

    def mean_kernel(x: Tensor, y: Tensor) -> Tensor:
        distance = (x[:, None] - y).square().sum(2)
        kernel = torch.stack([(-distance / (2 * scale)).exp() for scale in (10, 15, 20, 50)]).sum(0)
        return batch.mean(batch.mean(kernel))

    a = objective.features_of_samples(a, batch.y)
    b = objective.features_of_samples(b, batch.y)
    return mean_kernel(a, a) + mean_kernel(b, b) - 2 * mean_kernel(a, b)


def mean_gradient(clients: Clients, theta: Tensor, trained: Tensor) -> Tensor:
    """Return the mean ``[K, P]`` of the gradients that local SGD followed from `theta` to `trained`.

    The weights of gradients are those of :func:`gradient_weights`, and the optimizer is SGD.
    """
    distance = gradient_weights(clients) * clients.lr
    return clients.model.parameters(theta - trained) / distance[:, None]


def with_entries(clients: Clients, mask: Tensor, values: Tensor) -> Tensor:
    """Return the initial model with these values where `mask` is True: ``[P+B]`` or, for ``[K, n]``, ``[K, P+B]``."""
    if values.dim() == 1:
        return clients.initial.masked_scatter(mask, values)
    rows = clients.initial.repeat(len(values), 1)
    rows[:, mask] = unmarked(values)
    return per_client(rows)


def finetuned(clients: Clients, theta: Tensor, epochs: int, lr: float | None) -> Tensor:
    """Train `theta` further on each client's samples, for evaluation; return models ``[K, P+B]``.

    Parameters
    ----------
    theta : ``[P+B]`` or ``[K, P+B]``.
    epochs : number of epochs; 0 returns `theta` itself and needs no samples.
    lr : learning rate; None: that of the last round.
    """
    if epochs == 0:
        return per_client(unmarked(theta).expand(len(clients), -1))
    return clients.sgd(clients.loss, theta, epochs=epochs, lr=lr, stream="finetuning")


def sample_passes(clients: Clients, stream: str, share: float = 1.0) -> list[tuple[Tensor, list[Batch]]]:
    """Return the mini-batches of a pass over a random `share` of each client's samples.

    They are the same in one round and `stream`.

    Returns
    -------
    For each step, the clients that take it, ``bool[K]``, and a mini-batch for each client. All clients take the last
    step; those with fewer mini-batches begin later, and until then have their first one, to be ignored.
    """
    batch_size = clients.training.batch_size
    largest = int(unmarked(clients.num_samples).max())
    batches_by_client = []
    for samples in clients.batches(largest, stream):
        count = max(1, int(share * len(samples.y)))
        rows = [torch.arange(count, device=samples.y.device)[i : i + batch_size] for i in range(0, count, batch_size)]
        batches_by_client.append([Batch(*(field[index] for field in samples)) for index in rows])

    longest = max(map(len, batches_by_client))
    steps = []
    for s in range(longest):
        positions = [s - longest + len(batches) for batches in batches_by_client]
        takes = torch.tensor([position >= 0 for position in positions], device=clients.device)
        pairs = zip(positions, batches_by_client, strict=True)
        steps.append((takes, [batches[max(position, 0)] for position, batches in pairs]))
    return steps


def mask_of_option(model: FlatModel, option: str, pattern: str) -> Tensor:
    """Return the entries that a method's option selects, ``bool[P+B]``; none for an empty pattern.

    Raises
    ------
    ConfigError : with the option's name, if the pattern selects nothing, or frozen tensors alone.
    """
    if not pattern:
        return torch.zeros(model.size, dtype=torch.bool, device=model.device)
    try:
        return model.mask(pattern)
    except ConfigError as error:
        raise ConfigError(f"method.{option} is {pattern!r}. {error}") from None
