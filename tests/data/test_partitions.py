"""Every partition keeps its promises."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raypfl
from raypfl.common import rng
from raypfl.common.errors import ConfigError, DataError
from raypfl.data import (
    IID,
    PARTITIONS,
    ByColumn,
    ClassesPerClient,
    Dirichlet,
    DirichletMix,
    FromFile,
    LogNormal,
    Partition,
    PowerLaw,
    Traits,
)
from raypfl.data.partitions.allocation import apportion, fit_margins, largest_remainders
from tests.support.tiers import with_quick

DRAWN = [name for name in PARTITIONS if name != "from_file"]


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


def assert_allocated(shares: list[np.ndarray], clients: int, samples: int) -> None:
    assert len(shares) == clients
    assert all(len(share) for share in shares)
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(samples))


@given(labelled(), st.data(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_every_sample_goes_to_one_client_and_none_goes_empty(problem, data, seed):
    labels, num_classes = problem
    clients = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(1, len(labels) // clients))
    alpha = data.draw(st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
    sigma = data.draw(st.sampled_from([0.0, 1.0, 5.0]))
    sized = {"clients": clients, "min_samples": minimum}

    for partition in (
        IID(clients=clients),
        Dirichlet(alpha=alpha, **sized),
        Dirichlet(alpha=alpha, cap=1.0, **sized),
        Dirichlet(alpha=alpha, balanced=True, **sized),
        DirichletMix(alpha=alpha, **sized),
        DirichletMix(alpha=alpha, balanced=False, **sized),
        LogNormal(sigma=sigma, **sized),
        PowerLaw(exponent=sigma, **sized),
    ):
        shares = partition.assign(Traits(labels, num_classes), seed)
        assert_allocated(shares, clients, len(labels))
        assert isinstance(partition, IID) or min(map(len, shares)) >= minimum
        if getattr(partition, "balanced", False):
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 6), st.integers(1, 12), st.data(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_counts_have_the_requested_margins(num_classes, clients, data, seed):
    draws = np.random.default_rng(seed)
    sizes = np.array(data.draw(st.lists(st.integers(0, 30), min_size=clients, max_size=clients)))
    totals = np.bincount(draws.integers(0, num_classes, sizes.sum()), minlength=num_classes)
    weights = draws.dirichlet(np.full(clients, data.draw(st.sampled_from([1e-3, 0.1, 10.0]))), size=num_classes)
    counts = fit_margins(weights, totals, sizes)

    assert counts.min(initial=0) >= 0
    assert np.array_equal(counts.sum(axis=1), totals)
    assert np.array_equal(counts.sum(axis=0), sizes)


@given(labelled(), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=60)
def test_the_groups_of_a_column_stay_whole_are_divided_or_merged(problem, clients, seed):
    column, values = problem
    present = np.unique(column)
    samples = Traits(np.zeros_like(column), 1, column, tuple(map(str, range(values))))
    shares = ByColumn().assign(samples, seed)
    assert [set(column[share]) for share in shares] == [{value} for value in present]

    partition = ByColumn(clients=clients)
    if clients <= len(present):
        shares = partition.assign(samples, seed)
        assert_allocated(shares, clients, len(column))
        holders = [{k for k, share in enumerate(shares) if value in column[share]} for value in present]
        assert all(len(holder) == 1 for holder in holders)
    elif np.bincount(column)[present].min() >= clients:
        shares = partition.assign(samples, seed)
        assert_allocated(shares, clients, len(column))
        assert all(len(set(column[share])) == 1 for share in shares)


@given(st.integers(1, 40), st.integers(1, 10), st.data(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_classes_per_client_gives_each_client_exactly_that_many_classes_in_balance(clients, num_classes, data, seed):
    classes = data.draw(st.integers(1, num_classes))
    clients = max(clients, -(-num_classes // classes))
    labels = balanced(clients, num_classes)
    shares = ClassesPerClient(clients=clients, classes=classes).assign(Traits(labels, num_classes), seed)

    assert_allocated(shares, clients, len(labels))

    owned = class_counts(labels, shares, num_classes) > 0
    assert (owned.sum(axis=1) == classes).all()
    assert np.ptp(owned.sum(axis=0)) <= 1


@given(st.integers(0, 1000), st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=30).filter(any))
def test_apportioned_parts_add_up_and_are_their_shares_rounded_up_or_down(total, weights):
    parts = apportion(np.array([total]), np.array([weights]))[0]
    shares = total * np.array(weights) / sum(weights)
    assert parts.sum() == total
    assert (parts >= np.floor(shares - 1e-6)).all() and (parts <= np.ceil(shares + 1e-6)).all()
    assert (parts[np.array(weights) == 0] == 0).all()


def test_a_whole_share_stays_unchanged_between_two_halves():
    assert apportion(2, np.array([0.5, 1.0, 0.5]))[1] == 1
    assert apportion(np.array([6, 6]), np.array([[1.5, 3.0, 1.5], [0.5, 3.0, 2.5]]))[:, 1].tolist() == [3, 3]


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 2**31))
def test_the_nearest_whole_parts_add_up_and_differ_from_their_shares_by_less_than_one(total, parts, seed):
    draws = np.random.default_rng(seed)
    weights = draws.random((3, parts)) * (draws.random((3, parts)) < 0.7) + 1e-12
    shares = weights / weights.sum(axis=1, keepdims=True) * total
    whole = largest_remainders(np.full(3, total), weights, draws)
    assert (whole.sum(axis=1) == total).all()
    assert (np.abs(whole - shares) < 1 + 1e-6).all()


def test_parts_near_one_become_one_each_when_the_nearest_are_taken():
    draws = np.random.default_rng(0)
    weights = draws.uniform(0.4, 0.6, (20, 100))
    assert (largest_remainders(np.full(20, 100), weights, draws) == 1).all()


def traits(labels: np.ndarray, num_classes: int = 10) -> Traits:
    """Samples with a column beside their labels: ten writers."""
    return Traits(labels, num_classes, np.arange(len(labels)) % 10, tuple("abcdefghij"))


@pytest.mark.parametrize("name", [name for name in DRAWN if name != "label_sorted"])
def test_a_partition_depends_on_its_seed_and_on_nothing_else(name):
    samples = traits(balanced(100))
    partition = PARTITIONS.get(name)(clients=20)
    first, again, other = (partition.assign(samples, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", with_quick(DRAWN, {"dirichlet"}))
def test_a_hundred_thousand_clients_get_samples(name):
    samples = traits(balanced(100_000))
    partition = replace(PARTITIONS.get(name)(clients=100_000), **({"min_samples": 5} if name == "dirichlet" else {}))
    assert_allocated(partition.assign(samples, 0), 100_000, len(samples))


def test_a_hundred_thousand_clients_get_equal_sizes_from_unequal_shares():
    samples = traits(balanced(100_000))
    shares = Dirichlet(clients=100_000, balanced=True).assign(samples, 0)
    assert {len(share) for share in shares} == {10}


def test_iid_shares_differ_by_at_most_one_sample():
    sizes = [len(share) for share in IID(clients=7).assign(Traits(balanced(10), 10), 0)]
    assert max(sizes) - min(sizes) <= 1


def test_lognormal_without_spread_gives_equal_shares():
    sizes = [len(share) for share in LogNormal(clients=8, sigma=0.0).assign(Traits(balanced(100), 10), 0)]
    assert max(sizes) - min(sizes) <= 1


def test_every_client_gets_the_reserve_of_every_class_and_the_rest_is_shared_out():
    labels = balanced(450)
    counts = class_counts(labels, Dirichlet(clients=20, alpha=0.1, reserve=2).assign(Traits(labels, 10), 0), 10)
    assert counts.min() == 2
    assert (counts.sum(axis=0) == 450).all()
    assert counts.max() > 200


def test_a_client_that_holds_its_share_gets_no_further_class():
    labels = balanced(5000)
    counts = class_counts(labels, Dirichlet(clients=20, alpha=0.1, cap=1.0).assign(Traits(labels, 10), 0), 10)
    before = np.cumsum(counts, axis=1) - counts
    assert (counts[before >= 2500] == 0).all()
    plain = class_counts(labels, Dirichlet(clients=20, alpha=0.1).assign(Traits(labels, 10), 0), 10)
    assert counts.sum(axis=1).std() < plain.sum(axis=1).std()


def test_draws_are_discarded_until_nobody_has_too_few_or_refused_in_the_end():
    labels = balanced(1000)
    patient = Dirichlet(clients=10, alpha=0.04, min_samples=25, when_short="refuse", tries=500)
    assert min(map(len, patient.assign(Traits(labels, 10), 0))) >= 25
    with pytest.raises(ConfigError, match=r"None of 3 Dirichlet\(0.01\) draws gives each of 40 clients 25 samples"):
        replace(patient, clients=40, alpha=0.01, tries=3).assign(Traits(labels, 10), 0)


def test_balanced_sizes_leave_clients_one_sided():
    labels = balanced(500)

    def largest_class_share(alpha: float, kind: type[Partition]) -> float:
        partition = kind(clients=20, alpha=alpha, balanced=True)
        counts = class_counts(labels, partition.assign(Traits(labels, 10), 0), 10)
        return float((counts.max(axis=1) / counts.sum(axis=1)).mean())

    for kind in (Dirichlet, DirichletMix):
        assert largest_class_share(0.05, kind) > 0.5 > largest_class_share(100.0, kind)


def test_a_clients_samples_follow_the_mix_that_was_drawn_for_it():
    labels = balanced(5000)
    shares = DirichletMix(clients=100, alpha=0.5).assign(Traits(labels, 10), 0)
    counts = class_counts(labels, shares, 10)
    mixes = rng.generator(0, "partition").dirichlet(np.full(10, 0.5), size=100)
    correlation = [np.corrcoef(mix, count)[0, 1] for mix, count in zip(mixes, counts, strict=True)]
    assert np.mean(correlation) > 0.95


def test_classes_are_divided_in_proportion_to_what_mixes_say_where_sizes_may_vary():
    labels = balanced(5000)
    shares = DirichletMix(clients=20, alpha=0.5, balanced=False).assign(Traits(labels, 10), 0)
    mixes = rng.generator(0, "partition").dirichlet(np.full(10, 0.5), size=20)
    counts = class_counts(labels, shares, 10)
    assert np.abs(counts - 5000 * mixes / mixes.sum(axis=0)).max() <= 1
    assert counts.sum(axis=1).std() > 100


@pytest.mark.parametrize(
    ("num_classes", "alpha", "per_class", "classes", "largest"),
    [
        (10, 0.3, 5000, 8.0, 0.434),
        (10, 1.0, 5000, 9.9, 0.299),
        (100, 0.3, 500, 63.8, 0.104),
        (100, 1.0, 500, 90.6, 0.052),
        (200, 0.3, 500, 127.7, 0.060),
        (200, 1.0, 500, 181.9, 0.029),
    ],
)
def test_clients_are_as_one_sided_as_in_fednhs_settings(num_classes, alpha, per_class, classes, largest):
    """CIFAR-10, CIFAR-100 and TinyImageNet over 100 clients: means of one draw each, computed apart from this code."""
    labels = balanced(per_class, num_classes)
    partition = Dirichlet(clients=100, alpha=alpha)
    counts = [class_counts(labels, partition.assign(Traits(labels, num_classes), s), num_classes) for s in range(4)]
    by_class = np.concatenate(counts)
    assert (by_class > 0).sum(axis=1).mean() == pytest.approx(classes, rel=0.03)
    assert (by_class.max(axis=1) / by_class.sum(axis=1)).mean() == pytest.approx(largest, rel=0.06)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_sizes_fall_with_the_power_in_the_settings(exponent):
    shares = PowerLaw(clients=8, exponent=exponent).assign(Traits(balanced(2000), 10), 0)
    sizes = sorted(map(len, shares), reverse=True)
    np.testing.assert_allclose(sizes[0] / np.array(sizes), np.arange(1, 9) ** exponent, rtol=0.02)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
def test_the_logarithms_of_sizes_have_the_standard_deviation_in_the_settings(sigma):
    shares = LogNormal(clients=2000, sigma=sigma, min_samples=1).assign(Traits(np.zeros(1_000_000, np.int64), 1), 0)
    assert np.log([len(share) for share in shares]).std() == pytest.approx(sigma, rel=0.05)


def test_owners_of_a_class_may_hold_equal_shares_of_it():
    labels = balanced(6000)
    shares = ClassesPerClient(clients=20, classes=2, equal=True).assign(Traits(labels, 10), 0)
    assert set(class_counts(labels, shares, 10).ravel()) == {0, 1500}


def written(path: Path, content: object) -> FromFile:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(content), path)
    else:
        path.write_text(json.dumps(content))
    return FromFile(file=str(path))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("list.json", [1, 0, 1, 2]),
        ("lists.json", {"0": [1], "2": [3], "1": [2, 0]}),
        ("table.parquet", {"sample": [3, 2, 1, 0], "client": [2, 1, 0, 1]}),
    ],
)
def test_a_file_assigns_samples_to_clients(tmp_path, name, content):
    shares = written(tmp_path / name, content).assign(Traits(np.zeros(4, np.int64), 1), 0)
    assert [share.tolist() for share in shares] == [[1], [0, 2], [3]]


def test_a_file_counts_samples_by_their_numbers_in_the_data_set(tmp_path):
    partition = written(tmp_path / "list.json", [9, 0, 9, 1])
    samples = Traits(np.zeros(4, np.int64), 1).at(np.array([1, 3]))
    assert partition.owners(samples, 0).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", [0, 1, 0], "names no client for sample 3 and 0 more"),
        ("a.json", {"0": [0, 1], "1": [1, 2, 3]}, "names sample 1 more than once"),
        ("a.json", {"zero": [0, 1, 2, 3]}, "neither a JSON list of client numbers, one for each sample .*, nor"),
        ("a.json", [[0, 1], [2, 3]], "one for each sample .*holds lists, where an integer is"),
        ("a.json", [[0, 1, 2], [3]], "one for each sample .*holds lists, where an integer is"),
        ("a.json", [0, 1, None, 0], "not all of .* are integers"),
        ("a.json", [0, 2, 0, 2], "gives client 1 no training sample, but client 2 has some; number clients from 0"),
        ("a.json", [0, -1, 0, 1], "gives sample 1 to client -1, but clients are counted from 0"),
        ("a.parquet", {"sample": [0, 1, 2, 3], "client": [0, None, 1, 1]}, "of integers: a value is missing"),
        ("a.json", {"0": [0, 1, 2, 3, -1]}, "names sample -1"),
        ("a.parquet", {"sample": [0, 1], "who": [0, 1]}, "does not have columns 'sample' and 'client' of integers"),
    ],
)
def test_a_file_that_names_no_client_for_each_sample_is_refused(tmp_path, name, content, sentence):
    with pytest.raises(DataError, match=sentence):
        written(tmp_path / name, content).assign(Traits(np.zeros(4, np.int64), 1), 0)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"partition.file is .*, but there is no such file"):
        FromFile(file=str(tmp_path / "none.json")).assign(Traits(np.zeros(4, np.int64), 1), 0)


def test_a_column_that_the_data_set_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"has no groups; name a column in data\.group"):
        ByColumn().assign(Traits(np.zeros(4, np.int64), 1), 0)


def test_the_shares_of_a_class_are_drawn_evenly_between_two_fifths_and_three():
    labels = balanced(50_000)
    counts = class_counts(labels, ClassesPerClient(clients=200, classes=2).assign(Traits(labels, 10), 0), 10)
    shares = []
    for per_client in counts.T:
        of_owners = per_client[per_client > 0]
        shares.append(of_owners / of_owners.mean())

    relative_shares = np.concatenate(shares)
    assert 0.77 < relative_shares.min() < 0.82 and 1.18 < relative_shares.max() < 1.24  # U(0.4, 0.6) over its mean, 0.5
    assert relative_shares.std() == pytest.approx(0.4 / 12**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("partition", "sentence"),
    [
        (ClassesPerClient(classes=12), "partition.classes is 12, but there are 10 classes"),
        (ClassesPerClient(clients=4, classes=2), "partition.classes is 2 and partition.clients is 4.* 10 classes"),
        (ClassesPerClient(clients=100, classes=6), "class 0 would be shared by 60 clients.* only 50 samples"),
        (Dirichlet(clients=20, min_samples=30), "partition.min_samples is 30.* 20 clients.* 600 samples.* are 500"),
        (LogNormal(clients=51), "partition.min_samples is 10.* 51 clients need 510"),
        (Dirichlet(clients=20, reserve=3), "partition.reserve is 3.* 20 clients need 60 .* class 0 has 50"),
        (IID(clients=501), "partition.clients is 501, but there are only 500 samples to divide"),
    ],
)
def test_a_partition_that_cannot_be_met_is_refused_in_a_sentence(partition, sentence):
    with pytest.raises(ConfigError, match=sentence):
        partition.assign(Traits(balanced(50), 10), 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: IID(clients=0), "partition.clients is 0, but must be at least 1"),
        (lambda: Dirichlet(alpha=0.0), "partition.alpha is 0.0, but must be a finite number above 0"),
        (lambda: DirichletMix(alpha=math.inf), "partition.alpha is inf, but must be a finite number above 0"),
        (lambda: LogNormal(sigma=1000), "partition.sigma is 1000, but must be at most 100"),
        (lambda: Dirichlet(min_samples=0), "partition.min_samples is 0, but must be at least 1"),
        (lambda: ClassesPerClient(classes=0), "partition.classes is 0, but must be at least 1"),
        (lambda: LogNormal(sigma=-1.0), "partition.sigma is -1.0, but must be at least 0"),
        (lambda: PowerLaw(exponent=-1.0), "partition.exponent is -1.0, but must be at least 0"),
        (lambda: Dirichlet(cap=0.5), "partition.cap is 0.5, but must be at least 1"),
        (lambda: Dirichlet(cap=1.0, balanced=True), "partition.balanced gives all clients one size"),
        (lambda: Dirichlet(when_short="cry"), "partition.when_short is 'cry', but must be 'move' or 'refuse'"),
        (lambda: FromFile(), "partition.file is '', but must be the path of a Parquet or JSON file"),
    ],
)
def test_an_option_out_of_range_is_refused_when_the_partition_is_made(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


class Greedy(Partition):
    """Everything to client 0."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return np.zeros(len(samples), dtype=np.int64)


