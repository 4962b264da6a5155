"""Clients visit their own samples, each in its own order."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypfl.common import rng
from raypfl.learning.augmentation import Crop, Cutout, Flip
from raypfl.learning.batches import GroupSamples, Samples
from raypfl.learning.objectives.batch import Batch
from raypfl.learning.sample_order import SampleOrder, epoch_order
from tests.support.federation import MEAN, STD, Federation

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def keys_for(count: int, seed: int = 0) -> np.ndarray:
    return np.array([rng.key(seed, "batches", 0, client) for client in range(count)], dtype=np.uint64)


def visited(visits: SampleOrder, k: int) -> list[list[int]]:
    """Return a client's batches without padding; assert that padding comes last."""
    batches = [index[:count].tolist() for index, count in zip(visits.index[k], visits.counts[k], strict=True)]
    steps = int(visits.steps[k])
    assert all(batches[:steps]) and not any(batches[steps:])
    return batches[:steps]


@given(sizes=SIZES, batch_size=st.integers(1, 12), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_epoch_visits_each_sample_once_and_only_its_last_batch_is_partial(sizes, batch_size, epochs, seed):
    visits = epoch_order(keys_for(len(sizes), seed), np.array(sizes), batch_size, epochs)
    for k, size in enumerate(sizes):
        batches = visited(visits, k)
        per_epoch = -(-size // batch_size)
        assert len(batches) == epochs * per_epoch
        for first in range(0, len(batches), per_epoch):
            epoch = batches[first : first + per_epoch]
            assert sorted(position for batch in epoch for position in batch) == list(range(size))
            assert [len(b) for b in epoch[:-1]] == [batch_size] * (per_epoch - 1)
            assert len(epoch[-1]) == size - batch_size * (per_epoch - 1)


@given(sizes=SIZES, batch_size=st.integers(1, 12), smallest=st.integers(1, 12), steps=st.sampled_from([None, 7]))
def test_a_last_batch_that_is_too_small_is_dropped_unless_it_is_the_only_batch(sizes, batch_size, smallest, steps):
    whole = epoch_order(keys_for(len(sizes)), np.array(sizes), batch_size, epochs=12)
    fewer = epoch_order(keys_for(len(sizes)), np.array(sizes), batch_size, 2, steps, smallest)
    for k, size in enumerate(sizes):
        expected = [
            batch for batch in visited(whole, k) if len(batch) >= min(smallest, batch_size) or size <= batch_size
        ]
        assert visited(fewer, k) == expected[: len(visited(fewer, k))]
        assert len(visited(fewer, k)) == (steps or 2 * len(expected) // 12)


@given(
    sizes=SIZES,
    batch_size=st.integers(1, 12),
    work=st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 7}]),
    data=st.data(),
)
def test_a_clients_batches_are_the_same_in_every_group(sizes, batch_size, work, data):
    keys = keys_for(len(sizes))
    group = data.draw(st.permutations(range(len(sizes)))), data.draw(st.integers(1, len(sizes)))
    members = np.array(group[0][: group[1]])
    together = epoch_order(keys, np.array(sizes), batch_size, **work)
    apart = epoch_order(keys[members], np.array(sizes)[members], batch_size, **work)
    for k, client in enumerate(members):
        assert visited(apart, k) == visited(together, int(client))


def by_hand(key: np.uint64, size: int, batch_size: int, epochs: int) -> list[list[int]]:
    """Return the batches of a client that is drawn alone."""
    batches = []
    for epoch in range(epochs):
        of_epoch = rng.mix(np.array([key]) + np.uint64(epoch))
        shuffled = rng.permutations(of_epoch, size)[0].tolist()
        batches += [shuffled[at : at + batch_size] for at in range(0, size, batch_size)]
    return batches


@given(
    sizes=st.lists(st.one_of(st.integers(1, 3), st.integers(1, 90)), min_size=1, max_size=6),
    batch_size=st.integers(1, 12),
    work=st.sampled_from([{"epochs": 1}, {"epochs": 3}, {"steps": 1}, {"steps": 29}]),
)
def test_a_clients_order_is_its_epochs_one_after_the_other_each_shuffled_by_its_own_key(sizes, batch_size, work):
    keys = keys_for(len(sizes))
    visits = epoch_order(keys, np.array(sizes), batch_size, **work)
    for k, size in enumerate(sizes):
        whole = by_hand(keys[k], size, batch_size, work.get("epochs", 29))
        assert visited(visits, k) == (whole[: work["steps"]] if "steps" in work else whole)
        past = np.arange(batch_size) >= visits.counts[k][:, None]
        assert not visits.index[k][past].any()


