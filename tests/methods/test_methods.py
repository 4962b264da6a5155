"""Methods follow their papers, and equal each other in limiting cases."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import raypfl
from raypfl.common.errors import ConfigError, MethodError
from raypfl.methods import (
    APFL,
    METHODS,
    MTL,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedBABU,
    FedDyn,
    FedNH,
    FedProto,
    FedProx,
    FedROD,
    Local,
    Method,
    PFedMe,
)
from tests.support.federation import (
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    both_networks,
    client_states,
    gradient,
    run_method,
    sent_per_client,
    step_by_hand,
    torch_sgd,
)
from tests.support.runs import experiment
from tests.support.tiers import with_quick


@both_executors
@both_networks
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_is_the_weighted_average_of_the_clients_models(weighting, factory, executor):
    training = replace(FP64, epochs=2, momentum=0.5)
    fed = run_method(FedAvg(weighting=weighting), executor=executor, factory=factory, training=training)
    theta = fed.model.init(fed.seed)
    for round, ids in enumerate(ROUNDS):
        rows = []
        for client in ids:
            net = as_module(factory, theta)
            torch_sgd(net, fed.visits(client, round), lr=0.1, momentum=0.5)
            rows.append(as_vector(net).numpy())
        weights = [fed.sizes[c] for c in ids] if weighting == "samples" else None
        theta = torch.from_numpy(np.average(rows, axis=0, weights=weights))

    assert_close(fed.server["theta"], theta)
    assert torch.equal(fed.method.global_model(fed.server), fed.server["theta"])
    assert fed.method.personal_model(fed.clients(), fed.server) is None


@both_executors
@both_networks
def test_fedprox_without_pull_is_fedavg_to_the_bit(factory, executor):
    a, b = (run_method(m, executor=executor, factory=factory).server for m in (FedAvg(), FedProx(mu=0.0)))
    assert torch.equal(a["theta"], b["theta"])
    assert not torch.equal(a["theta"], run_method(FedProx(mu=0.1), executor=executor, factory=factory).server["theta"])


@both_executors
@both_networks
def test_ditto_without_pull_is_training_alone_to_the_bit(factory, executor):
    alone, ditto = (run_method(m, executor=executor, factory=factory) for m in (Local(), Ditto(lam=0.0)))
    assert (client_states(alone) == client_states(ditto)).all()
    pulled = run_method(Ditto(lam=0.5), executor=executor, factory=factory)
    assert (client_states(pulled) != client_states(alone)).any(axis=1).all()


@both_executors
@pytest.mark.parametrize("lam", [0.0, 2.0])
def test_dittos_global_model_is_fedavgs_to_the_bit(lam, executor):
    a, b = (run_method(m, executor=executor, factory=NormalisedConv).server for m in (FedAvg(), Ditto(lam=lam)))
    assert torch.equal(a["theta"], b["theta"])


@both_executors
def test_local_training_continues_from_each_clients_last_model(executor):
    fed = run_method(Local(), executor=executor, training=FP64)
    for client in range(4):
        net = as_module(fed.factory, fed.model.init(fed.seed))
        for round, ids in enumerate(ROUNDS):
            if client in ids:
                torch_sgd(net, fed.visits(client, round), lr=0.1)
        assert_close(client_states(fed)[client], as_vector(net))
    assert fed.ledger.entries == []


@both_executors
def test_two_steps_of_fedprox_by_hand(executor):
    mu = 0.7
    lr = 0.1
    weights = np.array([7, 4, 11, 7]) / 29
    fed = run_method(FedProx(mu=mu), None, executor=executor, training=replace(ONE_STEP, steps=2))
    start = fed.model.init(fed.seed)
    expected = torch.zeros_like(start)

    for client in range(4):
        first = start - lr * gradient(fed, start, client)
        second = first - lr * (gradient(fed, first, client) + mu * (first - start))
        expected += weights[client] * second

    assert_close(fed.server["theta"], expected)


@both_executors
@both_networks
def test_three_rounds_of_feddyn_by_hand(factory, executor):
    alpha = 0.3
    lr = 0.1
    cohorts = [[0, 1, 2, 3], [1, 2, 3], [0, 3]]
    fed = run_method(FedDyn(alpha=alpha), *cohorts, factory=factory, executor=executor, training=replace(FP64, steps=2))
    theta = fed.model.init(fed.seed)
    size = fed.model.num_parameters
    linear = torch.zeros(4, size, dtype=theta.dtype)
    h = torch.zeros(size, dtype=theta.dtype)

    for round, ids in enumerate(cohorts):
        moved = []
        for c in ids:
            w = theta.clone()
            for samples in fed.visits(c, round)[:2]:
                pulled = gradient(fed, w, c, samples) - linear[c] + alpha * (w - theta)[:size]
                w = step_by_hand(fed, w, samples[0], pulled, lr)
            linear[c] -= alpha * (w - theta)[:size]
            moved.append(w)

        mean = torch.stack(moved).mean(0)
        h = h - alpha / 4 * sum((w - theta)[:size] for w in moved)
        theta = torch.cat([mean[:size] - h / alpha, mean[size:]])
        if round == 0:
            torch.testing.assert_close(theta[:size], (2 * mean - fed.model.init(fed.seed))[:size])

    assert_close(fed.server["theta"], theta, 1e-9)
    assert_close(client_states(fed, "linear"), linear, 1e-9)


@both_executors
def test_two_rounds_of_ditto_by_hand(executor):
    lam = 0.7
    lr = 0.1
    weights = np.array([7, 4, 11, 7]) / 29
    fed = run_method(Ditto(lam=lam), None, None, executor=executor, training=ONE_STEP)
    start = fed.model.init(fed.seed)
    moved = sum(w * (start - lr * gradient(fed, start, c)) for c, w in enumerate(weights))

    for client in range(4):
        v = start - lr * gradient(fed, start, client)
        v = v - lr * (gradient(fed, v, client) + lam * (v - moved))
        assert_close(client_states(fed)[client], v)


@both_executors
def test_dittos_personal_epochs_do_not_change_its_global_model(executor):
    fed = run_method(Ditto(personal_epochs=3, lam=0.0), None, executor=executor, training=FP64)
    reference = Federation(training=replace(FP64, epochs=3))
    for client in range(4):
        net = as_module(fed.factory, fed.model.init(fed.seed))
        torch_sgd(net, reference.visits(client), lr=0.1)
        assert_close(client_states(fed)[client], as_vector(net))

    fedavg = run_method(FedAvg(), None, executor=executor, training=FP64)
    assert torch.equal(fed.server["theta"], fedavg.server["theta"])


def moments_by_hand(name: str, theta, means, lr: float, b1: float, b2: float, tau: float) -> list[float]:
    """Reddi et al. 2021, Algorithm 2, number by number in Python."""
    m = [0.0] * len(theta)
    v = [tau**2] * len(theta)
    theta = list(theta)
    for mean in means:
        for i, target in enumerate(mean):
            d = target - theta[i]
            if name == "sgd":
                step = d
            elif name == "momentum":
                step = m[i] = b1 * m[i] + d
            elif name == "adagrad":
                v[i] += d * d
                step = d / (v[i] ** 0.5 + tau)
            else:
                m[i] = b1 * m[i] + (1 - b1) * d
                if name == "adam":
                    v[i] = b2 * v[i] + (1 - b2) * d * d
                else:
                    sign = (v[i] > d * d) - (v[i] < d * d)
                    v[i] -= (1 - b2) * d * d * sign
                step = m[i] / (v[i] ** 0.5 + tau)

            theta[i] += lr * step

    return theta


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "yogi"])
@pytest.mark.parametrize("lr", [1.0, 0.3])
def test_server_optimizers_follow_their_papers_recursion(name, lr):
    means = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    theta = torch.linspace(-1, 1, 8, dtype=torch.float64)
    model = SimpleNamespace(num_parameters=6)
    expected = moments_by_hand(name, theta[:6].tolist(), means[:, :6].tolist(), lr, 0.8, 0.95, 0.01)
    method = FedAvg(server_optimizer=name, server_lr=lr, server_beta1=0.8, server_beta2=0.95, server_tau=0.01)
    server = {"theta": theta, "moments": {}}

    for mean in means:
        before = server["theta"], server["theta"].clone(), mean.clone()
        method.step(server, mean, model)
        assert torch.equal(before[0], before[1]) and torch.equal(mean, before[2])

    theta = server["theta"]
    assert theta[:6].tolist() == pytest.approx(expected, rel=1e-12)
    assert torch.equal(theta[6:], means[-1, 6:])


def test_the_plain_server_step_is_the_average_to_the_bit():
    mean = torch.randn(100)
    server = {"theta": torch.randn(100), "moments": {}}
    FedAvg().step(server, mean, SimpleNamespace(num_parameters=90))
    assert torch.equal(server["theta"], mean)


def test_fedavg_remembers_its_server_optimizer_from_round_to_round():
    method = FedAvg(server_optimizer="adam", server_lr=0.1, server_beta1=0.8, server_beta2=0.95, server_tau=0.01)
    fed = run_method(method, None, None, None, training=ONE_STEP, factory=NormalisedConv)
    P = 102
    theta = fed.model.init(fed.seed)
    first = 0.0
    second = 0.01**2

    for round in range(3):
        rows = []
        for client in range(4):
            net = as_module(fed.factory, theta)
            torch_sgd(net, fed.visits(client, round), lr=0.1)
            rows.append(as_vector(net))
        mean = torch.from_numpy(np.average(torch.stack(rows).numpy(), axis=0, weights=fed.sizes))
        d = mean[:P] - theta[:P]
        first = 0.8 * first + 0.2 * d
        second = 0.95 * second + 0.05 * d**2
        theta = torch.cat([theta[:P] + 0.1 * first / (second.sqrt() + 0.01), mean[P:]])

    assert_close(fed.server["theta"], theta)


def test_methods_are_found_by_name_and_frozen():
    assert {"fedavg", "fedprox", "ditto", "local"} <= set(METHODS)
    assert METHODS.get("fedprox")(mu=0.5) == FedProx(mu=0.5)
    with pytest.raises(ConfigError, match="did you mean 'fedprox'"):
        METHODS.get("fedprx")
    with pytest.raises(MethodError, match=r"clients\.state"):
        FedProx().mu = 2.0
    with pytest.raises(TypeError):
        FedProx(0.5)


def test_a_method_without_required_functions_gets_an_error_that_names_them():
    class Empty(Method):
        pass

    with pytest.raises(NotImplementedError, match="Empty does not say how it starts: define start"):
        Empty().start(Federation().task)
    with pytest.raises(NotImplementedError, match="Empty does not say what a round is"):
        Empty().round({}, Federation().cohort())


@both_executors
@both_networks
@pytest.mark.parametrize(
    ("method", "reference"),
    [(FedAvgFT(finetune_epochs=2, finetune_lr=0.05), FedAvg()), (FedBABU(finetune_epochs=2, finetune_lr=0.05), None)],
)
def test_fine_tuning_is_the_bare_loop_from_the_global_model_and_leaves_no_trace(method, reference, factory, executor):
    options = {"executor": executor, "training": FP64, "factory": factory}
    fed = run_method(method, **options)
    theta = fed.server["theta"].clone()
    clients = fed.clients(round=4)
    epochs = Federation(factory, training=replace(FP64, epochs=2))
    tuned = method.personal_model(clients, fed.server).as_subclass(torch.Tensor)

    if reference is not None:
        assert torch.equal(theta, run_method(reference, **options).server["theta"])
        assert torch.equal(tuned, method.unseen_model(fed.clients(round=4), fed.server).as_subclass(torch.Tensor))

    for client in range(4):
        net = as_module(factory, theta)
        torch_sgd(net, epochs.visits(client, 4, "finetuning"), lr=0.05)
        assert_close(tuned[client], as_vector(net))

    assert torch.equal(fed.server["theta"], theta) and not clients.state.changed


@pytest.mark.parametrize("method", [Local(), Ditto(), APFL(), PFedMe(), MTL()], ids=repr)
def test_a_client_that_never_took_part_has_the_initial_model(method):
    fed = run_method(method, [0, 1])
    models = method.personal_model(fed.clients([3]), fed.server)
    torch.testing.assert_close(models.as_subclass(torch.Tensor), fed.model.init(fed.seed)[None])


@pytest.mark.parametrize(
    "method", [FedAvg(), FedProx(), FedDyn(), Ditto(), APFL(), PFedMe(), MTL(), FedAvgFT(), Local()], ids=repr
)
def test_methods_send_one_model_down_and_one_up(method):
    fed = run_method(method, factory=NormalisedConv)
    sent = {} if isinstance(method, Local) else dict.fromkeys(("down", "up"), 108)
    assert {direction: count for (direction, _), count in sent_per_client(fed.ledger, 1).items()} == sent
    assert fed.ledger.total("up", 0) == fed.ledger.total("down", 0) == (3 * 108 * 4 if sent else 0)


@pytest.mark.parametrize(
    "method",
    [
        *[FedAvg(), FedProx(mu=0.1), FedDyn(), Ditto(), Local(), APFL(), PFedMe(), MTL()],
        *[FedProto(), FedROD(), FedROD(head="hypernetwork")],
        *[FedNH(missing=missing) for missing in ("zero", "owners", "samples")],
    ],
    ids=repr,
)
def test_how_a_cohort_is_cut_changes_rounding_only(method):
    a, b = (
        run_method(method, training=FP64, factory=NormalisedConv, group_size=g, executor=e)
        for g, e in ((2, "vectorised"), (3, "sequential"))
    )
    a_states, b_states = ([fed.server, *map(fed.state_of, range(4))] for fed in (a, b))
    torch.testing.assert_close(a_states, b_states, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "apfl", "alpha": 1.5}, r"method.alpha is 1.5; it must be between 0 and 1"),
        ({"name": "pfedme", "inner_steps": -1}, r"method.inner_steps is -1; it must be 0 or more"),
        ({"name": "fedbabu", "finetune_epochs": -2}, r"method.finetune_epochs is -2; it must be 0 or more"),
        ({"name": "fedavg-ft", "finetune_epochs": -2}, r"method.finetune_epochs is -2; it must be 0 or more"),
        ({"name": "creff", "features": 0}, r"method.features is 0; it must be at least 1"),
        ({"name": "feddf", "steps": -1}, r"method.steps is -1; it must be 0 or more"),
        ({"name": "fednh", "rho": 1.2}, r"method.rho is 1.2; it must be between 0 and 1"),
    ],
)
def test_options_out_of_range_are_refused_with_the_experiment(options, message):
    with pytest.raises(ConfigError, match=message):
        raypfl.Experiment(method=options)


@pytest.mark.parametrize("name", with_quick(["fednh", "fedproto", "fedrod", "creff"], {"fednh", "fedrod"}))
def test_methods_with_heads_and_prototypes_learn_digits(name, tmp_path):
    result = raypfl.run(experiment(tmp_path, method=name, rounds=12, cohort__size=12, evaluation__every=0))
    accuracy = {(s["model"], s["protocol"]): s["accuracy"] for s in result.summary()}
    assert accuracy["personal", "local"] > 0.75 and accuracy.get(("global", "global"), 1.0) > 0.6


@pytest.mark.parametrize("optimizer", with_quick(["sgd", "momentum", "adagrad", "adam", "yogi"], {"adam"}))
def test_no_server_optimizer_fails_on_digits_at_its_default_rate(optimizer, tmp_path):
    method = {"name": "fedavg", "server_optimizer": optimizer}
    settings = {"rounds": 12, "cohort__size": 12, "evaluation__every": 0, "training__batch_size": 10}
    result = raypfl.run(experiment(tmp_path, method=method, **settings))
    accuracy = {(s["model"], s["protocol"]): s["accuracy"] for s in result.summary()}
    assert accuracy["global", "global"] > 0.8
