"""Per-FedAvg and kNN-Per: their formulas in plain torch, limiting cases, and models for new clients."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.compute as pc
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import FedAvg, KNNPer, Local, PerFedAvg
from tests.support.federation import (
    FP64,
    ONE_STEP,
    Federation,
    assert_close,
    both_executors,
    both_networks,
    gradient,
    run_method,
)
from tests.support.runs import experiment

NEWCOMERS = {"data__unseen_fraction": 0.25, "evaluation__protocols": ["local", "unseen"], "rounds": 2}


@both_executors
@both_networks
def test_per_fedavg_without_inner_steps_is_fedavg(factory, executor):
    training = replace(FP64, momentum=0.9, epochs=2)
    rounds = {"factory": factory, "executor": executor, "training": training}
    maml = run_method(PerFedAvg(alpha=0.0), **rounds)
    assert_close(maml.server["theta"], run_method(FedAvg(weighting="uniform"), **rounds).server["theta"])


@both_executors
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_of_per_fedavg_is_autograds(exact, executor):
    alpha = 0.4
    fed = Federation(method=PerFedAvg(alpha=0.4, exact=exact), training=ONE_STEP, executor=executor)
    start = fed.model.init(fed.seed)
    rows = []

    for client in range(4):
        w = start.clone().requires_grad_()
        x, y = fed.samples(client)
        (inner,) = torch.autograd.grad(F.cross_entropy(fed.model(w, x), y), w, create_graph=True)
        adapted = F.cross_entropy(fed.model(w - alpha * (inner if exact else inner.detach()), x), y)
        rows.append(start - ONE_STEP.lr * torch.autograd.grad(adapted, w)[0])

    fed.run_rounds(None)
    assert_close(fed.server["theta"], torch.stack(rows).mean(0))
    first_order = Federation(method=PerFedAvg(alpha=0.4), training=ONE_STEP, executor=executor).run_rounds(None)[
        "theta"
    ]

    assert torch.allclose(fed.server["theta"], first_order, atol=1e-6) is not exact


def test_per_fedavg_serves_all_clients_by_a_step_of_alpha():
    fed = run_method(PerFedAvg(alpha=0.3), None, training=ONE_STEP)
    models = fed.method.personal_model(fed.clients(round=1), fed.server).as_subclass(Tensor)
    for client, row in enumerate(models):
        assert_close(row, fed.server["theta"] - 0.3 * gradient(fed, fed.server["theta"], client))


def votes(z: Tensor, memory: Tensor, labels: Tensor, k: int, scale: float, classes: int = 3) -> Tensor:
    """``p_kNN`` of one sample ``z[d]``, term by term."""
    distances = [float(((z - m) ** 2).sum() / (len(z) * scale)) for m in memory]
    p = torch.zeros(classes, dtype=z.dtype)
    for j in sorted(range(len(memory)), key=distances.__getitem__)[:k]:
        p[labels[j]] += torch.exp(torch.tensor(-distances[j], dtype=z.dtype))
    return p / p.sum()


def predictions(fed: Federation, method: KNNPer, x: Tensor) -> list[Tensor]:
    predictor = method.personal_model(fed.clients(round=1), fed.server)
    return [predictor.outputs_of(k, x).exp() for k in range(len(fed.sizes))]


@both_executors
@both_networks
@pytest.mark.parametrize(("k", "share", "scale"), [(3, 0.5, 1.0), (10, 0.3, 100.0), (1, 1.0, 0.1)])
def test_knn_per_mixes_probabilities_of_neighbours_and_of_the_global_model(k, share, scale, factory, executor):
    fed = run_method(
        KNNPer(neighbours=k, share=share, scale=scale), None, factory=factory, training=FP64, executor=executor
    )
    x = fed.samples(2)[0][:6] + 0.1

    with fed.model.mode(train=False):
        for client, p in enumerate(predictions(fed, fed.method, x)):
            train_x, labels = fed.samples(client)
            memory, _ = fed.model.features(fed.server["theta"], train_x)
            z, logits = fed.model.features(fed.server["theta"], x)
            neighbour_votes = torch.stack([votes(row, memory, labels, k, scale) for row in z])
            assert_close(p, share * neighbour_votes + (1 - share) * logits.softmax(1), 1e-6)


def test_knn_per_without_neighbours_is_fedavg():
    fed = run_method(KNNPer(share=0.0), training=FP64)
    plain = run_method(FedAvg(), training=FP64)
    assert torch.equal(fed.server["theta"], plain.server["theta"])
    x = fed.samples(0)[0]
    for p in predictions(fed, fed.method, x):
        assert_close(p, fed.model(plain.server["theta"], x).softmax(1), 1e-9)


@both_executors
def test_k_and_share_are_the_best_by_leave_one_out(executor):
    method = KNNPer(neighbours=None, share=None, scale=0.05)
    fed = run_method(method, None, sizes=(13, 4, 17, 1), training=FP64, executor=executor)
    chosen = fed.method._choices(fed.clients(round=1), fed.server["theta"]).as_subclass(Tensor)
    for client in range(3):
        x, y = fed.samples(client)
        z, logits = fed.model.features(fed.server["theta"], x)
        scores = {}
        for k in (5, 10):
            others = [torch.arange(len(y)) != i for i in range(len(y))]
            neighbour_votes = torch.stack([votes(z[i], z[rest], y[rest], k, 0.05) for i, rest in enumerate(others)])
            for tenths in range(11):
                mixed = tenths / 10 * neighbour_votes + (1 - tenths / 10) * logits.softmax(1)
                scores[k, tenths / 10] = (mixed.argmax(1) == y).double().mean().item()
        k, share = chosen[client].tolist()
        assert scores[k, share] == max(scores.values())

    assert torch.isfinite(chosen).all()


@pytest.mark.parametrize("method", ["per-fedavg", "knn-per", "local"])
def test_new_clients_get_models_from_their_own_samples(tmp_path, method):
    result = raypfl.run(experiment(tmp_path, method=method, training__batch_size=10, **NEWCOMERS))
    rows = result.evaluations.filter((pc.field("protocol") == "unseen") & (pc.field("model") == "personal"))
    assert rows.num_rows == 3 and pc.min(rows["accuracy"]).as_py() > 0.2


def test_training_alone_makes_a_new_clients_model_from_its_own_samples():
    fed = Federation(method=Local(unseen_epochs=1), training=ONE_STEP)
    models = fed.method.unseen_model(fed.clients(round=0), {}).as_subclass(Tensor)
    start = fed.clients().initial
    for client, row in enumerate(models):
        assert_close(row, start - ONE_STEP.lr * gradient(fed, start, client))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "knn-per", "method__share": 1.5}, "method.share is 1.5; it must be between 0 and 1"),
        ({"method": "knn-per", "method__neighbours": 0}, "method.neighbours is 0; it must be at least 1"),
        ({"method": "knn-per", "method__scale": 0}, "method.scale is 0.*above 0"),
        ({"method": "per-fedavg", "method__finetune_epochs": -1}, "method.finetune_epochs is -1"),
        (
            {"method": "per-fedavg", "method__exact": "true", "model": "resnet18"},
            "second derivatives.*model.norm=group",
        ),
        ({"method": "local", "method__unseen_epochs": 0}, "method.unseen_epochs is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, changes, text):
    with pytest.raises(ConfigError, match=text):
        raypfl.run(experiment(tmp_path, **changes))
