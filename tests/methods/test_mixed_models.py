"""Methods that mix clients' models with chosen others follow their papers, and equal others in limiting cases."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import raypfl
from raypfl.common.errors import ConfigError
from raypfl.methods import APPLE, MTL, FedAMP, FedAvg, FedFomo, FedPAC, FedRep, HeurFedAMP, Local, PFedGraph
from raypfl.methods.simplex import least_quadratic, on_simplex
from tests.support.by_hand import descend
from tests.support.federation import (
    FP64,
    ONE_STEP,
    ROUNDS,
    Federation,
    NormalisedConv,
    as_module,
    assert_close,
    both_executors,
    client_states,
    gradient,
    run_method,
    sent_per_client,
)
from tests.support.runs import experiment

ALL = [0, 1, 2, 3]
LR = 0.1


def start_of(fed: Federation) -> Tensor:
    return fed.model.init(fed.seed)


@both_executors
def test_fedamp_without_pull_is_training_alone_to_the_bit(executor):
    methods = (Local(), FedAMP(lam=0.0))
    alone, amp = (run_method(m, factory=NormalisedConv, executor=executor) for m in methods)
    assert torch.equal(client_states(amp), client_states(alone))


@pytest.mark.parametrize(
    "method", [FedAMP(sigma=1e12, lam=0.2 * 1e12 / 4), HeurFedAMP(sigma=0.0, lam=0.2)], ids=["fedamp", "heurfedamp"]
)
def test_fedamp_with_equal_weights_is_mtl_if_all_clients_take_part(method):
    mtl, amp = (run_method(m, ALL, ALL, ALL, factory=NormalisedConv, training=FP64) for m in (MTL(lam=0.2), method))
    assert_close(client_states(amp), client_states(mtl), 1e-11)


@both_executors
@pytest.mark.parametrize("heuristic", [False, True])
@pytest.mark.parametrize("mixed", ["all", "last cohort"])
def test_four_rounds_of_fedamp_by_hand(mixed, heuristic, executor):
    sigma = 0.5
    lam = 0.3
    method = FedAMP(sigma=sigma, alpha=0.1, lam=lam, mixed=mixed)
    if heuristic:
        method = HeurFedAMP(sigma=sigma, alpha=0.1, lam=lam, mixed=mixed, own_weight=0.4)
    fed = run_method(method, executor=executor, training=replace(ONE_STEP, lr=LR))
    w = [start_of(fed)] * 4
    last = set()

    for cohort in ROUNDS:
        trained = list(w)
        for i in cohort:
            others = sorted(last - {i})
            if heuristic:
                raw = {j: math.exp(sigma * torch.cosine_similarity(w[i], w[j], dim=0)) for j in others}
                xi = {j: 0.6 * raw[j] / sum(raw.values()) for j in others}
            else:
                xi = {j: 0.1 / sigma * math.exp(-float((w[i] - w[j]).square().sum()) / sigma) for j in others}
            u = (1 - sum(xi.values())) * w[i] + sum(xi[j] * w[j] for j in others)
            trained[i] = w[i] - LR * (gradient(fed, w[i], i) + lam / 0.1 * (w[i] - u))
        w = trained
        last = set(cohort) if mixed == "last cohort" else last | set(cohort)

    assert_close(fed.server["models"], torch.stack(w))
    assert_close(client_states(fed), torch.stack(w))
    assert sent_per_client(fed.ledger, 1) == {("down", "target"): len(w[0]), ("up", "model"): len(w[0])}


def test_fedamp_refuses_negative_weights():
    with pytest.raises(ConfigError, match=r"Lower method.alpha to sigma / 3 = 0.333 or less"):
        run_method(FedAMP(sigma=1.0, alpha=0.34))
    run_method(FedAMP(sigma=1.0, alpha=0.33), ALL)


def with_validation(method: FedFomo, **options) -> Federation:
    """Return a federation in which a client's first three samples are for validation too."""
    fed = Federation(method=method, group_size=2, **options)
    fed.context.split = lambda client, name: fed.split[client][: 3 if name == "val" else None]
    return fed


@both_executors
def test_fedfomo_without_models_or_with_a_useless_one_is_training_alone_to_the_bit(executor):
    alone = run_method(Local(), executor=executor)
    fed = with_validation(FedFomo(models=0, fallback="own"), executor=executor, training=alone.training)
    fed.run_rounds(*ROUNDS)
    assert torch.equal(client_states(fed), client_states(alone))
    assert sent_per_client(fed.ledger, 3) == {("up", "model"): fed.model.size}


