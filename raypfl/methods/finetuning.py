"""Training a client's model on when it is judged, which leaves no trace in the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raypfl.common.errors import ConfigError
from raypfl.common.messages import per_client, unmarked

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients


def finetuned(clients: Clients, theta: Tensor, epochs: int, lr: float | None) -> Tensor:
    """Models trained from `theta` (``[P+B]`` or ``[K, P+B]``) on each client's own samples, ``[K, P+B]``.

    Parameters
    ----------
    epochs : 0 leaves the models as they are, bit for bit.
    lr : None: that of the last round.
    """
    if epochs == 0:  # without asking for samples, which may not be where a model is wanted
        return per_client(unmarked(theta).expand(len(clients), -1))
    return clients.sgd(clients.loss, theta, epochs=epochs, lr=lr, stream="finetuning")


def refuse_negative(**epochs: int | None) -> None:
    """Raise a ConfigError for epochs below 0; None stands for the experiment's."""
    for name, number in epochs.items():
        if number is not None and number < 0:
            raise ConfigError(f"method.{name} is {number}; it must be 0 or more.")