def test_an_epochs_order_is_the_recorded_one():
    visits = epoch_order(keys_for(3), np.array([1, 6, 3]), 2, steps=4)
    assert visits.index.tolist() == [
        [[0, 0], [0, 0], [0, 0], [0, 0]],
        [[2, 0], [4, 1], [3, 5], [3, 0]],
        [[2, 0], [1, 0], [0, 2], [1, 0]],
    ]
    assert visits.counts.tolist() == [[1, 1, 1, 1], [2, 2, 2, 2], [2, 1, 2, 1]]

    visits = epoch_order(keys_for(2), np.array([5, 3]), 2, epochs=2)
    assert visits.index.tolist() == [
        [[4, 0], [3, 1], [2, 0], [4, 1], [0, 3], [2, 0]],
        [[2, 0], [1, 0], [0, 1], [2, 0], [0, 0], [0, 0]],
    ]


@pytest.mark.parametrize("sizes", [[1, *[400] * 9], [*[1] * 9, 400]], ids=["one is small", "one is large"])
def test_large_clients_do_not_draw_the_many_epochs_of_a_small_client(sizes):
    keys = keys_for(10)
    tracemalloc.start()
    try:
        visits = epoch_order(keys, np.array(sizes), 8, steps=300)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * visits.index.nbytes


def test_every_sample_comes_first_about_as_often():
    keys = np.array([rng.key(1, "batches", round, 0) for round in range(4000)], dtype=np.uint64)
    visits = epoch_order(keys, np.full(4000, 8), 8)
    for place in (0, 3, 7):
        first_counts = np.bincount(visits.index[:, 0, place], minlength=8)
        assert ((first_counts - 500.0) ** 2 / 500).sum() < 30  # chi-squared with 7 degrees of freedom: 1 in 10,000


def test_a_row_of_permutations_depends_on_its_own_key_and_size_alone():
    sizes = np.array([3, 9])
    rows = rng.permutations(keys_for(2), 9, sizes)
    assert sorted(rows[0, :3]) == [0, 1, 2]
    assert sorted(rows[1]) == list(range(9))
    assert (rows[1] == rng.permutations(keys_for(2)[1:], 9)[0]).all()


@pytest.mark.parametrize("resident", [False, True])
def test_samples_are_a_clients_own_and_normalised(resident):
    fed = Federation(sizes=(7, 4, 11))
    source = fed.context.samples
    if resident:
        source = Samples(torch.from_numpy(fed.inputs), torch.from_numpy(fed.labels), source.gain, source.offset)
    group = GroupSamples(source, [fed.split[2], fed.split[0]])

    for k, client in enumerate((2, 0)):
        batch = group.client(k)
        numbers = fed.split[client]
        expected = (fed.inputs[numbers] - MEAN.reshape(-1, 1, 1)) / STD.reshape(-1, 1, 1)
        np.testing.assert_allclose(batch.x.numpy(), expected, rtol=1e-12, atol=1e-12)
        assert batch.y.tolist() == fed.labels[numbers].tolist()
        assert batch.weight.tolist() == [1.0] * len(numbers)
        chosen = group.client(k, torch.tensor([3, 0]))
        assert torch.equal(chosen.x, batch.x[[3, 0]])
        assert torch.equal(chosen.y, batch.y[[3, 0]])


@pytest.mark.parametrize(
    "augmentation", [(), (Crop(padding=2), Flip(), Cutout(size=2))], ids=["as they are", "changed"]
)
def test_a_groups_padded_batches_hold_the_same_samples_as_each_clients_own(augmentation):
    fed = Federation(sizes=(7, 4, 11), augmentation=augmentation)
    group = GroupSamples(fed.context.samples, fed.split)
    visits = epoch_order(keys_for(3), np.array([7, 4, 11]), 4, epochs=2)
    if augmentation:
        visits = visits.with_draws(keys_for(3, seed=1), 7)
    chosen = np.array([2, 0, 1])
    batches = group.stacked(chosen, visits)

    for s in range(visits.index.shape[1]):
        together = batches(slice(3), s)
        for row, k in enumerate(chosen):
            count = int(visits.counts[k, s])
            assert together.weight[row].tolist() == [1.0] * count + [0.0] * (4 - count)
            samples = group.client(int(k), torch.from_numpy(visits.index[k, s, :count]))
            alone = group.steps(int(k), visits)(s)
            assert torch.equal(alone.x, samples.x) == (not augmentation or not count)
            assert torch.equal(alone.x, group.steps(int(k), visits)(s).x)
            assert torch.equal(together.x[row, :count], alone.x)
            assert torch.equal(together.y[row, :count], alone.y)