@both_executors
@pytest.mark.parametrize(("norm", "fallback"), [("l2", "start"), ("l1", "own")])
def test_four_rounds_of_fedfomo_by_hand(norm, fallback, executor):
    method = FedFomo(models=2, epsilon=0.0, norm=norm, fallback=fallback)
    fed = with_validation(method, executor=executor, training=replace(ONE_STEP, lr=LR))
    w = [start_of(fed)] * 4
    r = [start_of(fed)] * 4
    affinity = torch.eye(4, dtype=torch.float64)
    sent = set()

    def validation_loss(client: int, theta: Tensor) -> Tensor:
        x, y = fed.samples(client)
        return F.cross_entropy(as_module(fed.factory, theta)(x[:3]), y[:3]).detach()

    for cohort in [ALL, *ROUNDS]:
        # What the server may choose: the two of largest affinity, in any order among equals.
        fed.server = fed.server or method.start(fed.task)
        chosen = method._choose(fed.server, fed.cohort(cohort)).tolist()
        for i, models in zip(cohort, chosen, strict=True):
            assert len(set(models)) == len(models) == min(2, len(sent)) and set(models) <= sent
            best = sorted((float(affinity[i, j]) for j in sent), reverse=True)[:2]
            assert sorted((float(affinity[i, j]) for j in models), reverse=True) == pytest.approx(best, rel=1e-9)
        fed.run_rounds(cohort)

        trained = list(w)
        for i, models in zip(cohort, chosen, strict=True):
            a = {}
            for j in models:
                distance = torch.linalg.vector_norm(w[j] - r[i], ord=int(norm[1]))
                a[j] = float((validation_loss(i, r[i]) - validation_loss(i, w[j])) / distance) if distance else 0.0
                affinity[i, j] += a[j]
            total = sum(max(value, 0.0) for value in a.values())
            start = r[i] if fallback == "start" else w[i]
            if total:
                start = r[i] + sum(max(a[j], 0.0) / total * (w[j] - r[i]) for j in models)
            r[i] = start
            trained[i] = start - LR * gradient(fed, start, i)
        w = trained
        sent |= set(cohort)
        assert_close(fed.server["models"], torch.stack(w))

    assert_close(fed.server["affinity"], affinity)
    assert_close(client_states(fed, "start"), torch.stack(r))
    size = fed.model.size
    assert sent_per_client(fed.ledger, 1) == {
        ("down", "models"): 2 * size,
        ("up", "model"): size,
        ("up", "advantage"): 2,
    }


def test_fedfomo_draws_some_models_at_random():
    fed = with_validation(FedFomo(models=2, epsilon=1.0, epsilon_decay=0.5))
    fed.run_rounds(ALL)
    first = fed.method._choose(fed.server, fed.cohort(ALL))
    assert all(len(set(row)) == 2 for row in first.tolist())
    fed.round = 3  # the third round, without chance
    fed.server["affinity"] = torch.eye(4, dtype=torch.float64) + torch.eye(4, dtype=torch.float64).roll(1, 1) / 2
    assert fed.method._choose(fed.server, fed.cohort(ALL)).tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]


def test_fedfomo_is_refused_without_validation_samples(tmp_path):
    with pytest.raises(ConfigError, match=r"needs validation samples .* client 0 has none .* Set data.val_fraction"):
        raypfl.run(experiment(tmp_path, method="fedfomo", data__val_fraction=0))


@both_executors
def test_apple_of_one_client_with_fixed_weights_is_training_alone_to_the_bit(executor):
    options = {"sizes": (7,), "factory": NormalisedConv, "executor": executor}
    alone, apple = (run_method(m, [0], [0], **options) for m in (Local(), APPLE(p_lr=0.0)))
    assert torch.equal(apple.server["cores"], client_states(alone))


@both_executors
@pytest.mark.parametrize("schedule", ["exponential", "cosine"])
def test_three_rounds_of_apple_by_hand(schedule, executor):
    p_lr = 0.02
    mu = 0.3
    # Clients take one to three steps, of which the last is on fewer samples.
    training = replace(FP64, lr=LR)
    fed = Federation(
        method=APPLE(p_lr=p_lr, mu=mu, schedule=schedule, horizon=1.0), executor=executor, training=training
    )
    fed.round = 1
    rounds = fed.task.rounds
    shares = torch.tensor(fed.sizes, dtype=torch.float64) / sum(fed.sizes)
    cores = torch.stack([start_of(fed)] * 4)
    p = shares.repeat(4, 1)

    for number, cohort in enumerate(ROUNDS[:3], start=1):
        part = (number - 1) / rounds
        strength = 0.0
        if part < 1:
            strength = 0.001**part if schedule == "exponential" else (1 + math.cos(math.pi * part)) / 2
        assert fed.method.strength(number, rounds) == pytest.approx(strength)
        fed.run_rounds(cohort)

        new_cores = cores.clone()
        for i in cohort:
            v = cores.clone()
            for samples in fed.visits(i, number):
                g = gradient(fed, p[i] @ v, i, samples)
                slopes = v @ g + strength * mu * (p[i] - shares)
                v[i] = v[i] - LR * p[i, i] * g
                p[i] = p[i] - p_lr * slopes
            new_cores[i] = v[i]
        cores = new_cores
        assert_close(fed.server["cores"], cores)

    assert_close(client_states(fed, "weights"), p)
    clients = fed.clients(weights=client_states(fed, "weights"))
    assert_close(fed.method.personal_model(clients, fed.server), p @ cores)
    size = fed.model.size
    assert sent_per_client(fed.ledger, 1) == {
        ("down", "cores"): 3 * size,
        ("down", "shares"): 4,
        ("up", "core"): size,
    }


