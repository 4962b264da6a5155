"""PeFLL and pFedHN are one graph, split over server and clients; messages, counts and state are the papers'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.experiment import experiments
from raypfl.experiment.recipes import settings_of
from raypfl.methods import PeFLL, PFedHN
from raypfl.models import FlatModel
from raypfl.models.architectures.hypernetworks import EmbeddingNetwork, hypernetwork
from tests.support import datasets
from tests.support.federation import (
    CLASSES,
    FP64,
    SHAPE,
    Federation,
    NormalisedConv,
    as_module,
    assert_close,
    both_executors,
    sent_per_client,
)
from tests.support.runs import experiment

LENGTH = 3
SOME = {"size": "S", "length": LENGTH, "server_optimizer": "average"}
FULL = replace(FP64, batch_size=100)
SEVERAL = replace(FP64, steps=5, momentum=0.5)


def networks(fed: Federation) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Hypernetwork and embedding network as ordinary modules."""
    method = fed.method
    hyper = as_module(lambda: hypernetwork(LENGTH, fed.model.num_parameters, method.size), fed.server["hyper"])
    if not isinstance(method, PeFLL):
        return hyper, torch.nn.Identity()
    return hyper, as_module(lambda: EmbeddingNetwork(method.embedding, SHAPE, CLASSES, LENGTH), fed.server["embed"])


def gradients(loss: Tensor, *modules: torch.nn.Module) -> list[Tensor]:
    parts = [list(module.parameters()) for module in modules]
    flat = torch.autograd.grad(loss, [p for part in parts for p in part])
    split = np.split(np.arange(len(flat)), np.cumsum([len(part) for part in parts])[:-1])
    return [torch.cat([flat[i].reshape(-1) for i in indices]) for indices in split]


def objective(fed: Federation, theta: Tensor, client: int) -> Tensor:
    """``f_i``: a client's mean loss over all its samples, and its regularizer."""
    x, y = fed.samples(client)
    return F.cross_entropy(fed.model(theta, x), y) + fed.method.lam_theta * theta.square().sum()


def descriptors(fed: Federation, embed: torch.nn.Module, ids: list[int]) -> Tensor:
    group = fed.clients(ids, fed.round)
    batches = (
        group._group.full_batches("train")
        if fed.method.batch is None
        else group.batches(fed.method.batch, "descriptor")
    )
    return torch.stack([embed((batch.x, batch.y)).mean(0) for batch in batches])


@both_executors
@pytest.mark.parametrize("embedding", ["linear", "mlp1"])
@pytest.mark.parametrize(("batch", "group_size"), [(None, None), (5, 2)])
@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [0, 2, 3]])
def test_a_round_with_full_batches_is_a_gradient_step_on_the_papers_objective(
    ids, batch, group_size, embedding, executor
):
    lam = {"lam_h": 0.05, "lam_v": 0.03, "lam_theta": 0.02}
    method = PeFLL(**SOME, **lam, embedding=embedding, batch=batch)
    fed = Federation(executor=executor, training=FULL, method=method, group_size=group_size)
    fed.server = method.start(fed.task)

    for _ in range(2):
        hyper, embed = networks(fed)
        theta = hyper(descriptors(fed, embed, ids))
        losses = [objective(fed, row, client) for row, client in zip(theta, ids, strict=True)]
        squares = [sum(p.square().sum() for p in net.parameters()) for net in (hyper, embed)]
        loss = torch.stack(losses).mean() + lam["lam_h"] * squares[0] + lam["lam_v"] * squares[1]
        slopes = gradients(loss, hyper, embed)
        expected = [fed.server[name] - FULL.lr * slope for name, slope in zip(("hyper", "embed"), slopes, strict=True)]
        fed.run_rounds(ids)
        assert_close(fed.server["hyper"], expected[0])
        assert_close(fed.server["embed"], expected[1])

    assert min(slope.norm() for slope in slopes) > 1e-4 and fed.warnings == []


@both_executors
def test_steps_of_any_local_training_are_pulled_back_through_both_networks(executor):
    method = PeFLL(**SOME, server_lr=0.7)
    fed = Federation(executor=executor, training=SEVERAL, method=method, group_size=3)
    fed.server = method.start(fed.task)
    hyper, embed = networks(fed)
    theta = hyper(descriptors(fed, embed, [0, 1, 2, 3]))
    clients = fed.clients(round=0)
    trained = clients.sgd(clients.loss, raypfl.per_client(theta.detach())).as_subclass(Tensor)
    slopes = gradients((theta * (trained - theta.detach())).sum(1).mean(), hyper, embed)
    expected = [fed.server[name] + 0.7 * slope for name, slope in zip(("hyper", "embed"), slopes, strict=True)]
    fed.run_rounds(None)

    assert_close(fed.server["hyper"], expected[0])
    assert_close(fed.server["embed"], expected[1])


