"""pfl-research, set up as in its own benchmarks; ``torchrun`` starts several processes of this."""

from __future__ import annotations

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.order import Order, Shards, Stamps, network

ENDLESS = 1_000_000


class Trained(nn.Module):
    """A network with the two functions that pfl asks for; `metrics` looks at nothing, since training alone is timed."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(0.0, len(y))}


class Timed(TrainingProcessCallback):
    """Reports the end of every round, once for all processes."""

    def __init__(self, stamps: Stamps):
        self._stamps = stamps

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        if get_default_framework_module().distributed.global_rank == 0:
            self._stamps.add()
        return False, Metrics()


def run(order: Order) -> None:
    np.random.seed(0)
    shards = Shards(order.files)
    net = Trained(network(order, shards))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)

    def local_optimizer(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=order.momentum)

    def user(client: int) -> Dataset:
        return Dataset(raw_data=list(shards.client(client)))

    users = list(range(order.clients))
    weights = dict(zip(users, shards.sizes.tolist(), strict=True))
    data = FederatedDataset(user, get_user_sampler("minimize_reuse", users), weights)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ENDLESS,
            evaluation_frequency=ENDLESS,
            train_cohort_size=order.cohort,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=PyTorchModel(net, local_optimizer, optimizer),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=order.epochs, local_learning_rate=order.lr, local_batch_size=order.batch
        ),
        callbacks=[Timed(Stamps(order.report))],
    )