def test_pfedgraph_with_a_large_alpha_starts_clients_as_fedavg_does():
    fedavg, graph = (run_method(m, ALL, ALL, training=FP64) for m in (FedAvg(), PFedGraph(alpha=1e14, lam=0.0)))
    assert_close(graph.server["starts"], fedavg.server["theta"].repeat(4, 1), 1e-12)


def test_pfedgraph_with_a_small_alpha_is_training_alone():
    alone, graph = (run_method(m, ALL, ALL, training=FP64) for m in (Local(), PFedGraph(alpha=1e-6, lam=0.0)))
    assert_close(client_states(graph), client_states(alone), 1e-12)


@both_executors
@pytest.mark.parametrize("direction", ["closer", "apart"])
def test_four_rounds_of_pfedgraph_by_hand(direction, executor):
    alpha = 0.9
    lam = 0.4
    method = PFedGraph(alpha=alpha, lam=lam, direction=direction)
    fed = run_method(method, executor=executor, training=replace(ONE_STEP, lr=LR))
    initial = start_of(fed)
    starts = [initial] * 4
    targets = [torch.zeros_like(initial)] * 4
    w = [initial] * 4

    for cohort in ROUNDS:
        for i in cohort:
            norm = starts[i].norm()
            along = targets[i] / norm - (targets[i] @ starts[i]) / norm**3 * starts[i]  # the gradient of the cosine
            sign = -1 if direction == "closer" else 1
            w[i] = starts[i] - LR * (gradient(fed, starts[i], i) + sign * lam * along)
        p = torch.tensor([fed.sizes[i] for i in cohort], dtype=torch.float64)
        for i in cohort:
            d = torch.stack([-torch.cosine_similarity(w[i] - initial, w[j] - initial, dim=0) for j in cohort])
            form = alpha * torch.eye(len(cohort), dtype=torch.float64)
            a = least_by_supports(form, d - 2 * alpha * p / p.sum())
            starts[i] = sum(share * w[j] for share, j in zip(a, cohort, strict=True))
            targets[i] = sum(share * w[j] / w[j].norm() for share, j in zip(a, cohort, strict=True))

    assert_close(fed.server["starts"], torch.stack(starts))
    assert_close(client_states(fed), torch.stack(w))
    size = fed.model.size
    assert sent_per_client(fed.ledger, 1) == {
        ("down", "start"): size,
        ("down", "target"): size,
        ("up", "model"): size,
    }


def least_by_supports(form: Tensor, slope: Tensor) -> Tensor:
    """The a on the simplex with the least ``a Q a + slope a``, tried on every support."""
    count = len(form)
    best = (math.inf, form[0])
    for size in range(1, count + 1):
        for support in map(list, combinations(range(count), size)):
            # Lagrange: 2 Q a - shift = -slope, sum a = 1.
            system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
            system[:size, :size] = 2 * form[support][:, support]
            system[:size, size] = -1
            system[size, :size] = 1
            right = torch.cat([-slope[support], torch.ones(1, dtype=torch.float64)])
            a = torch.zeros(count, dtype=torch.float64)
            a[support] = torch.linalg.solve(system, right)[:size]
            value = float(a @ form @ a + slope @ a)
            if (a >= 0).all() and value < best[0]:
                best = (value, a)
    return best[1]


def test_quadratic_problems_on_the_simplex_are_solved_exactly():
    draws = torch.Generator().manual_seed(1)
    for count in (1, 2, 5, 7):
        rows = torch.randn(count, 3, generator=draws, dtype=torch.float64)
        form = torch.diag(torch.rand(count, generator=draws, dtype=torch.float64)) + rows @ rows.T
        assert_close(least_quadratic(form), least_by_supports(form, torch.zeros(count, dtype=torch.float64)), 1e-9)
        nearest = least_by_supports(torch.eye(count, dtype=torch.float64), -2 * rows[:, 0])
        assert_close(on_simplex(rows[:, 0]), nearest, 1e-12)

    variance = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert_close(least_quadratic(torch.diag(variance)), torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64) / 7)
    assert_close(least_quadratic(torch.zeros(4, 4)), torch.full((4,), 0.25))
    free = torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    assert_close(least_quadratic(free), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), 1e-9)


