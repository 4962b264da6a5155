"""The learning problem of FL-NTK in a run: its data, its two-layer network and a round's local steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypfl.analysis.base import AnalysedRound
from raypfl.analysis.theory.flntk import TheoremSetting
from raypfl.analysis.theory.two_layer import Round, TwoLayer
from raypfl.methods.global_model.fedavg import FedAvg
from raypfl.models.networks import TwoLayerReLU


@dataclass(frozen=True)
class Problem:
    """The data and the network of a round, with the n samples in the order of clients."""

    view: AnalysedRound

    @cached_property
    def _batches(self) -> list[Any]:
        return [self.view.samples(client) for client in range(self.view.task.num_clients)]

    @property
    def module(self) -> TwoLayerReLU:
        """The clients' network."""
        module = self.view.task.model.module
        assert isinstance(module, TwoLayerReLU)
        return module

    @cached_property
    def x(self) -> Tensor:
        """All samples, scaled as the network sees them, ``float64[n, d]``."""
        return torch.cat([self.module.scaled(batch.x) for batch in self._batches]).double().cpu()

    @cached_property
    def y(self) -> Tensor:
        """Their targets, ``float64[n]``."""
        return torch.cat([batch.y.flatten() for batch in self._batches]).double().cpu()

    @cached_property
    def parts(self) -> list[Tensor]:
        """The rows of `x` of each client."""
        sizes = [len(batch.y) for batch in self._batches]
        return list(torch.arange(sum(sizes)).split(sizes))

    @cached_property
    def network(self) -> TwoLayer:
        """The network's functions, without its weights."""
        return TwoLayer(self.module.signs.detach().double().cpu())

    def weights(self, theta: Tensor | None) -> Tensor:
        """Return the hidden weights of a model vector, ``float64[m, d]``."""
        assert theta is not None
        return theta.double().cpu().view(len(self.network.signs), -1)

    def setting(self, delta: float) -> TheoremSetting:
        """Return the setting of the theorem; `delta` : the probability with which its guarantees may fail."""
        method = self.view.method
        training = self.view.training
        assert isinstance(method, FedAvg)
        server_rate = method.server_lr
        return TheoremSetting(
            parts=self.parts,
            width=len(self.network.signs),
            # A step takes all samples, so an epoch is one step.
            steps=training.epochs if training.steps is None else training.steps,
            rate=training.lr,
            server_rate=1.0 if server_rate is None else server_rate,
            sigma=self.module.sigma,
            delta=delta,
        )

    def round(self) -> Round:
        """Return the round, with the observations of the clients' local steps."""
        setting = self.setting(0.1)
        width = setting.width
        active = torch.empty(setting.steps, len(self.y), width, dtype=torch.bool)
        local = torch.empty(setting.steps, len(self.y), dtype=torch.float64)
        for client, part in enumerate(self.parts):
            for observation in self.view.steps(client):
                bits = np.unpackbits(observation.arrays["active"], axis=1, count=width).astype(bool)
                active[observation.step, part] = torch.from_numpy(bits)
                local[observation.step, part] = torch.from_numpy(observation.arrays["outputs"]).double()

        return Round(
            network=self.network,
            x=self.x,
            y=self.y,
            before=self.weights(self.view.before),
            after=self.weights(self.view.after),
            active=list(active),
            local=local,
            scale=torch.full_like(self.y, setting.server_rate * setting.rate / setting.clients),
        )
