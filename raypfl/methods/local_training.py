"""What several methods share: proximal penalties, fine-tuning, and checks of their options."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.errors import ConfigError
from raypfl.common.messages import per_client, unmarked
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.optimizers import SGD


def proximal(strength: float) -> Callable[[Tensor, Batch, Tensor], Tensor]:
    """The penalty ``strength/2 ||p - anchor||^2``; pass `anchor` to ``clients.sgd`` by name."""

    def penalty(p: Tensor, batch: Batch, anchor: Tensor) -> Tensor:
        return strength / 2 * (p - anchor).square().sum()

    return penalty


def mean_gradient(clients: Clients, theta: Tensor, trained: Tensor) -> Tensor:
    """``[K, P]``, the mean of the gradients that local steps of SGD from `theta` to `trained` followed.

    With momentum, earlier gradients moved the model further than later ones and have a larger weight.

    Raises
    ------
    ConfigError : with another optimizer than SGD, whose moves are no sums of gradients.
    """
    sgd = clients.training.local_optimizer
    if type(sgd) is not SGD:
        raise ConfigError(f"This method needs training.optimizer=sgd, but it is {type(sgd).__name__}.")
    steps, rho = unmarked(clients.num_steps()), sgd.momentum
    if rho:  # a gradient with r steps left moves the model by lr (1 + rho + ... + rho^(r - 1)), with Nesterov to rho^r
        steps = (steps - rho ** (1 + sgd.nesterov) * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    return clients.model.parameters(theta - trained) / (steps * clients.lr)[:, None]


def finetuned(clients: Clients, theta: Tensor, epochs: int, lr: float | None) -> Tensor:
    """Models ``[K, P+B]`` for evaluation: `theta`, trained further on each client's samples.

    Parameters
    ----------
    theta : ``[P+B]`` or ``[K, P+B]``.
    epochs : 0 returns `theta` itself and needs no samples.
    lr : None: the learning rate of the last round.
    """
    if epochs == 0:
        return per_client(unmarked(theta).expand(len(clients), -1))
    return clients.sgd(clients.loss, theta, epochs=epochs, lr=lr, stream="finetuning")
