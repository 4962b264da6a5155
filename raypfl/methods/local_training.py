"""What several methods share: proximal penalties, mean gradients of local training, and fine-tuning."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD


def proximal(strength: float) -> Callable[[Tensor, Batch, Tensor], Tensor]:
    """Return the penalty ``strength/2 ||p - anchor||^2``; pass `anchor` to ``clients.sgd`` by name."""

    def penalty(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
        return strength / 2 * (p - anchor).square().sum()

    return penalty


def mean_gradient(clients: Clients, theta: Tensor, trained: Tensor) -> Tensor:
    """Return the mean ``[K, P]`` of the gradients that local SGD followed from `theta` to `trained`.

    With momentum, an earlier gradient moves the model further than a later one, so it has a larger weight.

    Raises
    ------
    ConfigError : if the optimizer is not SGD; the moves of others are not sums of gradients.
    """
    sgd = clients.training.local_optimizer
    if type(sgd) is not SGD:
        raise ConfigError(f"This method needs training.optimizer=sgd, but it is {type(sgd).__name__}.")

    # The sum of the gradients' weights: how far the model moves if all gradients are the same, over lr.
    total_weight = unmarked(clients.num_steps())
    rho = sgd.momentum
    if rho:
        # A gradient with r steps left moves the model by lr (1 + rho + ... + rho^(r - 1)), with Nesterov up to rho^r.
        steps = total_weight
        total_weight = (steps - rho ** (1 + sgd.nesterov) * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    return clients.model.parameters(theta - trained) / (total_weight * clients.lr)[:, None]


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
