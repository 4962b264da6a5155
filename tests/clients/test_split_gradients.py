"""A gradient that is split over server and clients is the gradient of the whole.

The method below has what makes hypernetwork methods hard (PeFLL, Scott et al. 2024): a hypernetwork on the server turns
each client's descriptor, which an embedding network computed on the client, into that client's model. The client trains
the model; the step it took is pulled back through the hypernetwork on the server, and through the embedding network on
the client. Held against one graph that has all of it in one process.
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
from tests.support.federation import CLASSES, FP64, Federation, NormalisedConv, as_module, small_mlp

DESCRIPTOR = 4
DESCRIBED = 5
RATES = {"hyper": 0.3, "embed": 0.2}


def hypernetwork(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(DESCRIPTOR, 6), nn.Tanh(), nn.Linear(6, size))


class Embedding(nn.Module):
    """Sees a batch's images and labels; its descriptor is the mean of what it makes of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Linear(32, 7)
        self.classes = nn.Linear(CLASSES, 7, bias=False)
        self.out = nn.Linear(7, DESCRIPTOR)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x, y = pair
        return self.out((self.pixels(x.flatten(1)) + self.classes(F.one_hot(y, CLASSES).to(x.dtype))).tanh())


class Hyper(Method):
    """One model a client, made by a hypernetwork from the client's descriptor.

    Attributes
    ----------
    weighted : whether a client's gradient counts by its samples (``Mean``), or as it is (``Sum``).
    resend : whether the embedding network is sent once more to be pulled back through, or the client keeps it so long.
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
        down, g_v = torch.autograd.grad(theta, [eta, v], step)
        again = {"embed": server["embed"]} if self.resend else {}
        pulled = cohort.run(self.pull_back, cotangent=Scatter(g_v), **again)["embed"]
        server["hyper"] = server["hyper"] + RATES["hyper"] * down
        server["embed"] = server["embed"] + RATES["embed"] * pulled * (len(cohort) if self.weighted else 1)

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
    """Gradients of the weighted sum of the clients' losses in one graph of ordinary modules."""
    H = as_module(lambda: hypernetwork(fed.model.num_parameters), hyper)
    E = as_module(Embedding, embed)
    whole = torch.zeros((), dtype=torch.float64)
    for weight, client, batch in zip(weights, ids, batches, strict=True):
        descriptor = E((batch.x, batch.y)).mean(0)
        net = fed.factory().to(torch.float64).train()
        shapes = {n: p.shape for n, p in net.named_parameters()}
        parts = H(descriptor).split([s.numel() for s in shapes.values()])
        tensors = {n: part.reshape(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        x, y = fed.samples(client)
        whole = whole + weight * F.cross_entropy(torch.func.functional_call(net, tensors, (x,)), y)
    whole.backward()
    return tuple(torch.cat([p.grad.reshape(-1) for p in net.parameters()]) for net in (H, E))


@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv])
@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
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
        amounts = torch.tensor([sizes[c] for c in ids], dtype=torch.float64)
        weights = amounts / amounts.sum() if weighted else torch.ones(len(ids), dtype=torch.float64)
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
    seen = [(e.exchange, e.direction, e.name, e.clients, e.numbers, e.bytes) for e in fed.ledger.entries]
    once_more = [(2, "down", "embed", 3, 284, 8 * 284)] if resend else []
    assert seen == [
        (0, "down", "embed", 3, 284, 8 * 284),
        (0, "up", "v", 3, 4, 8 * 4),
        (1, "down", "theta", 3, 183, 8 * 183),
        (1, "up", "step", 3, 183, 8 * 183),
        (2, "down", "cotangent", 3, 4, 8 * 4),
        *once_more,
        (2, "up", "embed", 3, 284, 8 * 284),
    ]


def test_an_embedding_network_that_is_kept_or_sent_again_gives_the_same_bits():
    servers = []
    for resend in (False, True):
        fed = Federation(method=Hyper(resend=resend), group_size=2)
        servers.append(fed.run_rounds(None, [0, 2], None))
    assert all(torch.equal(servers[0][name], servers[1][name]) for name in ("hyper", "embed"))


@pytest.mark.parametrize("executor", ["vectorised", "sequential"])
def test_a_methods_own_network_is_in_evaluation_mode_in_maps_too(executor):
    def embedding():
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 4))

    class Dropped(Method):
        def networks(self, task):
            return {"embed": FlatModel(embedding, dtype=task.model.dtype)}

    fed = Federation(executor=executor, method=Dropped())
    clients = fed.clients()
    embed = clients.networks["embed"]
    at = embed.init(0)
    rows = clients.map(lambda p, batch: batch.mean(embed(p, batch.x)), at)
    for k in range(4):
        expected = as_module(embedding, at).eval()(fed.samples(k)[0]).mean(0).detach()
        torch.testing.assert_close(torch.Tensor(rows[k]), expected, rtol=1e-10, atol=1e-10)


def test_the_embedding_sees_the_samples_that_the_reference_sees():
    fed = Federation(sizes=(7, 4, 11), method=Hyper())
    for k, batch in enumerate(fed.clients().batches(DESCRIBED, "describe")):
        own = {tuple(x.flatten().tolist()) for x in fed.samples(k)[0]}
        assert {tuple(x.flatten().tolist()) for x in batch.x} <= own
        assert len(batch.y) == min(DESCRIBED, fed.sizes[k])