@both_executors
def test_standardised_descriptors_match_one_graph_and_keep_the_first_rounds_mean_and_deviation(executor):
    method = PeFLL(**SOME, standardise=True)
    fed = Federation(executor=executor, training=FULL, method=method, group_size=2)
    fed.server = method.start(fed.task)
    mean = deviation = None

    for ids in ([2, 0, 3], [1, 3]):
        hyper, embed = networks(fed)
        v = descriptors(fed, embed, ids)
        if mean is None:
            mean = v[0].mean().detach()
            deviation = v[0].std().detach()

        theta = hyper((v - mean) / deviation)
        losses = [objective(fed, row, client) for row, client in zip(theta, ids, strict=True)]
        slopes = gradients(torch.stack(losses).mean(), hyper, embed)
        expected = [fed.server[name] - FULL.lr * slope for name, slope in zip(("hyper", "embed"), slopes, strict=True)]
        fed.run_rounds(ids)

        assert_close(fed.server["hyper"], expected[0])
        assert_close(fed.server["embed"], expected[1])

    assert abs(deviation - 1) > 0.1


def test_a_descriptor_of_one_number_cannot_be_standardised():
    with pytest.raises(ConfigError, match=r"method\.standardise needs descriptors of several numbers"):
        Federation(method=PeFLL(length=1, standardise=True)).task  # noqa: B018


@both_executors
def test_pfedhn_moves_its_hypernetwork_and_the_cohorts_embeddings_by_one_gradient_step(executor):
    method = PFedHN(**SOME)
    fed = Federation(executor=executor, training=FULL, method=method, group_size=2)
    fed.server = method.start(fed.task)
    ids = [0, 2, 3]
    hyper, _ = networks(fed)
    rows = fed.server["embeddings"].clone().requires_grad_()
    losses = [objective(fed, row, client) for row, client in zip(hyper(rows[ids]), ids, strict=True)]
    loss = torch.stack(losses).mean()
    (embedding_gradient,) = torch.autograd.grad(loss, rows, retain_graph=True)
    (slope,) = gradients(loss, hyper)
    before = fed.server["hyper"]
    fed.run_rounds(ids)

    assert_close(fed.server["hyper"], before - FULL.lr * slope)
    assert_close(fed.server["embeddings"], rows.detach() - FULL.lr * embedding_gradient)
    assert torch.equal(fed.server["embeddings"][1], rows[1].detach())


@pytest.mark.parametrize("method", [PeFLL(**SOME, lam_h=0.05, lam_v=0.2), PFedHN(**SOME, lam_h=0.05, lam_v=0.2)])
def test_steps_of_zero_only_shrink_what_is_regularized(method):
    fed = Federation(method=method)
    server = method.start(fed.task)
    before = dict(server)
    vectors = "embed" if isinstance(method, PeFLL) else "embeddings"
    method.move(server, {name: torch.zeros_like(server[name]) for name in ("hyper", vectors)}, lr=0.1)
    assert_close(server["hyper"], (1 - 2 * 0.1 * 0.05) * before["hyper"])
    assert_close(server[vectors], (1 - 2 * 0.1 * 0.2) * before[vectors])


@pytest.mark.parametrize(("name", "clip"), [("sgd", None), ("sgd", 0.01), ("adam", None), ("adam", 0.01)])
def test_the_servers_optimizers_are_torchs_on_the_mean_of_the_pulled_back_steps(name, clip):
    method = PFedHN(**SOME | {"server_optimizer": name}, server_lr=0.02, server_clip_norm=clip, lam_h=0.05, lam_v=0.05)
    fed = Federation(method=method)
    server = method.start(fed.task)
    draws = torch.Generator().manual_seed(0)
    leaves = [torch.nn.Parameter(server[key].clone()) for key in ("hyper", "embeddings")]
    kind, options = (torch.optim.SGD, {"momentum": 0.9}) if name == "sgd" else (torch.optim.AdamW, {})
    optimizer = kind(leaves, lr=0.02, weight_decay=0.1, **options)

    for _ in range(3):
        for leaf in leaves:
            leaf.grad = -torch.randn(leaf.shape, generator=draws, dtype=leaf.dtype)
        method.move(server, {"hyper": -leaves[0].grad, "embeddings": -leaves[1].grad}, lr=0.1)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()

    assert_close(server["hyper"], leaves[0].detach())
    assert_close(server["embeddings"], leaves[1].detach())


