"""A gradient that is split over server and clients is the gradient of the whole.

The method below has what makes hypernetwork methods hard (PeFLL, Scott et al. 2024): a hypernetwork on the server turns
each client's descriptor, which an embedding network computed on the client, into that client's model. The client trains
the model; its step is pulled back through the hypernetwork on the server, and through the embedding network on the
client. The reference is one graph that has all of it in one process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raypfl.common.messages import Each, Mean, Scatter, Sum
from raypfl.methods import Method, Task
from raypfl.models import FlatModel
from tests.support.federation import (
    CLASSES,
    FP64,
    Federation,
    as_module,
    both_executors,
    both_networks,
)

DESCRIPTOR = 4
DESCRIBED = 5
RATES = {"hyper": 0.3, "embed": 0.2}


def hypernetwork(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(DESCRIPTOR, 6), nn.Tanh(), nn.Linear(6, size))


class Embedding(nn.Module):
    """A network from images and labels to a vector for each sample; a client's descriptor is their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Linear(32, 7)
        self.classes = nn.Linear(CLASSES, 7, bias=False)
        self.out = nn.Linear(7, DESCRIPTOR)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        one_hot = F.one_hot(y, CLASSES).to(x.dtype)
        return self.out((self.pixels(x.flatten(1)) + self.classes(one_hot)).tanh())


class Hyper(Method):
    """A hypernetwork makes each client's model from the client's descriptor.

    Attributes
    ----------
    weighted : whether clients' gradients are weighted by their samples (``Mean``), or added up (``Sum``).
    resend : whether the embedding network is sent again for the pull-back, or the client keeps it until then.
    """

    weighted: bool = False
    resend: bool = False

    def networks(self, task: Task) -> dict[str, FlatModel]:
        size = task.model.num_parameters
        return {
            "hyper": FlatModel(lambda: hypernetwork(size), seed=1, dtype=task.model.dtype),
            "embed": FlatModel(Embedding, seed=2, dtype=task.model.dtype),
        }

    def start(self, task: Task) -> dict[str, Tensor]:
        return {name: task.networks[name].init(task.seed) for name in ("hyper", "embed")}

    def round(self, server, cohort):
        hyper = cohort.task.networks["hyper"]
        eta = server["hyper"].detach().requires_grad_()
        v = cohort.run(self.describe, embed=server["embed"])["v"].requires_grad_()
        theta = hyper(eta, v)

        reply = cohort.run(self.train, theta=Scatter(theta.detach()))
        step = reply["step"] * self._weights(cohort)[:, None]
        eta_step, v_step = torch.autograd.grad(theta, [eta, v], step)

        resent = {"embed": server["embed"]} if self.resend else {}
        embed_step = cohort.run(self.pull_back, cotangent=Scatter(v_step), **resent)["embed"]

        # `Mean` has divided by the cohort, but the weights in `step` have been applied already.
        scale = len(cohort) if self.weighted else 1
        server["hyper"] = server["hyper"] + RATES["hyper"] * eta_step
        server["embed"] = server["embed"] + RATES["embed"] * embed_step * scale

    def _weights(self, cohort) -> Tensor:
        sizes = torch.tensor(cohort.task.num_samples[list(cohort.ids)], dtype=torch.float64)
        return sizes / sizes.sum() if self.weighted else torch.ones(len(cohort), dtype=torch.float64)

    def _describe(self, clients):
        def descriptor(embed, batch):
            return batch.mean(clients.networks["embed"](embed, (batch.x, batch.y)))

        return descriptor, clients.batches(DESCRIBED, "describe")

    def describe(self, clients, embed):
        descriptor, batches = self._describe(clients)
        if not self.resend:
            clients.state["embed"] = embed.expand(len(clients), -1)
        return {"v": Each(clients.map(descriptor, embed, batches))}

    def train(self, clients, theta):
        statistics = clients.model.buffers(clients.initial).expand(len(clients), -1)
        start = torch.cat([theta, statistics], dim=1)
        trained = clients.sgd(clients.loss, start)
        return {"step": Each(clients.model.parameters(trained) - theta)}

    def pull_back(self, clients, cotangent, embed=None):
        descriptor, batches = self._describe(clients)
        embed = clients.state["embed"] if embed is None else embed
        rows = clients.vjp(descriptor, embed, cotangent, batches)
        return {"embed": Mean(rows) if self.weighted else Sum(rows)}


def one_graph(fed: Federation, hyper: Tensor, embed: Tensor, ids, weights: Tensor, batches) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weighted sum of the clients' losses in one graph of ordinary modules."""
    hyper_net = as_module(lambda: hypernetwork(fed.model.num_parameters), hyper)
    embed_net = as_module(Embedding, embed)

    total = torch.zeros((), dtype=torch.float64)
    for weight, client, batch in zip(weights, ids, batches, strict=True):
        descriptor = embed_net((batch.x, batch.y)).mean(0)
        net = fed.factory().to(torch.float64).train()
        shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
        parts = hyper_net(descriptor).split([shape.numel() for shape in shapes.values()])

        tensors = {}
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            tensors[name] = part.reshape(shape)

        x, y = fed.samples(client)
        total = total + weight * F.cross_entropy(torch.func.functional_call(net, tensors, (x,)), y)

    total.backward()
    hyper_gradient = torch.cat([p.grad.reshape(-1) for p in hyper_net.parameters()])
    embed_gradient = torch.cat([p.grad.reshape(-1) for p in embed_net.parameters()])
    return hyper_gradient, embed_gradient


