"""Federated averaging, and each client's fine-tuning of what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.fedavg import FedAvg
from raypfl.methods.finetuning import finetuned, refuse_negative

if TYPE_CHECKING:
    from raypfl.clients.clients import Clients


@METHODS.register("fedavg-ft")
class FedAvgFT(FedAvg):
    """FedAvg, whose model each client trains on before it is judged (a baseline of Xie et al. 2024).

    Nothing of the fine-tuning is sent or kept, so ``evaluation.every: 0`` does it once, after the last round. Without
    epochs it is FedAvg.

    Attributes
    ----------
    finetune_epochs : over the client's own samples.
    finetune_lr : None: that of the last round.
    """

    finetune_epochs: int = 5
    finetune_lr: float | None = None

    def __post_init__(self) -> None:
        refuse_negative(finetune_epochs=self.finetune_epochs)

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return finetuned(clients, server["theta"], self.finetune_epochs, self.finetune_lr)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.personal_model(clients, server)
