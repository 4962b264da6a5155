"""FedPTR and FedPTR-S: where they equal FedAvg, how they project, and the messages that their paper counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raypfl
from raypfl import Each, Mean
from raypfl.common.errors import ConfigError
from raypfl.methods import FedAvg, FedProx, FedPTR, FedPTRServer
from raypfl.methods.global_model.fedptr import pull_toward_anchor
from raypfl.methods.global_model.trajectory import StudentTrajectory
from raypfl.models import FlatModel
from tests.support.federation import (
    CLASSES,
    FP32,
    FP64,
    ROUNDS,
    Federation,
    NormalisedConv,
    as_module,
    as_vector,
    assert_close,
    both_executors,
    client_states,
    run_method,
    sent_per_client,
    small_mlp,
    torch_sgd,
)
from tests.support.runs import experiment

SMALL = {"per_class": 1, "outer_steps": 2, "inner_steps": 3, "window": 2, "image_lr": 10.0}
ALL = [None] * 6
each_side = pytest.mark.parametrize("side", [FedPTR, FedPTRServer])


def globals_of(method, rounds=ALL, **options) -> list[Tensor]:
    """Return the global model after each round."""
    fed = Federation(method=method, **{"group_size": 2, "training": FP32, **options})
    return [fed.run_rounds(ids)["theta"] for ids in rounds]


@both_executors
@each_side
@pytest.mark.parametrize("rounds", [ALL, [*ROUNDS, *ROUNDS]])
def test_fedptr_without_pull_is_fedavg_to_the_bit_although_it_matches(side, rounds, executor):
    plain, pulled = (globals_of(m, rounds, executor=executor) for m in (FedAvg(), side(lam=0.0, **SMALL)))
    assert all(torch.equal(a, b) for a, b in zip(plain, pulled, strict=True))


@both_executors
@each_side
def test_a_single_client_without_pull_is_central_training_by_torch(side, executor):
    fed = run_method(side(lam=0.0, **SMALL), *ALL, sizes=(9,), executor=executor, training=FP64)
    net = as_module(fed.factory, fed.model.init(fed.seed))
    for round in range(len(ALL)):
        torch_sgd(net, fed.visits(0, round), lr=FP64.lr)
    assert_close(fed.server["theta"], as_vector(net), 1e-9)


@both_executors
@each_side
@pytest.mark.parametrize("guess", ["matching", "line"])
def test_it_is_fedavg_until_the_window_is_full_and_first_differs_in_the_round_after(side, guess, executor):
    plain, pulled = (globals_of(m, executor=executor) for m in (FedAvg(), side(lam=1.0, guess=guess, **SMALL)))
    equal = [torch.equal(a, b) for a, b in zip(plain, pulled, strict=True)]
    assert equal == [True, True, True, False, False, False]  # w^1 to w^3, for a window of 2


@both_executors
@each_side
def test_fedptr_without_projection_steps_is_fedprox_from_the_same_model(side, executor):
    options = {**SMALL, "project_steps": 0, "regularizer": "fixed"}
    fed = run_method(side(lam=0.3, **options), None, None, None, executor=executor)
    twin = Federation(method=FedProx(mu=0.3), group_size=2, training=FP32, executor=executor)
    twin.server = twin.method.start(twin.task) | {"theta": fed.server["theta"]}
    twin.round = 3
    assert torch.equal(twin.run_rounds(None, None)["theta"], fed.run_rounds(None, None)["theta"])


def test_clients_with_identical_sets_are_the_server_side_method(monkeypatch):
    options = {"lam": 0.5, "outer_steps": 4, **{k: v for k, v in SMALL.items() if k != "outer_steps"}}
    by_clients, by_server = (Federation(method=side(**options), training=FP64) for side in (FedPTR, FedPTRServer))
    noise = by_server.method.start(by_server.task)["images"]
    monkeypatch.setattr(FedPTR, "initial_images", lambda self, clients, new: noise.repeat(len(new), 1, 1, 1, 1))
    for fed in (by_clients, by_server):
        fed.run_rounds(None, None, None)
    a, b = (fed.run_rounds(None, None, None)["theta"] for fed in (by_clients, by_server))

    assert_close(a, b, 1e-9)
    assert_close(client_states(by_clients, "images")[2], by_server.server["images"])


@both_executors
def test_observed_and_global_windows_coincide_under_full_participation(executor):
    a, b = (
        globals_of(FedPTR(lam=0.5, history=history, **SMALL), executor=executor) for history in ("observed", "global")
    )
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@both_executors
def test_a_client_matches_what_it_has_observed(executor):
    rounds = [[0, 1], [0, 2], [0, 1], [1, 2], [0, 1], [0, 1], [1, 3]]
    fed = Federation(method=FedPTR(lam=0.5, **SMALL), group_size=2, training=FP32, executor=executor)
    received: dict[int, list[Tensor]] = {c: [] for c in range(4)}
    joined: dict[int, int] = {}

    for ids in rounds:
        if not fed.server:
            fed.run_rounds()
        for client in ids:
            received[client].append(fed.server["theta"])
            joined.setdefault(client, fed.round)

        fed.run_rounds(ids)
        matched = sum(len(received[client]) >= 4 for client in ids)
        assert fed.cohorts[-1].logged.values.get("matching_failed", None) == (0 if matched else None)

        for client in ids:
            state = fed.state_of(client)
            expected = torch.stack(received[client][-2:])
            assert torch.equal(torch.from_numpy(state["past"])[-len(expected) :], expected)
            first = fed.method.initial_images(fed.clients([client], joined[client]), torch.tensor([0]))[0]
            assert np.array_equal(state["images"], first.numpy()) == (len(received[client]) < 4)


@each_side
@pytest.mark.parametrize(("every", "changes"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), (0, [1, 0, 0, 0])])
def test_matching_every_nth_round_keeps_the_set_in_between_and_still_projects(side, every, changes):
    fed = run_method(side(lam=0.5, every=every, **SMALL), None, None, None)
    sets = []
    for _ in changes:
        before = fed.server["theta"].clone()
        fed.run_rounds(None)
        sets.append(fed.server["images"] if side is FedPTRServer else client_states(fed, "images"))
        unpulled = Federation(method=FedAvg(), group_size=2, training=FP32)
        unpulled.server = unpulled.method.start(unpulled.task) | {"theta": before}
        unpulled.round = fed.round - 1
        assert not torch.equal(unpulled.run_rounds(None)["theta"], fed.server["theta"])

    moved = [True, *(not torch.equal(a, b) for a, b in itertools.pairwise(sets))]
    assert moved == [bool(change) for change in changes]


@both_executors
@pytest.mark.parametrize("initial", ["own", "noise"])
def test_initial_images_are_the_clients_own_samples_or_noise_for_missing_classes(initial, executor):
    method = FedPTR(**{**SMALL, "per_class": 2, "initial": initial})
    fed = Federation(method=method, training=FP64, executor=executor)
    fed.labels[fed.split[1]] = 2
    clients = fed.clients()
    images = method.initial_images(clients, torch.arange(4)).as_subclass(Tensor)

    assert images.shape == (4, 2 * CLASSES, 2, 4, 4)

    for client in range(4):
        x, y = fed.samples(client)
        for image, label in zip(images[client], method.labels(CLASSES, clients.device), strict=True):
            is_sample = any(torch.allclose(image, sample) for sample in x[y == label])
            assert is_sample == (initial == "own" and bool((y == label).any()))

    again = method.initial_images(fed.clients([3, 1]), torch.tensor([1])).as_subclass(Tensor)
    assert torch.equal(again[0], images[1])


def test_the_servers_initial_images_do_not_depend_on_data():
    one, other = (Federation(method=FedPTRServer(**SMALL), sizes=sizes) for sizes in ((7, 4, 11, 7), (5, 5, 5, 5)))
    a, b = (fed.method.start(fed.task)["images"] for fed in (one, other))
    assert torch.equal(a, b) and not torch.equal(a, FedPTRServer(**SMALL).start(replace(one.task, seed=9))["images"])


def test_the_projection_starts_at_the_global_model_and_changes_neither_it_nor_the_images():
    fed = run_method(FedPTRServer(lam=0.5, **SMALL), None, None, None)
    before = fed.server["theta"].clone()
    fed.run_rounds(None)
    images = fed.server["images"]
    method = fed.method
    walk = before.clone()

    for _ in range(method.project_steps):
        labels = method.labels(CLASSES, before.device)
        _, slope, _ = fed.model.gradient(lambda p: nn.functional.cross_entropy(fed.model(p, images), labels), walk)  # noqa: B023
        walk = walk - method.project_lr * slope

    path = StudentTrajectory(fed.model, labels, method.project_steps)
    kept_images = images.clone()
    projected = path(before[None], images[None], torch.tensor([method.project_lr]))[0]
    assert_close(projected, walk, 1e-6)
    assert torch.equal(images, kept_images)
    assert not torch.equal(projected, before)


MODEL = FlatModel(small_mlp, dtype=torch.float64)


@pytest.mark.parametrize(("regularizer", "norm"), [("adaptive", 0.3), ("differentiated", 0.15)])
def test_layers_are_pulled_by_the_same_force_whatever_their_distance(regularizer, norm):
    p = MODEL.init(0).requires_grad_()
    anchor = MODEL.init(1)
    with torch.no_grad():
        anchor = torch.where(MODEL.mask("1.bias"), p, anchor)
    value = pull_toward_anchor(MODEL, regularizer)(p, None, anchor, torch.tensor(0.3, dtype=p.dtype))
    (slope,) = torch.autograd.grad(value, p)

    for name, part in MODEL.unflatten(slope).items():
        direction = MODEL.segment((p - anchor).detach(), name)
        if name == "1.bias":
            assert not part.any()
        else:
            assert_close(part, norm * direction / direction.norm())

    offset = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
    if regularizer == "differentiated":
        offset = torch.where(MODEL.mask("1.bias"), 0.0, offset)  # where it has a kink
        values = [
            pull_toward_anchor(MODEL, regularizer)(p + e * offset, None, anchor, torch.tensor(0.3))
            for e in (1e-6, -1e-6)
        ]
        assert_close((values[0] - values[1]).detach() / 2e-6, slope @ offset, 1e-6)


def test_a_fixed_pull_is_proportional_to_the_distance():
    p = MODEL.init(0).requires_grad_()
    anchor = MODEL.init(1)
    (slope,) = torch.autograd.grad(pull_toward_anchor(MODEL, "fixed")(p, None, anchor, torch.tensor(0.3)), p)
    assert_close(slope, (0.3 * (p - anchor)).detach(), 1e-7)


@both_executors
def test_a_strong_fixed_pull_takes_clients_to_the_projected_model(executor):
    training = replace(FP64, lr=0.01, steps=50, batch_size=100)
    fed = Federation(method=FedPTRServer(lam=90.0, regularizer="fixed", **SMALL), training=training, executor=executor)
    fed.run_rounds(None, None, None)
    fed.run_rounds(None)
    labels = fed.method.labels(CLASSES, fed.model.device)
    path = StudentTrajectory(fed.model, labels, fed.method.project_steps)
    start = fed.server["past"][-2]
    aim = path(start[None], fed.server["images"][None], torch.full((1,), fed.method.project_lr, dtype=start.dtype))[0]

    assert (fed.server["theta"] - aim).norm() < 0.03
    assert (fed.server["theta"] - aim).norm() < 0.2 * (
        run_method(FedAvg(), *[None] * 4, training=training).server["theta"] - aim
    ).norm()


def test_only_the_server_side_and_a_global_window_send_an_extra_model_down():
    size = Federation().model.size
    for method, down in (
        (FedPTR(**SMALL), [1] * 5),
        (FedPTR(history="global", **SMALL), [1, 1, 1, 2, 2]),
        (FedPTRServer(**SMALL), [1, 1, 1, 2, 2]),
    ):
        fed = run_method(method, *[None] * 5)
        for round in range(5):
            sent = sent_per_client(fed.ledger, round)
            ups = sum(numbers for (direction, _), numbers in sent.items() if direction == "up")
            downs = sum(numbers for (direction, _), numbers in sent.items() if direction == "down")
            assert (downs, ups) == (down[round] * size, size)


@pytest.mark.parametrize("name", ["fedptr", "extra-images"])
def test_a_clients_images_are_sent_and_charged_only_if_pictures_are_enabled(name, tmp_path):
    method = {"name": name, "per_class": 2}
    quiet, shown = (
        raypfl.run(experiment(tmp_path, method=method | options, rounds=3, evaluation__every=0))
        for options in ({}, {"pictures": 2})
    )

    assert quiet.images.num_rows == 0 and set(quiet.ledger["name"].to_pylist()) == {"theta"}
    assert shown.images["round"].to_pylist() == [1, 3] and shown.weights_hash == quiet.weights_hash
    sent = [row for row in shown.ledger.to_pylist() if row["name"] == "pictures"]
    assert [(row["round"], row["direction"], row["clients"], row["numbers"]) for row in sent] == [
        (1, "up", 1, 10 * 2 * 64),
        (3, "up", 1, 10 * 2 * 64),
    ]


@both_executors
@each_side
def test_a_diverging_matching_is_counted_and_does_not_stop_the_run(side, executor):
    method = side(**{**SMALL, "image_lr": 1e30, "outer_steps": 4})
    fed = run_method(method, *[None] * 5, executor=executor)
    assert fed.server["theta"].isfinite().all()
    broken = side(**{**SMALL, "step_size": 1e30, "project_lr": 1e30})
    fed = run_method(broken, *[None] * 4, executor=executor)
    plain = globals_of(FedAvg(), [None] * 4, executor=executor)[-1]
    assert torch.equal(fed.server["theta"], plain)
    assert fed.cohorts[-1].logged.values["matching_failed"] >= 1


def test_the_line_extends_as_far_as_the_projection_steps_of_a_perfect_match():
    fed = run_method(FedPTRServer(lam=0.5, guess="line", **SMALL), None, None, None)
    past = fed.server["past"]
    theta = fed.server["theta"]
    fed.run_rounds(None)
    aim = theta + 5 / 3 * (theta - past[0])
    pulled = Federation(method=FedAvg(), group_size=2, training=FP32)
    clients = pulled.clients(round=3)
    by_server = clients.sgd(
        clients.loss, theta, penalty=pull_toward_anchor(clients.model, "adaptive"), anchor=aim, strength=0.5
    )
    weights = torch.tensor(pulled.sizes, dtype=theta.dtype)

    assert_close(fed.server["theta"], (weights @ by_server.as_subclass(Tensor)) / weights.sum(), 1e-6)


def test_networks_with_batch_norm_statistics_are_refused():
    with pytest.raises(ConfigError, match="batch norm"):
        FedPTR().check(FlatModel(NormalisedConv))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "method.window is 0"),
        ({"every": -1}, "method.every is -1"),
        ({"per_class": 0}, "method.per_class"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    for name in ("fedptr", "fedptr-s"):
        with pytest.raises(ConfigError, match=message):
            raypfl.Experiment(method={"name": name, **options})


def test_it_learns_digits_logs_its_loss_and_shows_its_images(tmp_path):
    method = {"name": "fedptr", "per_class": 1, "outer_steps": 3, "inner_steps": 5, "image_lr": 100.0, "pictures": 2}
    settings = {"partition__clients": 6, "cohort__size": 6, "rounds": 8, "evaluation__every": 0}
    result = raypfl.run(experiment(tmp_path, method=method, **settings))
    logged = result.logged.to_pandas()
    losses = {name: logged[logged.name == name] for name in ("matching_loss_before", "matching_loss")}

    assert losses["matching_loss"]["round"].tolist() == [5, 6, 7, 8]
    assert (losses["matching_loss"].value.to_numpy() < losses["matching_loss_before"].value.to_numpy()).all()
    steps = logged[logged.name == "matching_step_size"].value
    assert (steps != FedPTR.step_size).all() and steps.between(0.005, 0.02).all()  # it is learned, far from its limits

    images = result.images.to_pandas()
    assert images["round"].tolist() == [1, 3, 5, 7, 8] and set(images["name"]) == {"auxiliary"}
    assert np.isfinite(result.rounds["loss"].to_numpy()).all()


class Compass(FedPTRServer):
    """FedAvg that logs how well projected moves and local moves point to where the global model goes."""

    lam: float = 0.0

    def round(self, server, cohort):
        aim = self.projected_model(server, cohort)
        theta = server["theta"]
        reply = cohort.run(self.each, theta=theta)
        server["theta"] = reply["theta"]
        self.remember_model(server)
        direction = reply["theta"] - theta
        cohort.log(local=nn.functional.cosine_similarity(reply["own"] - theta, direction[None]).mean())
        if aim is not None:
            cohort.log(projected=nn.functional.cosine_similarity(aim - theta, direction, dim=0))

    def each(self, clients, theta):
        trained = clients.sgd(clients.loss, theta)
        return {"theta": Mean(trained, clients.num_samples), "own": Each(trained)}


@pytest.mark.thorough
def test_the_projection_points_to_where_the_global_model_goes_better_than_clients_do(tmp_path):
    method = {"name": "tests.methods.test_fedptr:Compass", "per_class": 1, "outer_steps": 5, "image_lr": 100.0}
    changes = {"partition": "{name: dirichlet, clients: 10, alpha: 0.01}", "cohort__size": 10, "rounds": 16}
    changes |= {
        "evaluation__every": 0,
        "engine__backend": "inline",
        "training": "{batch_size: 50, lr: 0.05, momentum: 0.5}",
    }
    logged = raypfl.run(experiment(tmp_path, method=method, **changes)).logged.to_pandas()
    projected, local = (logged[(logged.name == name) & (logged["round"] > 4)].value for name in ("projected", "local"))

    assert len(projected) == len(local) == 12
    assert projected.mean() > local.mean() + 0.05, (projected.mean(), local.mean())