def test_a_users_partition_that_leaves_a_client_empty_is_refused():
    with pytest.raises(DataError, match="Greedy gives client 1 no sample"):
        Greedy(clients=2).assign(Traits(balanced(5), 10), 0)


class OffByOne(Partition):
    """Clients counted from 1."""

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        return np.arange(len(samples)) % self.clients + 1


def test_a_users_partition_that_invents_a_client_is_refused():
    with pytest.raises(DataError, match=r"OffByOne must return a client from 0 to 1 .* from 1 to 2"):
        OffByOne(clients=2).assign(Traits(balanced(5), 10), 0)


class InTurn(Partition):
    """Samples to clients in turn, the first `extra` ones to client 0."""

    clients: int = 5
    extra: int = 3

    def owners(self, samples: Traits, seed: int) -> np.ndarray:
        owners = np.arange(len(samples)) % self.clients
        owners[: self.extra] = 0
        return owners


@pytest.mark.parametrize(("options", "sizes"), [({}, [12, 9, 9, 10, 10]), ({"clients": 2, "extra": 10}, [30, 20])])
def test_the_fields_of_a_users_partition_are_its_options_with_the_defaults_of_its_class(options, sizes):
    partition = raypfl.Experiment(partition={"name": f"{__name__}:InTurn", **options}).partition
    assert [len(part) for part in partition.assign(Traits(balanced(5), 10), 0)] == sizes


def test_a_users_partition_whose_owners_take_other_arguments_is_refused_when_it_is_made():
    class WithoutSeed(Partition):
        def owners(self, samples: Traits) -> np.ndarray:
            return np.zeros(len(samples), dtype=np.int64)

    with pytest.raises(ConfigError, match=r"WithoutSeed.owners .*samples, seed"):
        WithoutSeed()
