"""Floco follows its paper, and its points are where its projections say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from raypfl.common.errors import ConfigError
from raypfl.federation.settings import FailureSettings
from raypfl.methods import FedAvg, Floco, FlocoPlus
from raypfl.methods.partial_models.floco import principal_components, spread_points
from raypfl.methods.simplex import on_simplex
from tests.support.by_hand import MLP, assert_parts_close, descend, leaves, mean_by_samples
from tests.support.federation import (
    CLASSES,
    FP64,
    ROUNDS,
    Federation,
    assert_close,
    both_executors,
    client_states,
    run_method,
    sent_per_client,
)


@both_executors
def test_rounds_of_floco_by_hand(executor):
    M = 3
    rho = 0.4
    cohorts = ([0, 1, 2, 3], [1, 2], [0, 2])
    options = {"endpoints": M, "subspace_round": 1, "radius": rho}
    fed, plus = (
        run_method(method, *cohorts, executor=executor, training=FP64)
        for method in (Floco(**options), FlocoPlus(lam=0.7, **options))
    )
    start = fed.model.unflatten(fed.model.init(fed.seed))
    shared = [start[name] for name in MLP]
    personal = [shared] * 4
    mixtures = None

    def trained(client, round, start, lam=0.0):
        w1, b1, endpoints, bias = parameters = leaves(start)
        (generator,) = fed.clients([client], round).generators("mixtures")
        for x, y in fed.visits(client, round):
            u, *draws = torch.rand(M + 1, generator=generator, dtype=torch.float64)
            draws = torch.stack(draws)
            if mixtures is None:
                a = -draws.log() / -draws.log().sum()
            else:
                direction = 2 * draws - 1
                a = mixtures[client] + rho * u * direction / direction.abs().sum()
            z = (x.flatten(1) @ w1.T + b1).tanh()
            weight = sum(a[m] * endpoints[m] for m in range(M))
            pull = sum((p - received).square().sum() for p, received in zip(parameters, shared, strict=True))
            descend(F.cross_entropy(z @ weight.T + bias, y) + lam / 2 * pull, parameters)
        return [p.detach() for p in parameters]

    for round, ids in enumerate(cohorts):
        for client in ids:
            personal[client] = trained(client, round, personal[client], lam=0.7)
        models = {client: trained(client, round, shared) for client in ids}
        shared = [mean_by_samples(fed, {c: models[c][i] for c in ids}, ids) for i in range(4)]
        if round == 1:
            updates = torch.stack([(trained(client, round, shared)[2] - shared[2]).flatten() for client in range(4)])
            mixtures = spread_points(principal_components(updates, M))

    assert_parts_close(fed, fed.server["theta"], dict(zip(MLP, shared, strict=True)))
    assert_close(fed.server["mixtures"], mixtures)
    rows = fed.method.personal_model(fed.clients([3]), fed.server)
    assert_parts_close(fed, rows.as_subclass(torch.Tensor)[0], {"3.mixture": mixtures[3]})
    assert not fed.warnings

    # Floco+ has the same global model and messages, and personal simplices.
    assert torch.equal(plus.server["theta"], fed.server["theta"])
    assert plus.ledger.entries == fed.ledger.entries
    states = client_states(plus)
    rows = plus.method.personal_model(plus.clients(personal=states), plus.server).as_subclass(torch.Tensor)
    for client, row in enumerate(rows):
        expected = dict(zip(MLP, personal[client], strict=True))
        assert_parts_close(plus, row, expected | {"3.mixture": mixtures[client]})

    # The body, M weights of the output layer and a bias; then a mixture down.
    numbers = 165 + M * CLASSES * 5 + CLASSES
    assert sent_per_client(fed.ledger, 0) == {("down", "sent"): numbers, ("up", "theta"): numbers}
    assert sent_per_client(fed.ledger, 1)["up", "update"] == M * CLASSES * 5
    assert sent_per_client(fed.ledger, 2)["down", "mixture"] == M


class WithoutTheThird(Floco):
    """Floco in which client 2 fails where the endpoints of all clients are asked for."""

    def train_endpoints(self, clients, sent):
        if 2 in clients.ids:
            raise RuntimeError("out of power")
        return super().train_endpoints(clients, sent)


def test_a_skipped_client_stays_at_the_centre_and_moves_no_others_mixture():
    options = {"endpoints": 3, "subspace_round": 1}
    failures = FailureSettings(on_client_failure="skip", retries=0)
    fed = run_method(WithoutTheThird(**options), [0, 1, 3], [0, 1, 3], training=FP64, failures=failures)
    assert list(fed.cohorts[-1].failed) == [2]

    clients = fed.clients([0, 1, 3], 1)
    updates = fed.method.train_endpoints(clients, fed.server["theta"][~fed.model.mask("3.mixture")])["update"].rows
    mixtures_without_it = spread_points(principal_components(updates.as_subclass(torch.Tensor), 3))
    assert_close(fed.server["mixtures"][[0, 1, 3]], mixtures_without_it)
    assert_close(fed.server["mixtures"][2], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_points_of_the_simplex_are_spread():
    rows = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    # The best size is no worse than any other.
    def energy(points):
        return sum(1 / (points[i] - points[j]).square().sum() for i in range(6) for j in range(i))

    spread = spread_points(rows)
    assert_close(spread.sum(1), torch.ones(6, dtype=torch.float64))
    assert energy(spread) <= min(energy(on_simplex(rows / size)) for size in (1.0, 0.5, 0.3))


def test_principal_components_keep_distances_and_pad_with_zeros():
    rows = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    coordinates = principal_components(rows, 6)
    assert_close(torch.cdist(coordinates, coordinates), torch.cdist(rows, rows), 1e-8)
    assert not coordinates[:, 4:].any()
    assert_close(principal_components(rows.flip(0), 6).flip(0), coordinates, 1e-8)


def test_a_client_before_the_mixtures_is_at_the_centre():
    fed = run_method(Floco(endpoints=4), [0, 1])
    rows = fed.method.personal_model(fed.clients([2]), fed.server)
    assert torch.equal(rows.as_subclass(torch.Tensor)[0], fed.server["theta"])


def test_floco_with_one_endpoint_is_fedavg_with_that_output_layer():
    floco = run_method(Floco(endpoints=1, subspace_round=1, radius=0.0), training=FP64)
    start = floco.model.unflatten(floco.model.init(floco.seed))

    fedavg = Federation(method=FedAvg(), training=FP64, group_size=2)
    fedavg.server = {"theta": torch.cat([start[name].flatten() for name in MLP]), "moments": {}}
    fedavg.run_rounds(*ROUNDS)

    sent = ~floco.model.mask("3.mixture")
    assert_close(floco.server["theta"][sent], fedavg.server["theta"], 1e-13)
    assert torch.equal(floco.server["mixtures"], torch.ones(4, 1, dtype=torch.float64))


def test_without_a_radius_clients_train_at_their_own_mixtures():
    method = Floco(endpoints=3, radius=0.0)
    mixture = torch.tensor([[0.2, 0.5, 0.3]])
    assert torch.equal(method._mixtures(torch.rand(1, 4), mixture), mixture)


def test_a_subspace_round_after_the_last_is_refused():
    with pytest.raises(ConfigError, match=r"method.subspace_round is 11, but the run has 10 rounds"):
        run_method(Floco(subspace_round=11))
