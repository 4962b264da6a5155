"""Every way of dealing samples out to clients keeps the promises of partitions.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypfl.data import PARTITIONS, Partition
from raypfl.data.partitions import IID, ClassesPerClient, Dirichlet, LogNormal, apportion
from raypfl.errors import ConfigError, DataError


@st.composite
def labelled(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Labels of 1 to 200 samples, of 1 to 8 classes, not all of which need occur."""
    num_classes = draw(st.integers(1, 8))
    labels = draw(st.lists(st.integers(0, num_classes - 1), min_size=1, max_size=200))
    return np.array(labels, dtype=np.int64), num_classes


def balanced(per_class: int, num_classes: int = 10) -> np.ndarray:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), per_class))


def class_counts(labels: np.ndarray, shares: list[np.ndarray], num_classes: int) -> np.ndarray:
    return np.stack([np.bincount(labels[share], minlength=num_classes) for share in shares])


def assert_dealt_out(shares: list[np.ndarray], clients: int, samples: int) -> None:
    assert len(shares) == clients
    assert all(len(share) for share in shares)
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(samples))


@given(labelled(), st.data(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_iid_dirichlet_and_lognormal_give_every_sample_to_one_client_and_none_goes_empty(problem, data, seed):
    labels, num_classes = problem
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(1, len(labels) // clients))
    alpha = data.draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
    sigma = data.draw(st.sampled_from([0.0, 1.0, 5.0]))
    for partition in (
        IID(clients=clients),
        Dirichlet(clients=clients, alpha=alpha, min_samples=minimum),
        LogNormal(clients=clients, sigma=sigma, min_samples=minimum),
    ):
        shares = partition.assign(labels, num_classes, seed)
        assert_dealt_out(shares, clients, len(labels))
        assert isinstance(partition, IID) or min(map(len, shares)) >= minimum


@given(st.integers(1, 40), st.integers(1, 10), st.data(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_classes_per_client_gives_each_client_exactly_that_many_classes_in_balance(clients, num_classes, data, seed):
    classes = data.draw(st.integers(1, num_classes))
    clients = max(clients, -(-num_classes // classes))
    labels = balanced(clients, num_classes)
    shares = ClassesPerClient(clients=clients, classes=classes).assign(labels, num_classes, seed)
    assert_dealt_out(shares, clients, len(labels))
    owned = class_counts(labels, shares, num_classes) > 0
    assert (owned.sum(axis=1) == classes).all()
    assert np.ptp(owned.sum(axis=0)) <= 1


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=30).filter(any))
def test_apportioned_parts_add_up_and_differ_from_their_shares_by_less_than_one(total, weights):
    parts = apportion(np.array([total]), np.array([weights]))[0]
    assert parts.sum() == total
    assert (np.abs(parts - total * np.array(weights) / sum(weights)) < 1 + 1e-6).all()
    assert (parts[np.array(weights) == 0] == 0).all()


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_partition_depends_on_its_seed_and_on_nothing_else(name):
    labels = balanced(100)
    partition = PARTITIONS.get(name)(clients=10)
    first, again, other = (partition.assign(labels, 10, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", list(PARTITIONS))
def test_a_hundred_thousand_clients_are_dealt_to(name):
    labels = balanced(100_000)
    partition = replace(PARTITIONS.get(name)(clients=100_000), **({"min_samples": 5} if name == "dirichlet" else {}))
    assert_dealt_out(partition.assign(labels, 10, 0), 100_000, len(labels))


def test_iid_shares_differ_by_at_most_one_sample():
    sizes = [len(share) for share in IID(clients=7).assign(balanced(10), 10, 0)]
    assert max(sizes) - min(sizes) <= 1


def test_lognormal_without_spread_gives_equal_shares():
    sizes = [len(share) for share in LogNormal(clients=8, sigma=0.0).assign(balanced(100), 10, 0)]
    assert max(sizes) - min(sizes) <= 1


def test_a_smaller_alpha_makes_clients_more_one_sided():
    labels = balanced(500)

    def largest_class_share(alpha: float) -> float:
        shares = Dirichlet(clients=20, alpha=alpha).assign(labels, 10, 0)
        counts = class_counts(labels, shares, 10)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    assert largest_class_share(0.05) > largest_class_share(0.5) > largest_class_share(100.0)


def test_owners_of_a_class_hold_nearly_equal_shares_of_it():
    labels = balanced(6000)
    shares = ClassesPerClient(clients=20, classes=2).assign(labels, 10, 0)
    counts = class_counts(labels, shares, 10)
    for per_client in counts.T:
        held = per_client[per_client > 0]
        assert held.max() / held.min() <= 0.6 / 0.4 + 0.01


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (ClassesPerClient(classes=12), "partition.classes is 12, but there are 10 classes"),
        (ClassesPerClient(clients=4, classes=2), "partition.classes is 2 and partition.clients is 4.* 10 classes"),
        (ClassesPerClient(clients=100, classes=6), "class 0 would be shared by 60 clients.* only 50 samples"),
        (Dirichlet(clients=20, min_samples=30), "partition.min_samples is 30.* 20 clients.* 600 samples.* are 500"),
        (LogNormal(clients=51), "partition.min_samples is 10.* 51 clients need 510"),
        (IID(clients=501), "partition.clients is 501, but there are only 500 training samples"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_a_sentence(partition, sentence):
    with pytest.raises(ConfigError, match=sentence):
        partition.assign(balanced(50), 10, 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: IID(clients=0), "partition.clients is 0, but must be at least 1"),
        (lambda: Dirichlet(alpha=0.0), "partition.alpha is 0.0, but must be above 0"),
        (lambda: Dirichlet(min_samples=0), "partition.min_samples is 0, but must be at least 1"),
        (lambda: ClassesPerClient(classes=0), "partition.classes is 0, but must be at least 1"),
        (lambda: LogNormal(sigma=-1.0), "partition.sigma is -1.0, but must be at least 0"),
    ],
)
def test_an_option_out_of_range_is_refused_when_the_partition_is_made(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


class Greedy(Partition):
    """Everything to client 0."""

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        return np.zeros(len(labels), dtype=np.int64)


def test_a_partition_of_ones_own_that_leaves_a_client_empty_is_refused():
    with pytest.raises(DataError, match="Greedy gives client 1 no sample"):
        Greedy(clients=2).assign(balanced(5), 10, 0)


class OffByOne(Partition):
    """Clients counted from 1."""

    def owners(self, labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
        return np.arange(len(labels)) % self.clients + 1


def test_a_partition_of_ones_own_that_invents_a_client_is_refused():
    with pytest.raises(DataError, match=r"OffByOne must name a client from 0 to 1 .* range from 1 to 2"):
        OffByOne(clients=2).assign(balanced(5), 10, 0)
