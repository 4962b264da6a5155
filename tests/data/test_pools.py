"""Pools of samples, clients that are never trained, and a store that several processes build at once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypfl.common.errors import ConfigError, DataError
from raypfl.data import IID, ByColumn, ClassesPerClient, Dirichlet, Traits, load_federated
from raypfl.data.datasets import DataConfig, RawData
from raypfl.data.datasets.settings import SPLITS
from raypfl.data.splits import allocate
from raypfl.experiment import Experiment
from tests.support import datasets
from tests.support.processes import exit_code, processes

TWO = IID(clients=2)
NOTHING_PUBLISHED = np.zeros(0, bool)


def open_data(tmp_path: Path, partition=TWO, **options):
    return load_federated(Experiment(data=options).data, partition, seed=0, cache=tmp_path / "cache")


# --- pools ------------------------------------------------------------------------------------------------------------


def test_pools_come_from_shares_other_data_sets_and_every_file_that_a_star_stands_for(tmp_path):
    images = datasets.cifar10(tmp_path / "cifar").reshape(-1, 3, 32, 32)
    datasets.cifar100(tmp_path / "cifar")
    root = datasets.cifar10_c(tmp_path / "corrupted")
    data = open_data(
        tmp_path,
        name="cifar10",
        root=str(tmp_path / "cifar"),
        pools={
            "validation": 0.1,
            "auxiliary": {"name": "cifar100", "root": str(tmp_path / "cifar")},
            "ood/c-*": {"name": "cifar10_c", "root": str(root), "variant": "5"},
        },
    )

    assert data.pools == ("validation", "auxiliary", "ood/c-fog", "ood/c-snow")
    assert [len(data.pool(name)) for name in data.pools] == [2, 40, 4, 4]
    assert np.array_equal(data.inputs[:24], images)
    assert np.array_equal(data.inputs[data.pool("ood/c-snow")], np.load(root / "snow.npy")[16:].transpose(0, 3, 1, 2))
    assert data.labels[data.pool("ood/c-snow")].tolist() == [0, 1, 2, 3]
    assert set(data.labels[data.pool("auxiliary")]) == {-1}

    of_clients = [data.indices(client, split) for client, split in itertools.product(range(2), SPLITS)]
    of_pools = [data.pool(name) for name in data.pools]
    assert np.array_equal(np.sort(np.concatenate(of_clients + of_pools)), np.arange(24 + 40 + 8))
    assert len(np.concatenate(of_clients)) == 22


def test_a_pool_is_brought_to_the_shape_and_channels_of_the_clients_data(tmp_path):
    images = datasets.mnist(tmp_path / "MNIST")
    datasets.cifar10(tmp_path)
    grey = open_data(
        tmp_path, name="mnist", root=str(tmp_path), pools={"auxiliary": {"name": "cifar10", "root": str(tmp_path)}}
    )

    assert grey.inputs.shape == (30 + 20, 1, 28, 28)

    other = {"name": "mnist", "root": str(tmp_path)}
    coloured = open_data(tmp_path, name="cifar10", root=str(tmp_path), pools={"auxiliary": other})
    added = coloured.inputs[coloured.pool("auxiliary")]

    assert added.shape == (20, 3, 32, 32)
    assert (added == added[:, :1]).all()
    assert abs(float(added.mean()) - float(images[:20].mean())) < 2


def test_a_pool_of_images_that_cannot_have_the_clients_shape_is_refused_in_a_sentence(tmp_path):
    datasets.mnist(tmp_path / "MNIST")
    mnist = {"name": "mnist", "root": str(tmp_path)}
    with pytest.raises(
        DataError, match=r"'auxiliary' has samples of \[1, 28, 28\], but those of the clients are \[10\]"
    ):
        open_data(tmp_path, name="diabetes", pools={"auxiliary": mnist})
    with pytest.raises(
        DataError, match=r"'auxiliary' has samples of \[2, 28, 28\], but those of the clients are \[1, "
    ):
        open_data(tmp_path, **mnist, pools={"auxiliary": {"name": "spiral"}})


def test_a_pool_to_be_tested_on_is_a_published_test_split_with_the_clients_classes(tmp_path):
    datasets.mnist(tmp_path / "MNIST")
    datasets.mnist(tmp_path / "FashionMNIST")
    mnist = {"name": "mnist", "root": str(tmp_path)}
    same = open_data(tmp_path, **mnist, pools={"ood/again": mnist})

    assert same.pool("ood/again").tolist() == list(range(30, 40))

    everything = open_data(tmp_path, **mnist, pools={"ood/again": {**mnist, "split": "merged"}})
    assert len(everything.pool("ood/again")) == 30
    with pytest.raises(DataError, match=r"'ood/clothes' is for tests, but not all its classes, T-shirt"):
        open_data(tmp_path, **mnist, pools={"ood/clothes": {"name": "fashion_mnist", "root": str(tmp_path)}})


def test_classes_of_a_pool_go_by_their_names(tmp_path):
    for folder, kinds in (("own", "abc"), ("other", "cb")):
        for kind in kinds:
            datasets.image(tmp_path / folder / kind / "1.png", datasets.pixels(4, 4, 3))
    other = {"name": "image_folder", "root": str(tmp_path / "other")}
    data = open_data(tmp_path, name="image_folder", root=str(tmp_path / "own"), pools={"ood/other": other})
    assert data.labels[data.pool("ood/other")].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ({"auxiliary": 1.0}, r"data.pools.auxiliary is 1.0, but must be at least 0 and below 1"),
        ({"a": 0.5, "b": 0.5}, r"data.pools take 1 of the training samples, which leaves none to train on"),
        ({"auxiliary": {"root": "x"}}, r"data.pools.auxiliary is .*, but must be a share .*, or a data set"),
        (
            {"auxiliary": {"name": "mnist", "rot": "x"}},
            r"rot is not an option of mnist; did you mean 'data.pools.auxiliary.root'",
        ),
        ({"test": {"name": "mnist"}}, r"pool called 'test', which is the name of a split"),
    ],
)
def test_a_pool_that_is_not_described_is_refused(pools, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Experiment(data={"pools": pools})


def test_a_star_without_files_and_an_unknown_pool_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"'ood/\*', but there is no \*\.npy in .* for its star"):
        open_data(tmp_path, pools={"ood/*": {"name": "cifar10_c", "root": str(tmp_path)}})
    data = open_data(tmp_path, pools={"auxiliary": 0.1})
    with pytest.raises(ConfigError, match="no pool called 'auxilary'; did you mean 'auxiliary'"):
        data.pool("auxilary")


# --- splits -----------------------------------------------------------------------------------------------------------


def allocated(labels, num_classes, partition, groups=None, test=NOTHING_PUBLISHED, **options):
    test = test if test.size else np.zeros(len(labels), bool)
    names = tuple(map(str, range(int(groups.max()) + 1))) if groups is not None else ()
    return allocate(Traits(labels, num_classes, groups, names), test, DataConfig(**options), partition, 0)


def test_a_tenth_of_the_clients_is_never_trained_and_does_not_settle_the_normalisation(tmp_path):
    data = open_data(tmp_path, Dirichlet(clients=20), unseen_fraction=0.1)
    assert len(data.unseen) == 2
    seen = np.setdiff1d(np.arange(20), data.unseen)
    pixels = data.inputs[np.concatenate([data.indices(client) for client in seen])] / 16.0
    np.testing.assert_allclose(data.mean, [pixels.mean()], rtol=1e-6)
    assert all(len(data.indices(client, "test")) for client in data.unseen)
    assert open_data(tmp_path, Dirichlet(clients=20)).unseen.tolist() == []


def test_which_clients_are_unseen_depends_on_the_seed_and_not_on_their_number_of_samples():
    labels = np.arange(1000) % 10
    config = DataConfig(unseen_fraction=0.2)
    unseen = []
    for seed in (0, 0, 1):
        allocation = allocate(Traits(labels, 10), labels < 0, config, IID(clients=50), seed)
        unseen.append(allocation.unseen.tolist())

    assert unseen[0] == unseen[1] != unseen[2]
    assert len(unseen[0]) == 10


def test_each_client_has_the_same_classes_in_all_its_splits():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(100), 600))
    published = np.zeros(60_000, bool)
    for label in range(100):
        published[np.flatnonzero(labels == label)[:100]] = True

    holdings = allocated(
        labels, 100, ClassesPerClient(clients=1000, classes=10, equal=True), test=published, val_fraction=0.2
    )
    seen = np.zeros((3, 1000, 100), bool)
    seen[holdings.split, holdings.client, labels] = True

    assert (seen[0].sum(axis=1) == 10).all()
    assert np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


def test_the_sizes_of_pools_and_tests_are_peradas():
    labels = np.random.default_rng(0).integers(0, 19, 223_414)
    holdings = allocated(labels, 19, Dirichlet(alpha=0.3), pools={"validation": 0.1}, test_fraction=0.1)
    pooled = (holdings.split == len(SPLITS)).sum()
    sizes = np.bincount(holdings.client[holdings.client >= 0])
    assert pooled == 22_342
    assert (holdings.split == SPLITS.index("test")).sum() == (sizes // 10).sum()

    labels = np.arange(60_000) % 10
    holdings = allocated(
        labels, 10, Dirichlet(alpha=0.1, reserve=2, cap=1.0), test=labels.cumsum() < 0, pools={"validation": 0.1}
    )
    assert (holdings.split == len(SPLITS)).sum() == 6_000


@given(st.integers(80, 300), st.integers(1, 4), st.integers(1, 8), st.data(), st.integers(0, 2**31))
@settings(max_examples=60)
def test_every_sample_has_one_place_among_splits_and_pools_whose_sizes_are_exact(count, classes, clients, data, seed):
    labels = np.arange(count) % classes
    published = np.arange(count) >= count - data.draw(st.sampled_from([0, 20]))
    share, val, test = (data.draw(st.sampled_from([0.0, 0.1, 0.25])) for _ in range(3))
    config = DataConfig(pools={"auxiliary": share} if share else {}, val_fraction=val, test_fraction=test)
    reserve = data.draw(st.integers(0, 1))
    partition = Dirichlet(clients=clients, alpha=0.1, min_samples=1, reserve=reserve, cap=1.0)
    first, again = (allocate(Traits(labels, classes), published, config, partition, seed) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(again).values(), strict=True))

    to_train = int((~published).sum())
    pooled = first.split == len(SPLITS)
    assert np.array_equal(pooled, first.client < 0) and not (pooled & published).any()
    assert pooled.sum() == to_train - int((1 - share) * to_train + 1e-9)
    assert first.split.min() >= 0 and first.split.max() <= len(SPLITS)
    if published.any():
        assert np.array_equal(first.split == SPLITS.index("test"), published)

    of_clients = ~(pooled | published)
    for client in range(clients):
        of_client = of_clients & (first.client == client)
        size = of_client.sum()
        tests = 0 if published.any() or not test else min(max(int(size * test + 1e-9), 1), size - 1)
        vals = min(max(int(size * val + 1e-9), 1), size - tests - 1) if val else 0
        of_split = np.bincount(first.split[of_client], minlength=len(SPLITS))
        assert of_split.tolist() == [size - tests - vals, vals, tests]
        if reserve:
            assert np.bincount(labels[of_client], minlength=classes).min() >= 1


def test_peradas_cap_is_a_clients_share_of_the_data_set_before_pools_took_theirs():
    labels = np.arange(50_000) % 10
    partition = Dirichlet(clients=100, alpha=0.1, reserve=2, cap=1.0)
    holdings = allocated(labels, 10, partition, pools={"validation": 0.1}, test_fraction=0.0)
    counts = np.zeros((100, 10), np.int64)
    dealt = holdings.client >= 0
    np.add.at(counts, (holdings.client[dealt], labels[dealt]), 1)
    had = 20 + np.cumsum(counts - 2, axis=1) - (counts - 2)  # when the class was dealt

    assert (counts[had >= 500] == 2).all()
    assert (counts[(had >= 450) & (had < 500)] > 2).any()


@pytest.mark.parametrize(("fraction", "consequence"), [(0.01, "unseen"), (0.99, "left to train")])
def test_a_fraction_of_unseen_clients_that_rounds_to_none_or_all_is_refused(fraction, consequence):
    with pytest.raises(
        ConfigError, match=f"data.unseen_fraction is {fraction}, but with 20 clients none would be {consequence}"
    ):
        allocated(np.arange(200) % 10, 10, IID(clients=20), unseen_fraction=fraction)


def test_published_test_samples_stay_in_their_domain():
    domain = np.arange(600) % 4
    published = np.arange(600) >= 400
    holdings = allocated(np.arange(600) % 3, 3, ByColumn(), groups=domain, test=published)
    assert np.array_equal(holdings.client, domain)


# --- the store --------------------------------------------------------------------------------------------------------


def records_reading(config: DataConfig) -> RawData:
    """A reader that adds a line to a file each time it reads."""
    with open(os.environ["RAYPFL_TEST_COUNT"], "a") as file:
        file.write("read\n")
    return RawData(datasets.pixels(400, 1, 64, 64), np.arange(400) % 10, [str(c) for c in range(10)])


def fingerprint(cache: Path) -> str:
    config = DataConfig(name="tests.data.test_pools:records_reading")
    return load_federated(config, TWO, seed=0, cache=cache).fingerprint


def test_one_of_two_processes_builds_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_TEST_COUNT", str(tmp_path / "count"))
    with processes(2) as pool:
        fingerprints = set(pool.map(fingerprint, [tmp_path / "cache"] * 2))
    assert len(fingerprints) == 1
    assert (tmp_path / "count").read_text() == "read\n"
    assert {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {".arrow"}


def kills_its_first_reader(config: DataConfig) -> RawData:
    """A reader that kills the first process that reads with it."""
    mark = Path(os.environ["RAYPFL_TEST_COUNT"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return records_reading(config)


def build_with_a_death(cache: Path) -> None:
    load_federated(DataConfig(name="tests.data.test_pools:kills_its_first_reader"), TWO, seed=0, cache=cache)


def test_a_process_killed_while_it_builds_the_store_locks_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYPFL_TEST_COUNT", str(tmp_path / "count"))
    assert exit_code(build_with_a_death, tmp_path / "cache") == -signal.SIGKILL
    build_with_a_death(tmp_path / "cache")
    assert {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()} == {".arrow"}


def test_the_store_depends_on_the_content_of_files_not_on_their_times_or_place(tmp_path):
    datasets.mnist(tmp_path / "a/MNIST")
    first = open_data(tmp_path, name="mnist", root=str(tmp_path / "a"))
    for path in (tmp_path / "a").rglob("*ubyte"):
        os.utime(path, (1, 1))

    (tmp_path / "a/CIFAR").mkdir()
    (tmp_path / "a/CIFAR/other").write_text("a data set beside it")
    (tmp_path / "a").rename(tmp_path / "b")
    again = open_data(tmp_path, name="mnist", root=str(tmp_path / "b"))

    assert first.fingerprint == again.fingerprint
    assert len(list((tmp_path / "cache").rglob("samples.arrow"))) == 1


def test_a_file_with_new_content_is_read_again_even_if_size_and_time_are_unchanged(tmp_path):
    datasets.mnist(tmp_path / "MNIST")
    mnist = {"name": "mnist", "root": str(tmp_path)}
    before = open_data(tmp_path, **mnist)
    labels = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    state = labels.stat()
    datasets.idx(labels, np.arange(20)[::-1] % 10)
    os.utime(labels, ns=(state.st_atime_ns, state.st_mtime_ns))

    assert (labels.stat().st_size, labels.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert before.labels[:3].tolist() == [0, 1, 2]
    assert open_data(tmp_path, **mnist).labels[:3].tolist() == [9, 8, 7]


def test_unchanged_files_are_not_read_again(tmp_path, monkeypatch):
    datasets.mnist(tmp_path / "MNIST")
    open_data(tmp_path, name="mnist", root=str(tmp_path))
    monkeypatch.setattr("hashlib.file_digest", None)
    open_data(tmp_path, name="mnist", root=str(tmp_path))


LARGE = """
import resource, sys
import numpy as np
import pyarrow as pa
import raypfl
from raypfl.data import IID, load_federated
from raypfl.data.datasets import DataConfig, RawData