@pytest.mark.parametrize("ready", [False, True], ids=["normalised anew", "normalised once"])
@pytest.mark.parametrize("augmentation", [(), (Flip(),)], ids=["as they are", "changed"])
def test_batches_of_some_clients_are_gathered_together_no_wider_than_requested(augmentation, ready, monkeypatch):
    if not ready:
        monkeypatch.setattr("raypfl.learning.batches.NORMALISE_ONCE_LIMIT", 0)
    fed = Federation(sizes=(7, 3, 11), augmentation=augmentation)
    group = GroupSamples(fed.context.samples, fed.split)
    visits = epoch_order(keys_for(3), np.array([7, 3, 11]), 4)
    if augmentation:
        visits = visits.with_draws(keys_for(3, seed=1), 1)
    batches = group.stacked(np.arange(3), visits)

    for s, clients, width in [(0, [1, 2], 4), (0, [1], 3), (1, [0, 2], 4), (2, [2], 3)]:
        together = batches(torch.tensor(clients), s, width)
        assert together.x.shape == (len(clients), width, *fed.inputs.shape[1:])
        assert together.y.shape == together.weight.shape == (len(clients), width)
        for row, k in enumerate(clients):
            alone = group.steps(k, visits)(s)
            count = int(visits.counts[k, s])
            assert torch.equal(together.x[row, :count], alone.x) and torch.equal(together.y[row, :count], alone.y)
            assert together.weight[row].tolist() == [1.0] * count + [0.0] * (width - count)


def test_some_of_a_clients_samples_are_spread_over_its_labels_with_the_largest_among_them():
    y = torch.tensor([0, 2, 0, 1, 0, 0, 1, 0, 0, 0, 1])
    batch = Batch(torch.arange(11.0)[:, None], y, torch.ones(11))
    assert batch.subset(4).y.tolist() == [2, 1, 0, 0]
    assert sorted(batch.subset(11).x.flatten().tolist()) == batch.x.flatten().tolist()
    assert [len(batch.subset(count).y) for count in (1, 2, 5, 10, 99)] == [1, 2, 4, 6, 11]
    assert len(Batch(torch.zeros(0, 1), torch.zeros(0), torch.zeros(0)).subset(4).y) == 0

    several = torch.zeros(9, 3, dtype=torch.int8)
    several[7, 1] = 1
    assert Batch(batch.x[:9], several, torch.ones(9)).subset(3).y[0].tolist() == [0, 1, 0]

    fed = Federation(sizes=(7, 40))
    group = GroupSamples(fed.context.samples, fed.split)
    labels = fed.labels[fed.split[1]]
    chosen = group.subset(1, 10)
    samples = group.client(1)

    assert len(chosen.y) == 10 and chosen.y[0] == labels.max()
    assert all((samples.x == x).flatten(1).all(1).any() for x in chosen.x)


def test_the_mean_of_a_batch_leaves_padding_out():
    batch = Batch(torch.zeros(3, 1), torch.zeros(3), torch.tensor([1.0, 1.0, 0.0]))
    assert batch.mean(torch.tensor([1.0, 2.0, 100.0])) == 1.5
    assert batch.mean(torch.tensor([[1.0, 0.0], [2.0, 4.0], [9.0, 9.0]])).tolist() == [1.5, 2.0]
    assert batch._replace(weight=torch.zeros(3)).mean(torch.ones(3)) == 0


def test_a_named_batch_is_part_of_the_clients_samples_and_the_same_for_the_same_stream():
    fed = Federation(sizes=(7, 4, 11))
    clients = fed.clients()
    batches = clients.batches(5, "describe")
    assert [len(b.y) for b in batches] == [5, 4, 5]

    for k, batch in enumerate(batches):
        samples = [tuple(x.flatten().tolist()) for x in fed.samples(k)[0]]
        rows = [tuple(x.flatten().tolist()) for x in batch.x]
        assert len(set(rows)) == len(rows) and set(rows) <= set(samples)

    again = fed.clients([2, 0]).batches(5, "describe")
    assert torch.equal(again[0].x, batches[2].x) and torch.equal(again[1].x, batches[0].x)
    assert not torch.equal(clients.batches(5, "other")[2].x, batches[2].x)
    assert not torch.equal(fed.clients(round=1).batches(5, "describe")[2].x, batches[2].x)


def test_two_trainings_of_a_round_visit_the_same_batches_unless_they_name_other_streams():
    fed = Federation(sizes=(30, 30))
    clients = fed.clients()

    def train(**options):
        return clients.sgd(clients.loss, clients.initial, **options)

    assert torch.equal(train(), train())
    assert not torch.equal(train(), train(stream="other"))
    later = fed.clients(round=1)
    assert not torch.equal(train(), later.sgd(later.loss, later.initial))
