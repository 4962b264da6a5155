"""Clients that train random widths of the network in every step, up to the widest that they can."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from raypfl.clients.clients import Clients
from raypfl.common.messages import Weighting, per_client
from raypfl.federation.method import METHODS
from raypfl.federation.task import Task
from raypfl.learning.objectives import Classification, Objective
from raypfl.learning.objectives.batch import Batch
from raypfl.methods.sub_networks.sub_networks import SubNetworks, loss_at, masked


@METHODS.register("fjord")
class FjORD(SubNetworks):
    """FjORD (Horvath et al. 2021), ordered dropout: each step trains a random width, of those that a client can.

    A client's own rate is ``p_max``. For each mini-batch, p is drawn from the `rates` up to ``p_max`` with equal
    chances, and the step trains the first ``ceil(p width)`` units of each hidden layer. The slice of ``p_max`` is sent.
    With ``rates = [1]`` it is FedAvg, bit for bit. The distillation has weight 1 and no temperature, as in the authors'
    implementation for Flower; the paper has both.

    Attributes
    ----------
    distillation : whether each step is down the loss of the slice of ``p_max`` plus, if p is smaller, the cross-entropy
        of the outputs at p with those at ``p_max``, which are constants there; else down the loss at p.
    """

    objectives: ClassVar[tuple[type[Objective], ...]] = (Classification,)

    weighting: Weighting = "samples"
    distillation: bool = True

    def trained(self, clients: Clients, start: Tensor, level: Tensor, owned: Tensor | None) -> Tensor:
        if len(set(self.rates)) == 1 and owned is None:
            return clients.sgd(clients.loss, start)

        def loss_at_width(
            p: Tensor, batch: Batch, width: Tensor, is_narrower: Tensor, owned: Tensor | None = None
        ) -> Tensor:
            return loss_at(clients, p * width, batch, owned)

        def distilled_loss(
            p: Tensor, batch: Batch, width: Tensor, is_narrower: Tensor, owned: Tensor | None = None
        ) -> tuple[Tensor, Tensor]:
            outputs = masked(clients.model(p, batch.x), owned)
            narrow_outputs = masked(clients.model(p * width, batch.x), owned)
            target = outputs.detach().softmax(1)
            distance = batch.mean(-(target * narrow_outputs.log_softmax(1)).sum(1))
            return clients.objective.loss(outputs, batch), is_narrower * distance

        loss = distilled_loss if self.distillation else loss_at_width
        extras: dict[str, Any] = {} if owned is None else {"owned": per_client(owned)}
        slices = self.slices(clients.model, 0)
        rates = np.array(self.rates)
        own_rates = rates[level.cpu().numpy()]
        choices = [np.flatnonzero(rates <= rate) for rate in own_rates]
        generators = clients.generators("widths")

        theta = start
        for batch in clients.minibatches():
            drawn_levels = []
            for levels, generator in zip(choices, generators, strict=True):
                drawn_levels.append(levels[int(torch.randint(len(levels), (), generator=generator))])
            is_narrower = torch.from_numpy((rates[drawn_levels] < own_rates).astype(float)).to(start)
            width = per_client(slices[drawn_levels])
            theta = batch.step(loss, theta, width=width, is_narrower=per_client(is_narrower), **extras)
        return theta

    def work(self, task: Task) -> np.ndarray:
        of_slices = super().work(task)
        rates = np.array(self.rates)
        work = []
        for rate, of_slice in zip(rates, of_slices, strict=True):
            of_drawn_slices = of_slices[rates <= rate]
            if self.distillation:
                # The client's slice in every step and, if it is drawn, a narrower one.
                work.append(of_slice + of_slices[rates < rate].sum() / len(of_drawn_slices))
            else:
                work.append(of_drawn_slices.mean())
        return np.array(work)