def test_a_round_of_pefll_is_six_messages_and_of_pfedhn_two():
    fed = Federation(method=PeFLL(**SOME), group_size=2)
    fed.run_rounds([0, 1, 3])
    embed = fed.task.networks["embed"].size
    model = fed.model.size
    seen = [(e.exchange, e.direction, e.name, e.clients, e.numbers) for e in fed.ledger.entries]

    assert seen == [
        (0, "down", "embed", 3, embed),
        (0, "up", "v", 3, LENGTH),
        (1, "down", "theta", 3, model),
        (1, "up", "step", 3, model),
        (2, "down", "step", 3, LENGTH),
        (2, "up", "embed_step", 3, embed),
    ]

    fed = Federation(method=PFedHN(**SOME))
    fed.run_rounds(None)
    assert sent_per_client(fed.ledger, 0) == {("down", "theta"): model, ("up", "step"): model}


def test_pefll_keeps_no_client_state_and_no_server_state_per_client():
    sizes = []
    for clients in (4, 7):
        fed = Federation(method=PeFLL(**SOME), sizes=[5] * clients)
        server = fed.run_rounds(None, None)
        assert all(fed.state_of(client) == {} for client in range(clients))
        sizes.append({name: value.shape for name, value in server.items() if name != "moments"})
    assert sizes[0] == sizes[1]


def test_embedding_networks_and_hypernetworks_have_the_papers_numbers_of_parameters():
    def count(network: torch.nn.Module) -> int:
        return sum(p.numel() for p in network.parameters())

    embeddings = {(10, 25): 126_457, (10, 125): 134_957, (10, 250): 145_582, (100, 25): 162_457, (100, 250): 181_582}
    for (classes, length), expected in embeddings.items():
        assert count(EmbeddingNetwork("cnn", (3, 32, 32), classes, length)) == expected
    assert count(EmbeddingNetwork("cnn", (1, 28, 28), 62, 899)) == 186_187
    assert count(EmbeddingNetwork("linear", (3, 32, 32), 10, 25)) == 275

    with torch.device("meta"):
        sizes = {size: count(hypernetwork(25, 121_182, size)) for size in ("S", "M", "L")}
        assert count(hypernetwork(899, 90_242, "M")) == 9_234_742

    assert sizes == {"S": 12_252_082, "M": 12_272_282, "L": 12_292_482}


@pytest.mark.parametrize("kind", ["linear", "mlp1", "cnn"])
def test_a_descriptor_is_a_mean_over_samples_in_any_order(kind):
    torch.manual_seed(0)
    net = EmbeddingNetwork(kind, (3, 16, 16), 10, LENGTH).double()
    x = torch.randn(8, 3, 16, 16, dtype=torch.float64)
    y = torch.randint(0, 10, (8,))
    order = torch.randperm(8)
    v = net((x, y)).mean(0)

    assert_close(net((x[order], y[order])).mean(0), v)
    assert_close(net((x.repeat(2, 1, 1, 1), y.repeat(2))).mean(0), v)
    assert_close((3 * net((x[:3], y[:3])).mean(0) + 5 * net((x[3:], y[3:])).mean(0)) / 8, v)

    swapped = net((x[order], y)).mean(0)
    if kind == "cnn":
        assert (swapped - v).abs().max() > 1e-6
        assert (net((x, (y + 1) % 10)) - net((x, y))).abs().amax(1).min() > 1e-6
    else:  # it does not look at the images
        assert_close(swapped, v)


def test_an_images_class_is_an_extra_channel_of_ones():
    seen = []
    net = EmbeddingNetwork("cnn", (3, 16, 20), 5, LENGTH)
    net.layers.features[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 3, 16, 20)
    net((x, torch.tensor([4, 0])))

    assert seen[0].shape == (2, 8, 16, 20) and torch.equal(seen[0][:, :3], x)
    planes = seen[0][:, 3:]
    assert torch.equal(planes.sum(1), torch.ones(2, 16, 20))
    assert (planes[0, 4] == 1).all() and (planes[1, 0] == 1).all()


@pytest.mark.parametrize(("size", "layers"), [("S", 3), ("M", 5), ("L", 7)])
def test_a_hypernetwork_makes_the_same_models_for_many_clients_as_for_each_alone(size, layers):
    hyper = FlatModel(lambda: hypernetwork(4, 30, size), dtype=torch.float64)
    eta = hyper.init(0)
    v = torch.randn(6, 4, dtype=torch.float64)
    theta = hyper(eta, v)
    assert_close(theta, torch.cat([hyper(eta, row[None]) for row in v]))
    linear = [m for m in hyper.module if isinstance(m, torch.nn.Linear)]
    assert len(linear) == layers and hyper.module[-1] is linear[-1] and (theta < 0).any() and (theta > 0).any()


