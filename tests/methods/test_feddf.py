"""FedDF: limiting cases, and the paper's formulas in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import METHODS, FedAvg, FedDF
from raypfl.runs import driver
from tests.support.federation import (
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
)
from tests.support.runs import experiment


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))


class Recorded(FedDF):
    """Keeps the cohort's models, which the server has no need of, for the test to look at."""

    def train(self, clients, theta):
        reply = super().train(clients, theta)
        clients.state["model"] = clients.sgd(clients.loss, theta)
        return reply


def test_feddf_without_distillation_is_fedavg_to_the_bit():
    first, second = (
        Federation(NormalisedConv, method=method).run_rounds(None, [0, 2]) for method in (FedAvg(), FedDF(steps=0))
    )
    assert torch.equal(first["theta"], second["theta"])


@pytest.mark.parametrize("method", ["feddf", "perada"])
def test_numbers_to_predict_have_no_softmax_to_distil(tmp_path, method):
    described = experiment(
        tmp_path, method=method, data="diabetes", data__pools="{auxiliary: 0.3}", partition="by_column", cohort__size=3
    )
    with pytest.raises(ConfigError, match=f"method is '{method}', which learns the objective 'classification' or 'mul"):
        raypfl.run(described)


@both_executors
@both_networks
def test_the_average_is_trained_by_adam_on_the_divergence_from_the_mean_logits(factory, executor):
    method = Recorded(steps=7, batch_size=4, lr=0.01)
    fed = Federation(factory, method=method, executor=executor, group_size=3)
    theta = fed.run_rounds(None)["theta"]
    models = [torch.from_numpy(fed.state_of(k)["model"]) for k in range(4)]
    sizes = torch.tensor(fed.sizes, dtype=torch.float64)
    average = (torch.stack(models) * sizes[:, None]).sum(0) / sizes.sum()
    teachers = [as_module(factory, model).eval() for model in models]
    student = as_module(factory, average).train()
    adam = torch.optim.Adam(student.parameters(), lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 7)
    losses: list[Tensor] = []

    for batch in fed.pools.pool("auxiliary", 0).batches(4, steps=7):
        with torch.no_grad():
            p = torch.stack([teacher(batch.x) for teacher in teachers]).mean(0).softmax(1)
        adam.zero_grad()
        losses.append((p * (p.log() - student(batch.x).log_softmax(1))).sum(1).mean())
        losses[-1].backward()
        adam.step()
        cosine.step()

    assert_close(theta, as_vector(student), 1e-6)
    logged = fed.cohorts[0].logged.values
    assert logged["distillation_loss"] == pytest.approx(sum(loss.item() for loss in losses) / 7)

    (pool,) = fed.pools.pool("auxiliary", 1).batches(9).once(9)
    with torch.no_grad():
        logits = {
            "ensemble_accuracy": torch.stack([teacher(pool.x) for teacher in teachers]).mean(0),
            "average_accuracy": as_module(factory, average).eval()(pool.x),
            "student_accuracy": student.eval()(pool.x),
        }
    for name, model_logits in logits.items():
        accuracy = (model_logits.argmax(1) == pool.y).double().mean().item()
        assert logged[name] == pytest.approx(accuracy), name


def test_for_a_linear_network_the_average_equals_the_ensemble_so_the_first_gradient_is_zero():
    fed = Federation(linear, method=FedDF(steps=1, weighting="uniform", batch_size=9))
    theta = fed.run_rounds(None)["theta"]
    plain = Federation(linear, method=FedAvg(weighting="uniform")).run_rounds(None)["theta"]
    assert 0 < (theta - plain).abs().max() <= 1.01e-3  # Adam takes steps of its rate down gradients of 1e-17


def test_labels_of_the_pool_are_not_used_for_training():
    models = []
    have_accuracies = []
    for shift in (0, 1, None):
        fed = Federation(method=FedDF(steps=3, batch_size=4))
        # -1 stands for a class that clients do not have.
        fed.labels[-9:] = -1 if shift is None else (fed.labels[-9:] + shift) % 3
        models.append(fed.run_rounds(None)["theta"])
        have_accuracies.append("student_accuracy" in fed.cohorts[0].logged.values)

    assert all(torch.equal(model, models[0]) for model in models)
    assert have_accuracies == [True, True, False]


def test_a_round_is_charged_a_model_each_way_and_no_logits():
    fed = Federation(method=FedDF(steps=3, batch_size=4))
    fed.run_rounds(None)
    sent = {(e.direction, e.name, e.numbers) for e in fed.ledger.entries}
    assert sent == {("down", "theta", fed.model.size), ("up", "theta", fed.model.size)}


@pytest.mark.parametrize(
    "needs",
    [
        *({"method": name} for name in METHODS if hasattr(METHODS.get(name), "pool")),
        {"analyses": "[distillation]"},
        {"model__pretrain": "auxiliary"},
    ],
)
def test_a_missing_pool_is_refused_before_anything_starts(tmp_path, needs):
    with pytest.raises(ConfigError, match=r"no pool called 'auxiliary'; data.pools has none"):
        driver.check([experiment(tmp_path, **needs, data__pools="{}")])


def test_a_method_that_does_not_distil_needs_no_pool(tmp_path):
    driver.check([experiment(tmp_path, method="feddf", method__steps=0, data__pools="{}")])


def test_the_servers_state_contains_no_pool(tmp_path):
    result = raypfl.run(experiment(tmp_path, method="feddf", method__steps=5, rounds=2))
    state = result.server_state()
    assert sum(value.numel() for value in state.values() if isinstance(value, Tensor)) == state["theta"].numel()