def images(numbers):
    '''uint8[n, 1, 64, 64], each of them different from the others.'''
    return (np.asarray(numbers)[:, None] * np.arange(1, 4097) % 65521 % 251).astype(np.uint8).reshape(-1, 1, 64, 64)

def large(config):
    '''105 MB of grey images in three channels each, in blocks of 3 MB.'''
    def blocks():
        for start in range(0, 25600, 256):
            yield np.repeat(images(range(start, start + 256)), 3, axis=1)
    return RawData(blocks(), np.arange(25600) % 10, [str(c) for c in range(10)])

def limit(room):
    status = dict(line.split(':', 1) for line in open('/proc/self/status'))
    used = int(status['VmData'].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + room * 2**20, resource.RLIM_INFINITY))

def trained(data, clients, cohort):
    return raypfl.run(raypfl.Experiment(
        data={'name': data, 'cache': sys.argv[1]}, method='fedavg', rounds=1,
        partition={'name': 'iid', 'clients': clients}, cohort={'size': cohort}, model={'name': 'mlp', 'hidden': [4]},
        training={'batch_size': 32}, evaluation={'protocols': ['local']},
        engine={'backend': 'inline', 'executor': 'sequential'},
        tracking={'mlflow': False}, output=sys.argv[3]))

pa.set_cpu_count(1)
pa.set_io_thread_count(1)
trained('digits', 20, 2)  # so that what is loaded but once is loaded