NEWCOMERS = {"data__unseen_fraction": 0.25, "evaluation__protocols": ["local", "unseen"], "rounds": 2}


def test_known_and_new_clients_get_their_model_in_three_messages(tmp_path):
    result = raypfl.run(experiment(tmp_path, method="pefll", **NEWCOMERS))
    rows = [r for r in result.ledger.to_pylist() if r["phase"] == "prediction"]
    embed = 10 * 3 + 3
    model = result.metadata["parameters"]
    messages = [("down", "embed", embed), ("up", "v", 3), ("down", "theta", model)]
    assert [(r["direction"], r["name"], r["numbers"]) for r in rows] == messages * 3  # two cohorts known, one new
    unseen = result.evaluations.filter(pc.field("protocol") == "unseen")
    assert set(unseen["model"].to_pylist()) == {"personal"} and unseen.num_rows == 3


def test_a_client_new_to_pfedhn_trains_its_embedding_alone_for_twenty_exchanges(tmp_path):
    base = experiment(tmp_path, method="pfedhn", method__adapt_lr=0.3, **NEWCOMERS)
    result = raypfl.run(base)
    rows = [(r["direction"], r["name"], r["clients"]) for r in result.ledger.to_pylist() if r["phase"] == "prediction"]
    assert rows == [("down", "theta", 5), ("down", "theta", 4)] + [("down", "theta", 3), ("up", "step", 3)] * 20 + [
        ("down", "theta", 3)
    ]

    unadapted = raypfl.run(base.override(["method.adapt_rounds=0"]))
    assert unadapted.weights_hash == result.weights_hash

    def unseen_loss(run: raypfl.Result) -> float:
        return pc.mean(run.evaluations.filter(pc.field("protocol") == "unseen")["loss"]).as_py()

    assert unseen_loss(result) < unseen_loss(unadapted)


@pytest.mark.slow
def test_in_the_recipe_pefll_beats_fedavg_and_local_training_on_new_clients(tmp_path):
    changes = ["engine.backend=inline", "tracking={mlflow: false}", f"output={tmp_path}"]
    planned = experiments(settings_of("pefll-digits"), changes)
    assert len(planned) == 9

    accuracies: dict[tuple[str, str], list[float]] = {}
    for planned_run in planned:
        for row in raypfl.run(planned_run).summary():
            accuracies.setdefault((type(planned_run.method).__name__, row["protocol"]), []).append(row["accuracy"])

    pefll = np.array(accuracies["PeFLL", "unseen"])
    assert (pefll > accuracies["FedAvg", "unseen"]).all() and (pefll > accuracies["Local", "unseen"]).all()
    assert abs(pefll.mean() - np.mean(accuracies["PeFLL", "local"])) < 0.03


@pytest.mark.parametrize("method", ["pefll", "pfedhn"])
def test_hypernetwork_methods_refuse_batch_norm_whose_statistics_have_no_gradient(tmp_path, method):
    with pytest.raises(ConfigError, match="batch-norm statistics, which no gradient moves"):
        raypfl.run(experiment(tmp_path, method=method, model="resnet18"))
    fed = Federation(NormalisedConv, method=PeFLL(**SOME))
    with pytest.raises(ConfigError, match=r"choose a network without batch norm"):
        fed.method.check(fed.model)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"method": "pefll", "method__embedding": "cnn"},
            r"cnn needs images of at least 16x16 pixels.*embedding=linear",
        ),
        ({"method": "pefll", "method__batch": 0}, r"method.batch is 0"),
        ({"method": "pfedhn", "method__lam_v": -1}, r"method.lam_v is -1.*0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_a_sentence(tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        raypfl.run(experiment(tmp_path, **changes))


@pytest.mark.thorough
def test_images_are_described_by_a_convolutional_network(tmp_path):
    datasets.cifar10(tmp_path, each=20)
    base = experiment(tmp_path, method="pefll", method__embedding="cnn", model="lenet", rounds=1, cohort__size=3)
    base = base.override([f"data={{name: cifar10, root: {tmp_path}}}", "partition={name: iid, clients: 4}"])
    result = raypfl.run(base)
    sent = {(r["direction"], r["name"]): r["numbers"] for r in result.ledger.to_pylist() if r["phase"] == "training"}
    embed = EmbeddingNetwork("cnn", (3, 32, 32), 10, 1)
    assert sent["down", "embed"] == sent["up", "embed_step"] == sum(p.numel() for p in embed.parameters())
    assert sent["down", "theta"] == 121_182
