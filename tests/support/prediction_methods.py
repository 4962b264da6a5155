"""Methods whose clients come by their models in ways of their own, written as a user's file is."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl import Broadcast, Each, FlatModel, Mean, Method, Predictor, Scatter
from raypfl.methods import FedAvg


class Described(nn.Module):
    """Images and labels ``[b, ...]`` to descriptors ``[b, size]``."""

    def __init__(self, pixels: int, classes: int, size: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(nn.Linear(pixels + classes, 32), nn.ReLU(), nn.Linear(32, size))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return self.layers(torch.cat([x.flatten(1), F.one_hot(y, self.classes).to(x.dtype)], dim=1))


class Generator(nn.Module):
    """Descriptors ``[b, size]`` to models ``[b, P]``, which are near a given one at first."""

    def __init__(self, size: int, model: Tensor):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, len(model)))
        with torch.no_grad():
            self.layers[2].weight.mul_(0.1)
            self.layers[2].bias.copy_(model)

    def forward(self, v: Tensor) -> Tensor:
        return self.layers(v)


class Hypernetwork(Method):
    """A hypernetwork on the server makes each client's model from what the client says of its data.

    After Scott, Zakerinia and Lampert 2024 (PeFLL), made small. The hypernetwork never leaves the server: a client
    sends a descriptor of its training samples and gets a model, in training and when it is judged, known or new.

    Attributes
    ----------
    size : l, numbers in a descriptor.
    rate : the server's learning rate, for both networks.
    """

    size: int = 10
    rate: float = 0.1

    def networks(self, task):
        pixels, model = torch.Size(task.input_shape).numel(), task.model.init(task.seed)
        return {
            "embed": FlatModel(lambda: Described(pixels, task.num_classes, self.size), dtype=task.model.dtype),
            "hyper": FlatModel(lambda: Generator(self.size, model), dtype=task.model.dtype),
        }

    def start(self, task):
        return {name: task.networks[name].init(task.seed) for name in ("embed", "hyper")}

    def round(self, server, cohort):
        eta = server["hyper"].clone().requires_grad_()
        v = cohort.run(self.describe, embed=server["embed"])["v"].requires_grad_()
        theta = cohort.task.networks["hyper"](eta, v)
        step = cohort.run(self.train, theta=Scatter(theta.detach()))["step"]
        gradients = torch.autograd.grad(theta, [eta, v], step / len(cohort))
        known = Broadcast(server["embed"], charged=False)  # of the first exchange
        pulled = cohort.run(self.pull_back, embed=known, step=Scatter(gradients[1]))["embed"]
        server["hyper"] = server["hyper"] + self.rate * gradients[0]
        server["embed"] = server["embed"] + self.rate * len(cohort) * pulled

    def personalize(self, server, cohort):
        v = cohort.run(self.describe, embed=server["embed"])["v"]
        theta = cohort.task.networks["hyper"](server["hyper"], v)
        cohort.run(self.keep, theta=Scatter(theta.detach()))

    def describe(self, clients, embed):
        return {"v": Each(clients.map(self.descriptor(clients), embed, clients.batches(32, "describe")))}

    def train(self, clients, theta):
        return {"step": Each(clients.sgd(clients.loss, theta) - theta)}

    def pull_back(self, clients, embed, step):
        rows = clients.vjp(self.descriptor(clients), embed, step, clients.batches(32, "describe"))
        return {"embed": Mean(rows)}

    def keep(self, clients, theta):
        clients.state["theta"] = theta

    def descriptor(self, clients):
        return lambda embed, batch: batch.mean(clients.networks["embed"](embed, (batch.x, batch.y)))

    def personal_model(self, clients, server):
        return clients.state["theta"]


class NearestNeighbours(FedAvg):
    """The global model, mixed with the labels of a client's own nearest training samples (Marfoq et al. 2022, kNN-Per).

    Attributes
    ----------
    neighbours : k, that vote, each by exp(-distance) between what goes into the output layer.
    share : lambda, of the votes in the prediction.
    """

    neighbours: int = 5
    share: float = 0.5

    def personal_model(self, clients, server):
        theta, inner = server["theta"], clients.model.features
        memory = clients.map(lambda p, batch: inner(p, batch.x)[0], theta)
        labels = clients.map(lambda p, batch: batch.y, theta)
        there = clients.map(lambda p, batch: batch.weight, theta)  # 0 where a shorter memory is padded

        def predict(x, theta, memory, labels, there):
            z, logits = inner(theta, x)
            distance = (z[:, None] - memory).norm(dim=2) + torch.where(there > 0, 0.0, torch.inf)
            nearest, index = distance.topk(min(self.neighbours, len(memory)), largest=False)
            votes = torch.softmax(-nearest, dim=1)[..., None] * F.one_hot(labels[index], logits.shape[1])
            mixed = self.share * votes.sum(1) + (1 - self.share) * logits.softmax(dim=1)
            return mixed.clamp_min(1e-12).log()

        return Predictor(predict, theta=theta, memory=memory, labels=labels, there=there)

    unseen_model = personal_model
