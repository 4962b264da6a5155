"""fluke, told to do what raypfl did: ``python -m benchmarks.parity.systems.fluke ORDERS SCORES``.

Its own classes run unchanged. What is set from outside: the mini-batches, if they are to be the same; who takes part;
and clients' first models, which FedRep would otherwise share between all clients (see docs/parity.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.algorithms.apfl import APFL
from fluke.algorithms.ditto import Ditto
from fluke.algorithms.fedavg import FedAVG
from fluke.algorithms.fedbn import FedBN
from fluke.algorithms.fedper import FedPer
from fluke.algorithms.fedprox import FedProx
from fluke.algorithms.fedrep import FedRep
from fluke.algorithms.pfedme import PFedMe, PFedMeOptimizer
from fluke.data import FastDataLoader
from fluke.nets import EncoderGlobalHeadLocalNet, EncoderHeadNet
from fluke.utils import ClientObserver, FederationObserver
from torch import Tensor, nn

from benchmarks.parity.order import Order, Scores, judged
from benchmarks.peers.order import Shards
from raypfl.common import rng
from raypfl.models import MODELS
from raypfl.training.batches import order as batches

ALGORITHMS = {
    "fedavg": FedAVG,
    "fedprox": FedProx,
    "ditto": Ditto,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "apfl": APFL,
    "pfedme": PFedMe,
}
OF_PERSONALIZED = ("ditto", "apfl")
OF_MODEL = ("fedper", "fedrep", "fedbn")


class SameBatches(FastDataLoader):
    """A client's mini-batches as raypfl draws them: the same ones again for every model that it trains in a round."""

    def __init__(self, x: Tensor, y: Tensor, client: int, order: Order, **options: Any):
        super().__init__(x, y, **options)
        self._client, self._order = client, order

    def begin(self, round: int) -> None:
        key = rng.keys(self._order.seed, "batches", round, [self._client])
        self._visits = batches(key, np.array([self.size]), self._order.batch, self._order.epochs)
        self._passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        per_epoch = self.n_batches
        first = self._passes % self._order.epochs * per_epoch
        self._passes += 1
        for step in range(first, first + per_epoch):
            at = torch.from_numpy(self._visits.index[0, step, : self._visits.counts[0, step]])
            yield self.tensors[0][at], self.tensors[1][at]


class Watch(ClientObserver, FederationObserver):
    """Tells loaders the round, and keeps clients' trained models of the last one, which fluke then overwrites."""

    def __init__(self, rounds: int):
        self._rounds = rounds
        self.federation: CentralizedFL | None = None
        self.last: dict[int, nn.Module | None] = {}

    def start_fit(self, round: int, client_id: int, model: nn.Module, **_: Any) -> None:
        loader = self.federation.clients[client_id].train_set
        if isinstance(loader, SameBatches):
            loader.begin(round)

    def end_round(self, round: int) -> None:
        if round == self._rounds:
            self.last = {client.index: deepcopy(client.model) for client in self.federation.clients}


def run(order: Order) -> Mapping[str, Scores]:
    """The scores of ``personal`` and ``global`` models, as far as there are such."""
    dtype = torch.float64 if order.same else torch.float32
    trains, tests = (Shards(order.files, split, dtype) for split in ("train", "test"))
    net = _network(order, trains)
    FlukeENV().set_seed(order.seed)
    FlukeENV().set_device("cpu")
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    federation = ALGORITHMS[order.method](
        len(trains), SimpleNamespace(assign=_dealt(order, trains)), settings(order, net)
    )
    if order.method == "fedrep":
        for client in federation.clients:
            client.model = EncoderGlobalHeadLocalNet(deepcopy(net))
    federation.server.get_eligible_clients = lambda _: [federation.clients[k] for k in order.cohorts[federation.rounds]]
    watch = Watch(len(order.cohorts))
    watch.federation = federation
    federation.set_callbacks(watch)
    federation.run(n_rounds=len(order.cohorts), eligible_perc=len(order.cohorts[0]) / len(trains))
    return _scores(order, federation, watch.last, net, [tests.client(k) for k in range(len(tests))])


def settings(order: Order, net: EncoderHeadNet) -> DDict:
    """The order in fluke's words."""
    options = order.options
    client: dict[str, Any] = {
        "batch_size": order.batch,
        "local_epochs": order.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": order.lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
    }
    server: dict[str, Any] = {"weighted": True}
    model: nn.Module = net
    if order.method == "fedprox":
        client["mu"] = options["mu"]
    elif order.method == "ditto":
        client |= {"model": net, "tau": order.epochs, "lam": options["lam"]}
    elif order.method == "fedper":
        client["model"], model = net, net.encoder
    elif order.method == "fedrep":
        client |= {"model": net, "tau": order.epochs, "local_epochs": options["personal_epochs"]}
        model = net.encoder
    elif order.method == "apfl":
        client |= {"model": net, "lam": options["alpha"]}
        server["tau"] = 1
    elif order.method == "pfedme":
        client["k"] = options["inner_steps"]
        client["optimizer"] = {"name": PFedMeOptimizer, "lr": order.lr, "lamda": options["lam"], "mu": 0.0}
        server["beta"] = 1.0
    return DDict(client=client, server=server, model=deepcopy(model))


def _network(order: Order, shards: Shards) -> EncoderHeadNet:
    net = MODELS.get(order.network)(input_shape=shards.input_shape, num_classes=shards.num_classes).to(shards.dtype)
    net.load_state_dict(torch.load(order.weights, weights_only=True), strict=False)  # it has no count of batches
    return EncoderHeadNet(net[:-1], net[-1])


def _dealt(order: Order, shards: Shards) -> Any:
    def assign(clients: int, batch_size: int) -> tuple[tuple[list[FastDataLoader], list[None]], None]:
        options = {"num_labels": shards.num_classes, "batch_size": batch_size, "skip_singleton": False}
        loaders = []
        for k in range(clients):
            x, y = shards.client(k)
            loaders.append(
                SameBatches(x, y, k, order, **options) if order.same else FastDataLoader(x, y, shuffle=True, **options)
            )
        return (loaders, [None] * clients), None

    return assign


def _scores(
    order: Order,
    federation: CentralizedFL,
    last: Mapping[int, nn.Module | None],
    net: EncoderHeadNet,
    tests: list[tuple[Tensor, Tensor]],
) -> Mapping[str, Scores]:
    """fluke's clients have received the final global model by now; before, they had their own trained ones: `last`."""
    personal: list[nn.Module | None] = []
    if order.method in OF_PERSONALIZED:
        personal = [client.personalized_model for client in federation.clients]
    elif order.method in OF_MODEL:
        personal = [client.model for client in federation.clients]
    elif order.method == "pfedme":
        personal = [last[client.index] for client in federation.clients]
    models = {"personal": [net if model is None else model for model in personal]}
    if order.method not in OF_MODEL:
        models["global"] = [federation.server.model] * len(tests)
    return {name: judged([model.eval() for model in rows], tests) for name, rows in models.items() if rows}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scores = []
    for given in json.loads(Path(sys.argv[1]).read_text()):
        scores.append(run(Order(**given)))
        Path(sys.argv[2]).write_text(json.dumps(scores))