@both_networks
@both_executors
@pytest.mark.parametrize(
    ("sizes", "cohorts", "group_size"),
    [
        ((8, 8, 8, 8), [None, None], None),
        ((7, 4, 11, 7, 2), [None, [0, 2, 3, 4], [1, 4]], None),
        ((7, 4, 11, 7, 2), [None, [0, 2, 3, 4], [1, 4]], 2),
        ((7, 4, 11, 7, 2), [[4], None], 1),
    ],
    ids=["equal sizes", "unequal sizes", "groups of two", "groups of one"],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_updates_of_both_networks_are_those_of_one_graph(weighted, sizes, cohorts, group_size, executor, factory):
    fed = Federation(
        factory,
        sizes=sizes,
        executor=executor,
        group_size=group_size,
        method=Hyper(weighted=weighted),
        training=replace(FP64, batch_size=100),
    )
    server = fed.method.start(fed.task)

    for round, cohort in enumerate(cohorts):
        ids = list(range(len(sizes)) if cohort is None else cohort)
        num_samples = torch.tensor([sizes[client] for client in ids], dtype=torch.float64)
        weights = num_samples / num_samples.sum() if weighted else torch.ones(len(ids), dtype=torch.float64)
        batches = fed.clients(ids, round).batches(DESCRIBED, "describe")

        gradients = one_graph(fed, server["hyper"], server["embed"], ids, weights, batches)
        for name, gradient in zip(("hyper", "embed"), gradients, strict=True):
            assert gradient.norm() > 1e-4
            server[name] = server[name] - RATES[name] * fed.training.lr * gradient

        fed.run_rounds(cohort)
        for name, expected in server.items():
            torch.testing.assert_close(fed.server[name], expected, rtol=1e-10, atol=1e-10)

    assert fed.warnings == []


@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("resend", [False, True])
def test_the_ledger_shows_the_six_messages_of_the_three_exchanges(resend, group_size):
    fed = Federation(sizes=(7, 4, 11, 7, 2), group_size=group_size, method=Hyper(resend=resend))
    fed.run_rounds([0, 1, 3])

    assert (fed.model.num_parameters, fed.task.networks["embed"].size) == (183, 284)
    messages = [(e.exchange, e.direction, e.name, e.clients, e.numbers, e.bytes) for e in fed.ledger.entries]
    resent = [(2, "down", "embed", 3, 284, 8 * 284)] if resend else []
    assert messages == [
        (0, "down", "embed", 3, 284, 8 * 284),
        (0, "up", "v", 3, 4, 8 * 4),
        (1, "down", "theta", 3, 183, 8 * 183),
        (1, "up", "step", 3, 183, 8 * 183),
        (2, "down", "cotangent", 3, 4, 8 * 4),
        *resent,
        (2, "up", "embed", 3, 284, 8 * 284),
    ]


def test_keeping_the_embedding_network_or_sending_it_again_gives_the_same_bits():
    servers = []
    for resend in (False, True):
        fed = Federation(method=Hyper(resend=resend), group_size=2)
        servers.append(fed.run_rounds(None, [0, 2], None))
    assert all(torch.equal(servers[0][name], servers[1][name]) for name in ("hyper", "embed"))


@both_executors
def test_a_methods_own_network_is_in_evaluation_mode_in_maps_too(executor):
    def embedding():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4))

    class Dropped(Method):
        def networks(self, task):
            return {"embed": FlatModel(embedding, dtype=task.model.dtype)}

    fed = Federation(executor=executor, method=Dropped())
    clients = fed.clients()
    embed = clients.networks["embed"]
    theta = embed.init(0)
    rows = clients.map(lambda p, batch: batch.mean(embed(p, batch.x)), theta)

    for client in range(4):
        x, _ = fed.samples(client)
        expected = as_module(embedding, theta).eval()(x).mean(0).detach()
        torch.testing.assert_close(torch.Tensor(rows[client]), expected, rtol=1e-10, atol=1e-10)


def test_the_embedding_sees_the_samples_that_the_reference_sees():
    fed = Federation(sizes=(7, 4, 11), method=Hyper())
    for client, batch in enumerate(fed.clients().batches(DESCRIBED, "describe")):
        samples = {tuple(x.flatten().tolist()) for x in fed.samples(client)[0]}
        assert {tuple(x.flatten().tolist()) for x in batch.x} <= samples
        assert len(batch.y) == min(DESCRIBED, fed.sizes[client])