limit(64)
data = load_federated(DataConfig(name='parquet', root=sys.argv[2]), IID(clients=10), seed=0, cache=sys.argv[1])
print(data.inputs.shape)
data = load_federated(DataConfig(name='__main__:large'), IID(clients=200), seed=0, cache=sys.argv[1])
where = np.concatenate([data.indices(client) for client in range(3)])
inputs, labels = data.take(where)
assert np.array_equal(inputs, images(where))
assert np.array_equal(labels, where % 10)
print(data.inputs.shape)
result = trained('__main__:large', 200, 3)
assert np.isfinite(result.rounds['loss'].to_pylist()).all()
print('rounds', result.round)
try:
    np.array(data.inputs)
except MemoryError:
    print('all at once are too many')
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_data_set_larger_than_the_memory_allowed_is_built_and_a_few_of_its_clients_are_read_and_trained(tmp_path):
    image = datasets.encoded(datasets.pixels(64, 64, 3), "BMP")
    table = pa.table({"image": [image] * 7000, "label": np.arange(7000) % 10})
    (tmp_path / "parquet").mkdir()
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 64}
    pq.write_table(table, tmp_path / "parquet/86 MB in one row group.parquet", **options)

    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LARGE, str(tmp_path), str(tmp_path / "parquet"), str(tmp_path / "runs")]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr

    lines = process.stdout.splitlines()
    shapes = ["(7000, 3, 64, 64)", "(25600, 1, 64, 64)"]
    assert [line for line in lines if line.startswith("(")] == shapes
    assert lines[-2:] == ["rounds 1", "all at once are too many"]
