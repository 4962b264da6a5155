"""Which trainings of two runs can be joined: those with the same loss, and with kernels that keep the bits of rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raypfl.clients.clients import Clients
from raypfl.clients.steps.local_training import prepare_training
from raypfl.common.messages import per_client
from raypfl.learning.augmentation import AUGMENTATIONS
from raypfl.learning.executor import GroupTraining
from raypfl.learning.loss import LocalLoss
from raypfl.learning.packing.alike import Likeness
from raypfl.learning.packing.packer import Packed, Packer, keep_bits
from raypfl.learning.packing.rounding import Calls, OperationCall, Shape, rounds_alike
from raypfl.learning.packing.trainings import are_alike, joined
from raypfl.learning.vectorised import Vectorised
from raypfl.models.row_number import RowNumber
from tests.support.federation import Federation, NormalisedConv, assert_close, dropping_mlp, small_mlp, starts_of


def training_of(fed: Federation, loss=None, penalty=None, **extras) -> GroupTraining:
    group = fed.group()
    order, keys, _, _ = prepare_training(group, None, None, None, "")
    local_loss = LocalLoss(fed.model, loss or group.loss, penalty)
    return GroupTraining(local_loss, starts_of(fed), group.samples("train"), order, group.update(), keys, extras)


def pull(strength: float):
    return lambda p, batch, anchor: strength / 2 * (p - anchor).square().sum()


@pytest.mark.parametrize("factory", [small_mlp, NormalisedConv, dropping_mlp])
def test_joined_clients_get_the_models_that_they_get_apart(factory: Callable[[], nn.Module]):
    feds = [Federation(factory, seed=seed, sizes=sizes) for seed, sizes in ((3, (7, 4, 11)), (4, (12, 5)))]
    trainings = []
    for fed in feds:
        anchor = torch.full_like(fed.model.init(fed.seed), fed.seed)
        weight = per_client(torch.arange(len(fed.sizes), dtype=torch.float64))
        penalty = lambda p, batch, anchor, weight: weight * pull(0.01)(p, batch, anchor)  # noqa: E731
        trainings.append(training_of(fed, penalty=penalty, anchor=anchor, weight=weight))
    assert are_alike(trainings[1], trainings[0], Likeness())

    models, losses = feds[0].context.executor.sgd(joined(trainings))
    counts = [len(training) for training in trainings]
    for fed, training, *trained in zip(feds, trainings, models.split(counts), losses.split(counts), strict=True):
        for together, alone in zip(trained, fed.context.executor.sgd(training), strict=True):
            assert_close(together, alone)


def test_augmented_samples_join_only_if_black_is_the_same_number():
    a, b = (Federation(seed=seed, augmentation=[AUGMENTATIONS.get("flip")()]) for seed in (3, 4))
    assert are_alike(training_of(a), training_of(b), Likeness())
    b.all_samples.offset.add_(1)
    assert not are_alike(training_of(a), training_of(b), Likeness())


def by_network(clients: Clients):
    return lambda p, batch: clients.objective.loss(clients.model(p, batch.x), batch)


def by_round(clients: Clients):
    return lambda p, batch: clients.loss(p, batch) * clients.round


def by_function(clients: Clients):
    return lambda p, batch: _norm(clients, p)


def _norm(clients: Clients, p: Tensor) -> Tensor:
    return p.norm() * len(clients.ids)


def by_template(clients: Clients):
    return lambda p, batch: (p - torch.cat([q.flatten() for q in clients.model.module.parameters()])).norm()


def by_number(clients: Clients, number: float = 0.5):
    return lambda p, batch: number * clients.loss(p, batch)


def by_seed(clients: Clients):
    return by_number(clients, clients.seed)


def by_tensor(clients: Clients):
    weights = torch.ones(clients.num_classes)
    return lambda p, batch: clients.loss(p, batch) * weights.sum()


def by_own_tensor(clients: Clients):
    weights = clients.initial.clone()
    return lambda p, batch: clients.loss(p, batch) * weights.sum()


def by_default(clients: Clients):
    return lambda p, batch, seed=clients.seed: clients.loss(p, batch) * seed


def by_unknown(clients: Clients):
    table = {clients.seed: object()}
    return lambda p, batch: clients.loss(p, batch) * len(table)


@pytest.mark.parametrize("loss", [lambda clients: clients.loss, by_network, by_number, by_tensor])
def test_losses_are_alike_if_they_hold_only_what_runs_share(loss):
    a, b = (training_of(fed, loss(fed.clients())) for fed in (Federation(seed=3), Federation(seed=4)))
    assert are_alike(a, b, Likeness())


@pytest.mark.parametrize("loss", [by_round, by_function, by_template, by_seed, by_own_tensor, by_default, by_unknown])
def test_losses_are_not_alike_if_they_may_hold_what_is_a_runs_own(loss):
    a, b = (training_of(fed, loss(fed.clients())) for fed in (Federation(seed=3), Federation(seed=4)))
    assert not are_alike(a, b, Likeness())


def test_losses_of_other_code_networks_or_extras_are_not_alike():
    a = Federation(seed=3)
    wider = Federation(partial(nn.Sequential, nn.Flatten(), nn.Linear(32, 9), nn.ReLU(), nn.Linear(9, 3)), seed=4)
    likeness = Likeness()
    plain = training_of(a)
    assert not are_alike(plain, training_of(wider), likeness)
    assert not are_alike(plain, training_of(Federation(seed=4), by_network(a.clients())), likeness)

    anchor = a.model.init(0)
    pulled = training_of(a, penalty=pull(0.1), anchor=anchor)
    assert are_alike(pulled, training_of(a, penalty=pull(0.1), anchor=anchor + 1), likeness)
    assert are_alike(pulled, training_of(a, penalty=pull(0.2), anchor=anchor), likeness)
    assert not are_alike(pulled, training_of(a, penalty=pull(1), anchor=anchor), likeness)
    assert not are_alike(pulled, training_of(a, penalty=pull(0.1), anchor=per_client(anchor.repeat(4, 1))), likeness)


def shrink(strength: float):
    return lambda p, batch, anchor: p.norm() / (1 - strength) - 0.3 * (strength + 1) / (p.square().sum() + strength)


def switched(strength: float):
    return lambda p, batch, anchor: pull(0.1)(p, batch, anchor) if strength > 0.5 else p.sum()


@pytest.mark.parametrize(("penalty", "has_rows"), [(pull, True), (shrink, True), (switched, False)])
def test_numbers_of_a_penalty_have_rows_with_the_bits_of_lone_trainings_if_it_only_computes_with_them(
    penalty, has_rows
):
    fed = Federation(seed=3, sizes=(7, 4, 11, 7))
    anchor = fed.model.init(0)
    trainings = [training_of(fed, penalty=penalty(strength), anchor=anchor) for strength in (0.1, 1 / 3, 0.7)]
    executor = fed.context.executor
    if not has_rows:
        with pytest.raises(TypeError):
            executor.sgd(joined(trainings))
        return

    models, _ = executor.sgd(joined(trainings))
    for training, together in zip(trainings, models.split(4), strict=True):
        assert torch.equal(together, executor.sgd(training)[0])


def test_a_number_that_all_runs_have_is_tried_with_each_value():
    fed = Federation(seed=3)
    packer = Packer(2)
    executor = Packed(fed.context.executor, packer, 0)

    def kind_of(*strengths: float):
        anchor = fed.model.init(0)
        return packer._kind_of(
            [(executor, training_of(fed, penalty=pull(number), anchor=anchor)) for number in strengths]
        )

    assert kind_of(0.1, 0.1) is kind_of(0.1, 0.1)
    assert kind_of(0.2, 0.2) is not kind_of(0.1, 0.1), "it could take another branch"
    assert kind_of(0.1, 0.2) is kind_of(0.3, 0.5) and kind_of(0.1, 0.2) is not kind_of(0.1, 0.1)


@pytest.mark.parametrize("keeps_state", [False, True])
def test_trainings_are_joined_only_if_their_loss_has_no_state(keeps_state: bool):
    steps = []

    def counting(p, batch):
        steps.append(len(batch.y))
        return p.square().sum()

    fed = Federation(seed=3)
    packer = Packer(2)
    for run in range(2):
        training = training_of(fed, penalty=counting if keeps_state else None)
        packer._waiting[run] = (Packed(fed.context.executor, packer, run), training)
    packer._train_alike()
    is_joined = [outcome is not None for outcome in packer._outcomes.values()]
    assert is_joined == [not keeps_state] * 2 and not steps, "its steps would be counted in another order than alone"


def test_a_number_by_row_computes_as_a_float():
    numbers = torch.rand(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = torch.linspace(-3, 3, 11)
    for function in (
        lambda v: v / 3 * x,
        lambda v: x * (1 - v) - v,
        lambda v: x / (v + v * 0.1),
        lambda v: -v / x + (v - 2) * x,
    ):
        together = torch.vmap(lambda v, function=function: function(RowNumber(v)))(numbers)
        assert torch.equal(together, torch.stack([function(float(v)) for v in numbers]))
    for function in (bool, float, abs, lambda v: v > 1, lambda v: v == 1, lambda v: v**2, lambda v: x.add(x, alpha=v)):
        with pytest.raises(TypeError):
            function(RowNumber(numbers))


class Rounding(Vectorised):
    """An executor whose results depend on a row's place, as kernels' may: ``error(K) -> Tensor[K]``."""

    def __init__(self, fed: Federation, error: Callable[[int], Tensor]):
        super().__init__(fed.model)
        self.error = error

    def sgd(self, training, observe=None):
        trained, losses = super().sgd(training, observe)
        return trained + self.error(len(training))[:, None] * 1e-9, losses


@pytest.mark.parametrize(
    ("error", "keeps_bits"),
    [
        (lambda rows: torch.zeros(rows), (True, True)),
        (lambda rows: torch.ones(rows) if rows == 1 else torch.zeros(rows), (True, False)),
        (lambda rows: torch.full((rows,), rows), (False, False)),
        # Every fourth row begins at a multiple of 16 bytes.
        (lambda rows: (torch.arange(rows) % 4 == 0).float(), (False, False)),
        # The numbers after the last full register.
        (lambda rows: (torch.arange(rows) * 10 // 16 == rows * 10 // 16).float(), (False, False)),
    ],
    ids=["exact", "other alone", "by the number", "by the place", "at the end"],
)
def test_a_trial_finds_out_whether_rows_keep_their_bits(error, keeps_bits):
    feds = [Federation(seed=seed, sizes=(7, 4, 11, 7)) for seed in (3, 4)]
    assert keep_bits([(Rounding(fed, error), training_of(fed)) for fed in feds]) == keeps_bits


@pytest.mark.parametrize("function", [torch.sigmoid, torch.expm1, torch.tanh, torch.relu, torch.sqrt])
def test_trainings_are_joined_only_if_no_operation_rounds_the_last_numbers_of_a_tensor_otherwise(function):
    fed = Federation(seed=3, sizes=(7, 4, 11, 7))
    trainings = [training_of(fed, lambda p, batch: batch.mean(function(fed.model(p, batch.x)).sum(-1)))] * 2
    numbers = torch.rand(2**16, generator=torch.Generator().manual_seed(0))
    # Of numbers with gaps between them, PyTorch takes each as it takes the last ones of a tensor.
    is_same_everywhere = torch.equal(function(numbers), function(torch.stack([numbers, numbers], 1)[:, 0]))
    assert keep_bits([(fed.context.executor, training) for training in trainings])[0] == is_same_everywhere


@pytest.mark.parametrize("length", [5, 610])
def test_a_client_is_left_alone_if_a_product_of_its_vectors_is_added_up_in_another_order(length):
    a, b = torch.randn(2, 1000, length, generator=torch.Generator().manual_seed(0))
    whole = torch.bmm(a[:, None], b[:, :, None])
    alone = [torch.bmm(a[k : k + 1, None], b[k : k + 1, :, None]) for k in range(len(a))]
    call = OperationCall(
        torch.ops.aten.bmm.default, [Shape.of(a[:, None]), Shape.of(b[:, :, None])], {}, len(a), a.dtype
    )
    assert rounds_alike([call], len(a), a.dtype) == (True, torch.equal(whole, torch.cat(alone)))


@pytest.mark.parametrize("size", [4, 3])
def test_a_client_is_left_alone_if_its_convolutions_are_added_up_in_another_order(size):
    rows, generator = 6, torch.Generator().manual_seed(0)
    x = torch.randn(10, rows, 8, 8, generator=generator)
    weight = torch.randn(12 * rows, 1, size, size, generator=generator)
    bias = torch.randn(12 * rows, generator=generator)
    options = [[1, 1], [0, 0], [1, 1], False, [0, 0]]

    with Calls() as noted:
        whole = torch.ops.aten.convolution(x, weight, bias, *options, rows)
    alone = [torch.ops.aten.convolution(x[:, :1].contiguous(), weight[:12], bias[:12], *options, 1)]
    among_few, single = rounds_alike(noted.calls.values(), rows, x.dtype)
    assert len(noted.calls) == 1 and (not single or torch.equal(whole[:, :12], alone[0]))
    assert among_few or not single


def differs_by_place(function: Callable[[int, int], Tensor], clients: int) -> bool:
    """Whether what some clients get, ``function(start, count)``, depends on where the first of them is in memory."""
    whole = function(0, clients)
    rows = len(whole) // clients
    return any(
        not torch.equal(function(start, 3), whole[start * rows : (start + 3) * rows]) for start in range(clients - 2)
    )


@pytest.mark.parametrize("features", [5, 8, 9])
def test_trainings_are_not_joined_if_a_product_depends_on_the_places_of_its_matrices(features):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(50, 10, 16, generator=generator)
    b = torch.randn(50, 16, features, generator=generator)
    call = OperationCall(torch.ops.aten.bmm.default, [Shape.of(a[:2]), Shape.of(b[:2])], {}, 20 * features, a.dtype)
    is_moved = differs_by_place(lambda k, n: torch.bmm(a[k : k + n].clone(), b[k : k + n].clone()), 50)
    assert rounds_alike([call], 2, a.dtype)[0] == (not is_moved)


@pytest.mark.parametrize("features", [8, 12])
def test_trainings_are_not_joined_if_all_clients_samples_meet_one_matrix_and_their_places_count(features):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, generator=generator)
    weight = torch.randn(features, 2, generator=generator)
    with Calls() as noted:
        x[:2] @ weight.T
    is_moved = differs_by_place(lambda k, n: x[k : k + n].clone() @ weight.T, 50)
    assert rounds_alike(noted.calls.values(), 2, x.dtype)[0] == (not is_moved)


def test_trainings_are_not_joined_if_an_operation_adds_up_all_clients_samples():
    gradient, x = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0))
    with Calls() as noted:
        gradient.T @ x
    assert not rounds_alike(noted.calls.values(), 3, x.dtype)[0]
