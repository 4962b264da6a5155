"""Federated averaging with fine-tuning on each client."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.conditions import needs_some
from raypfl.common.limits import FROM_ZERO, POSITIVE
from raypfl.federation.method import METHODS, ServerView
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.methods.local_training import finetuned


@METHODS.register("fedavg-ft")
class FedAvgFT(FedAvg):
    """FedAvg whose model each client fine-tunes for evaluation (a baseline of Xie et al. 2024).

    The fine-tuned models are neither sent nor kept; ``evaluation.every: 0`` fine-tunes once, after the last round. With
    0 epochs it is FedAvg.

    Attributes
    ----------
    finetune_epochs : number of epochs of fine-tuning on the client's samples.
    finetune_lr : learning rate of fine-tuning; None: that of the last round.
    """

    finetune_epochs: Annotated[int, FROM_ZERO] = 5
    finetune_lr: Annotated[float | None, POSITIVE, needs_some("finetune_epochs")] = None

    def personal_model(self, clients: Clients, server: ServerView) -> Tensor:
        return finetuned(clients, server["theta"], self.finetune_epochs, self.finetune_lr)

    def unseen_model(self, clients: Clients, server: ServerView) -> Tensor:
        return self.personal_model(clients, server)