class OwnHeads(FedPAC):
    """FedPAC whose clients keep their own output layers."""

    def weights(self, shares: Tensor, variance: Tensor) -> Tensor:
        return torch.eye(len(shares), dtype=shares.dtype)


@both_executors
def test_fedpac_without_alignment_and_collaboration_is_fedrep_to_the_bit(executor):
    options = {"factory": NormalisedConv, "executor": executor}
    rep = run_method(FedRep(personal_epochs=1), **options)
    pac = run_method(OwnHeads(lam=0.0, head_lr=None), **options)
    assert torch.equal(pac.server["heads"], client_states(rep))
    assert torch.equal(pac.server["body"], rep.server["theta"][~rep.model.mask("output layer")])


@both_executors
def test_four_rounds_of_fedpac_by_hand(executor):
    lam = 0.8
    head_lr = 0.3
    fed = run_method(FedPAC(lam=lam, head_lr=head_lr), executor=executor, training=replace(ONE_STEP, lr=LR))
    net = as_module(fed.factory, start_of(fed))
    body = list(net[1].parameters())
    head = list(net[3].parameters())
    heads = [[p.detach().clone() for p in head] for _ in ALL]
    shared = [p.detach().clone() for p in body]
    prototypes = torch.zeros(3, 5, dtype=torch.float64)

    def fill(tensors: list[Tensor], values: list[Tensor]) -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)

    def class_means(x: Tensor, y: Tensor) -> Tensor:
        z = net[:3](x).detach()
        return torch.stack([z[y == c].mean(0) if (y == c).any() else z.new_zeros(5) for c in range(3)])

    for number, cohort in enumerate(ROUNDS):
        known = prototypes.any(1)
        bodies, trained, h, v = [], {}, {}, {}
        sums = torch.zeros_like(prototypes)
        counts = torch.zeros(3, 1, dtype=torch.float64)
        for i in cohort:
            x, y = fed.samples(i)
            fill(body, shared), fill(head, heads[i])
            client_means = class_means(x, y)
            q = torch.bincount(y, minlength=3).double() / len(y)
            z = net[:3](x).detach()
            h[i] = (q[:, None] * client_means).flatten()
            v[i] = (z.square().sum(1).mean() - h[i].square().sum()) / len(y)

            descend(F.cross_entropy(net(x), y), head, head_lr)
            target = torch.where(known[:, None], prototypes, client_means)[y]
            pull = (net[:3](x) - target).square().mean() if number else 0
            descend(F.cross_entropy(net(x), y) + lam * pull, body, LR)

            bodies.append((len(y), [p.detach().clone() for p in body]))
            trained[i] = [p.detach().clone() for p in head]
            n = len(y) * q[:, None]
            sums += n * class_means(x, y)
            counts += n

        total = sum(n for n, _ in bodies)
        shared = [sum(n / total * tensors[k] for n, tensors in bodies) for k in range(2)]
        prototypes = torch.where(counts > 0, sums / counts.clamp_min(1), prototypes)
        for i in cohort:
            differences = torch.stack([h[i] - h[j] for j in cohort])
            form = torch.diag(torch.stack([v[j] for j in cohort])) + differences @ differences.T
            a = least_by_supports(form, torch.zeros(len(cohort), dtype=torch.float64))
            a = torch.where(a > 1e-3, a, 0.0)
            a = a / a.sum()
            heads[i] = [sum(w * trained[j][k] for w, j in zip(a, cohort, strict=True)) for k in range(2)]

    assert_close(fed.server["body"], torch.cat([p.flatten() for p in shared]), 1e-9)
    assert_close(fed.server["means"], prototypes, 1e-9)
    assert_close(
        fed.server["heads"], torch.stack([torch.cat([p.flatten() for p in tensors]) for tensors in heads]), 1e-9
    )
    models = fed.method.personal_model(fed.clients(), fed.server)
    assert_close(models[:, fed.model.mask("output layer")], fed.server["heads"])
    sent = sent_per_client(fed.ledger, 0)
    assert sent["down", "body"] + sent["down", "head"] == fed.model.size == sent["up", "body"] + sent["up", "head"]
    assert sent["down", "means"] == 15 and sent["up", "variance"] == 1


def test_fedpac_sends_nothing_for_classes_that_a_client_lacks():
    fed = Federation(method=FedPAC(), training=FP64)
    fed.labels[fed.split[1]] = 2
    fed.run_rounds([1])
    sent = sent_per_client(fed.ledger, 0)
    assert (sent["up", "means"], sent["up", "counts"], sent["up", "shares"]) == (5, 1, 5)
    assert torch.isfinite(fed.server["heads"]).all()
