"""FedAS, FedGH and FedPHP follow their papers, and equal simpler methods in limiting cases."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from raypfl.methods import FedAS, FedAvg, FedGH, FedPer, FedPHP
from raypfl.methods.local_training import sample_passes
from tests.support.by_hand import descend, mean_by_samples
from tests.support.federation import (
    CLASSES,
    FP64,
    ONE_STEP,
    ROUNDS,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    torch_sgd,
)


def features(net, x):
    """Return the inputs of small_mlp's output layer."""
    return net[2](net[1](net[0](x)))


def class_means(net, x, y):
    with torch.no_grad():
        z = features(net.eval(), x)
        return {int(c): z[y == c].mean(0) for c in y.unique()}


@both_executors
def test_fedas_without_alignment_and_traces_is_fedper_to_the_bit(executor):
    methods = (FedPer(body="last", weighting="uniform"), FedAS(align_epochs=0, weighting="uniform"))
    fedper, fedas = (run_method(m, executor=executor, factory=NormalisedConv) for m in methods)
    assert torch.equal(fedas.server["theta"], fedper.server["theta"])
    assert torch.equal(client_states(fedas), client_states(fedper))
    head = fedas.model.mask("output layer")
    assert torch.equal(client_states(fedas, "model")[:, ~head], client_states(fedper, "shared"))


@both_executors
def test_two_rounds_of_fedas_by_hand(executor):
    training = replace(FP64, batch_size=5)
    fed = run_method(FedAS(align_lr=0.3), None, [0, 2], executor=executor, training=training)
    start = theta = fed.model.init(fed.seed)
    head = fed.model.mask("output layer")
    models = [theta] * 4

    for round, ids in enumerate(([0, 1, 2, 3], [0, 2])):
        traces = {}
        for client in ids:
            x, y = fed.samples(client)
            means = class_means(as_module(fed.factory, models[client]), x, y)
            net = as_module(fed.factory, torch.where(head, models[client], theta))
            for xb, yb in fed.visits(client, round, "alignment"):
                z = features(net, xb)
                apart = sum((z[yb == c] - means[int(c)]).square().mean() for c in yb.unique())
                descend(apart, net[1].parameters(), 0.3)
            torch_sgd(net, fed.visits(client, round), lr=0.1)
            models[client] = as_vector(net)
            passes = sample_passes(fed.clients([client], round), "trace")
            batches = [(batch.x, batch.y) for _, (batch,) in passes]
            assert sum(len(y) for _, y in batches) == fed.sizes[client]
            norms = [gradient(fed, models[client], client, batch).square().sum() for batch in batches]
            traces[client] = sum(norms)
        mean = sum(traces[client] * models[client] for client in ids) / sum(traces.values())
        theta = torch.where(head, start, mean)

    assert_close(client_states(fed, "model"), torch.stack(models))
    assert_close(fed.server["theta"], theta)
    assert not fed.warnings
    body = int((~head).sum())
    assert sent_per_client(fed.ledger, 1) == {("down", "shared"): body, ("up", "shared"): body, ("up", "trace"): 1}


@both_executors
def test_traces_of_networks_with_batch_norm_are_those_of_their_parameters(executor):
    fed = run_method(FedAS(align_epochs=0), None, executor=executor, factory=NormalisedConv, training=FP64)
    models = client_states(fed, "model")

    traces = []
    for client, model in enumerate(models):
        net = as_module(fed.factory, model).eval()
        trace = torch.zeros((), dtype=torch.float64)
        for _, (batch,) in sample_passes(fed.clients([client]), "trace"):
            gradients = torch.autograd.grad(F.cross_entropy(net(batch.x), batch.y), net.parameters())
            trace += sum(part.square().sum() for part in gradients)
        traces.append(trace)

    weights = torch.stack(traces) / sum(traces)
    body = ~fed.model.mask("output layer")
    assert_close(fed.server["theta"][body], (weights @ models)[body])


