"""fluke repeats raypfl's runs: ``python -m benchmarks.parity.systems.fluke ORDERS SCORES``.

Its own classes run unchanged. Set from outside are the mini-batches, if they are to be the same; the cohorts; and the
clients' first models, which FedRep would otherwise share between all clients (see docs/parity.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from benchmarks.parity.jobs import Order, Scores, judged
from benchmarks.peers.order import Shards
from benchmarks.peers.systems.fluke import federation, loader, training
from raypfl.common import rng
from raypfl.learning.sample_order import epoch_order as visits
from raypfl.models import MODELS

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
    """A client's mini-batches as raypfl draws them, the same for every model that it trains in a round."""

    def __init__(self, client: int, x: Tensor, y: Tensor, order: Order, **options: Any):
        super().__init__(x, y, **options)
        self._client, self._order = client, order

    def begin(self, round: int) -> None:
        key = rng.keys(self._order.seed, "batches", round, [self._client])
        self._visits = visits(key, np.array([self.size]), self._order.batch, self._order.epochs)
        self._passes = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        per_epoch = self.n_batches
        first = self._passes % self._order.epochs * per_epoch
        self._passes += 1
        for step in range(first, first + per_epoch):
            at = torch.from_numpy(self._visits.index[0, step, : self._visits.counts[0, step]])
            yield self.tensors[0][at], self.tensors[1][at]


class Watch(ClientObserver, FederationObserver):
    """Sets the loaders' round, and keeps the clients' models of the last round, which fluke overwrites after it."""

    def __init__(self, federation: CentralizedFL, rounds: int):
        self.federation, self._rounds = federation, rounds
        self.last: dict[int, nn.Module | None] = {}

    def start_fit(self, round: int, client_id: int, model: nn.Module, **_: Any) -> None:
        batches = self.federation.clients[client_id].train_set
        if isinstance(batches, SameBatches):
            batches.begin(round)

    def end_round(self, round: int) -> None:
        if round == self._rounds:
            self.last = {client.index: deepcopy(client.model) for client in self.federation.clients}


def run(order: Order) -> Mapping[str, Scores]:
    """The scores of ``personal`` and ``global`` models, as far as there are such."""
    dtype = torch.float64 if order.same else torch.float32
    trains = Shards(order.files, "train", dtype)
    tests = Shards(order.files, "test", dtype)
    net = _network(order, trains)
    make_loader = partial(SameBatches, order=order) if order.same else loader
    algorithm = federation(ALGORITHMS[order.method], order.seed, trains, settings(order, net), make_loader)
    if order.method == "fedrep":  # whose clients would otherwise share one first model
        for client in algorithm.clients:
            client.model = EncoderGlobalHeadLocalNet(deepcopy(net))

    algorithm.server.get_eligible_clients = lambda _: [algorithm.clients[k] for k in order.cohorts[algorithm.rounds]]
    watch = Watch(algorithm, len(order.cohorts))
    algorithm.set_callbacks(watch)
    algorithm.run(n_rounds=len(order.cohorts), eligible_perc=len(order.cohorts[0]) / len(trains))
    return _scores(order, algorithm, watch.last, net, [tests.client(k) for k in range(len(tests))])


def settings(order: Order, net: EncoderHeadNet) -> dict[str, Any]:
    """The order as fluke's settings."""
    options = order.options
    client, server = training(order.batch, order.epochs, order.lr), {"weighted": True}
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
    return {"client": client, "server": server, "model": deepcopy(model)}


def _network(order: Order, shards: Shards) -> EncoderHeadNet:
    net = MODELS.get(order.network)(input_shape=shards.input_shape, num_classes=shards.num_classes).to(shards.dtype)
    net.load_state_dict(torch.load(order.weights, weights_only=True), strict=False)  # it has no count of batches
    return EncoderHeadNet(net[:-1], net[-1])


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
    for fields in json.loads(Path(sys.argv[1]).read_text()):
        scores.append(run(Order(**fields)))
        Path(sys.argv[2]).write_text(json.dumps(scores))
