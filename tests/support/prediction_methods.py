"""Methods with their own way of making a client's model, written as in a user's file."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl import Broadcast, Each, FlatModel, Mean, Method, Predictor, Scatter
from raypfl.methods import FedAvg


class Embedding(nn.Module):
    """A network from images and labels ``[b, ...]`` to descriptors ``[b, size]``."""

    def __init__(self, pixels: int, classes: int, size: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(nn.Linear(pixels + classes, 32), nn.ReLU(), nn.Linear(32, size))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return self.layers(torch.cat([x.flatten(1), F.one_hot(y, self.classes).to(x.dtype)], dim=1))


class Generator(nn.Module):
    """A network from descriptors ``[b, size]`` to models ``[b, P]``, which are near `model` at first."""

    def __init__(self, size: int, model: Tensor):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, len(model)))
        with torch.no_grad():
            self.layers[2].weight.mul_(0.1)
            self.layers[2].bias.copy_(model)

    def forward(self, v: Tensor) -> Tensor:
        return self.layers(v)


class Hypernetwork(Method):
    """A hypernetwork on the server makes each client's model from a descriptor of the client's data.

    A small version of PeFLL (Scott, Zakerinia and Lampert 2024). The hypernetwork never leaves the server: a client
    sends a descriptor of its training samples and gets a model, in training and in evaluation, whether it has trained
    or is new.

    Attributes
    ----------
    size : l, length of a descriptor.
    rate : the server's learning rate for both networks.
    """

    size: int = 10
    rate: float = 0.1

    def networks(self, task):
        pixels = torch.Size(task.input_shape).numel()
        model = task.model.init(task.seed)
        return {
            "embed": FlatModel(lambda: Embedding(pixels, task.num_classes, self.size), dtype=task.model.dtype),
            "hyper": FlatModel(lambda: Generator(self.size, model), dtype=task.model.dtype),
        }

    def start(self, task):
        return {name: task.networks[name].init(task.seed) for name in ("embed", "hyper")}

    def round(self, server, cohort):
        eta = server["hyper"].clone().requires_grad_()
        v = cohort.run(self.describe, embed=server["embed"])["v"].requires_grad_()
        theta = cohort.task.networks["hyper"](eta, v)
        step = cohort.run(self.train, theta=Scatter(theta.detach()))["step"]

        eta_gradient, v_gradient = torch.autograd.grad(theta, [eta, v], step / len(cohort))
        # Clients have had the embedding network since the first exchange, so it is not charged again.
        embed = Broadcast(server["embed"], charged=False)
        embed_gradient = cohort.run(self.pull_back, embed=embed, step=Scatter(v_gradient))["embed"]

        server["hyper"] = server["hyper"] + self.rate * eta_gradient
        server["embed"] = server["embed"] + self.rate * len(cohort) * embed_gradient

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
    """The global model, mixed with the labels of a client's nearest training samples (kNN-Per, Marfoq et al. 2022).

    Attributes
    ----------
    neighbours : k, number of samples that vote, each with exp(-distance) between inputs of the output layer.
    share : lambda, weight of the votes in the prediction.
    """

    neighbours: int = 5
    share: float = 0.5

    def personal_model(self, clients, server):
        theta = server["theta"]
        features = clients.model.features
        memory = clients.map(lambda p, batch: features(p, batch.x)[0], theta)
        labels = clients.map(lambda p, batch: batch.y, theta)
        weight = clients.map(lambda p, batch: batch.weight, theta)  # 0 where a shorter memory is padded

        def predict(x, theta, memory, labels, weight):
            z, logits = features(theta, x)
            distance = (z[:, None] - memory).norm(dim=2) + torch.where(weight > 0, 0.0, torch.inf)
            nearest, index = distance.topk(min(self.neighbours, len(memory)), largest=False)
            votes = torch.softmax(-nearest, dim=1)[..., None] * F.one_hot(labels[index], logits.shape[1])
            mixed = self.share * votes.sum(1) + (1 - self.share) * logits.softmax(dim=1)
            return mixed.clamp_min(1e-12).log()

        return Predictor(predict, theta=theta, memory=memory, labels=labels, weight=weight)

    unseen_model = personal_model