@both_executors
def test_two_rounds_of_fedgh_by_hand(executor):
    method = FedGH(head_lr=0.2, head_epochs=2, head_batch=100)
    fed = run_method(method, None, [1, 2], executor=executor, training=ONE_STEP)
    theta = fed.model.init(fed.seed)
    head = fed.model.mask("output layer")
    bodies = [theta] * 4

    for ids in ([0, 1, 2, 3], [1, 2]):
        pairs = []
        for client in ids:
            x, y = fed.samples(client)
            net = as_module(fed.factory, torch.where(head, theta, bodies[client]))
            descend(F.cross_entropy(net(x), y), net.parameters())
            bodies[client] = as_vector(net)
            pairs += [(z, c) for c, z in class_means(net, x, y).items()]
        z = torch.stack([z for z, _ in pairs])
        y = torch.tensor([c for _, c in pairs])
        net = as_module(fed.factory, theta)
        for _ in range(2):
            descend(F.cross_entropy(net[3](z), y), net[3].parameters(), 0.2)
        theta = as_vector(net)

    assert_close(fed.server["theta"], theta)
    assert not fed.warnings
    assert_close(client_states(fed), torch.stack(bodies)[:, ~head])
    models = fed.method.personal_model(fed.clients([3], personal=client_states(fed)[3:]), fed.server)
    assert_close(models[0], torch.where(head, theta, bodies[3]))
    owned = sum(len(set(fed.labels[fed.split[client]])) for client in (1, 2)) / 2
    assert sent_per_client(fed.ledger, 1) == {("down", "shared"): 6 * CLASSES, ("up", "means"): 5 * owned}


def test_a_head_that_the_server_does_not_train_stays_the_initial_one():
    fed = run_method(FedGH(head_lr=0))
    assert torch.equal(fed.server["theta"], fed.model.init(fed.seed))


@both_executors
def test_fedphp_without_a_teacher_is_fedavg_and_keeps_what_was_trained_last_to_the_bit(executor):
    fedavg, fedphp = (run_method(m, executor=executor, factory=NormalisedConv) for m in (FedAvg(), FedPHP(lam=0, mu=0)))
    assert torch.equal(fedphp.server["theta"], fedavg.server["theta"])
    last = run_method(FedPer(personal="", body="last"), executor=executor, factory=NormalisedConv)
    assert torch.equal(client_states(fedphp), client_states(last, "shared"))
    assert sent_per_client(fedphp.ledger, 1) == sent_per_client(fedavg.ledger, 1)


@both_executors
def test_rounds_of_fedphp_by_hand(executor):
    lam = 0.4
    fed = run_method(FedPHP(lam=lam, mu=0.5), executor=executor, training=FP64)
    theta = fed.model.init(fed.seed)
    private = [theta] * 4

    def kernel(a, b):
        distance = ((a[:, None] - b) ** 2).sum(2)
        return sum((-distance / (2 * scale)).exp() for scale in (10, 15, 20, 50)).mean()

    for round, ids in enumerate(ROUNDS):
        trained = {}
        for client in ids:
            net = as_module(fed.factory, theta)
            teacher = as_module(fed.factory, private[client])
            for x, y in fed.visits(client, round):
                z = features(net, x)
                t = features(teacher, x).detach()
                apart = kernel(z, z) + kernel(t, t) - 2 * kernel(z, t)
                descend((1 - lam) * F.cross_entropy(net(x), y) + lam * apart, net.parameters())
            trained[client] = as_vector(net)
            # The federation's first round has the number 0, and a run 10 rounds.
            mu = 0.5 * round / 10
            private[client] = (1 - mu) * trained[client] + mu * private[client]
        theta = mean_by_samples(fed, trained, ids)

    assert_close(fed.server["theta"], theta)
    assert not fed.warnings
    assert_close(client_states(fed), torch.stack(private))
