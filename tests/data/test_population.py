"""Populations, whose clients are described and not stored: only clients at work are read, to the same bits."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import raypfl
from raypfl.common.errors import ConfigError, RaypflError
from raypfl.data import load_federated
from raypfl.data.datasets import DescribedData
from tests.support.federated_data import GeneratedClients
from tests.support.processes import call
from tests.support.runs import Interrupt, experiment, same_tables


def described(tmp_path: Path, clients: int = 40, name: str = "GeneratedClients", **changes) -> raypfl.Experiment:
    (tmp_path / "clients").write_text(str(clients))
    defaults = {
        "data__name": f"tests.support.federated_data:{name}",
        "data__root": tmp_path,
        "evaluation__protocols": "[local]",
    }
    return experiment(tmp_path, **(defaults | changes))


def open_data(tmp_path: Path, **changes) -> DescribedData:
    config = described(tmp_path, **changes).data
    data = load_federated(config, raypfl.Experiment().partition, seed=0)
    assert isinstance(data, DescribedData)
    return data


def test_samples_are_read_by_their_numbers_in_any_order_and_mixture(tmp_path):
    data = open_data(tmp_path)
    indices = np.concatenate([data.indices(7)[::-1], data.indices(2, "test"), data.indices(7), data.indices(3)[:1]])
    inputs, labels = data.take(indices)
    x7, y7 = data.population.samples(7, "train")
    x2, y2 = data.population.samples(2, "test")
    x3, y3 = data.population.samples(3, "train")

    assert np.array_equal(inputs, np.concatenate([x7[::-1], x2, x7, x3[:1]]))
    assert np.array_equal(labels, np.concatenate([y7[::-1], y2, y7, y3[:1]])) and labels.dtype == np.int64

    empty = data.take(data.indices(9, "val"))
    assert empty[0].shape == (0, 1, 8, 8) and empty[1].shape == (0,)
    assert data.sizes("train")[7] == len(data.indices(7)) == 12


def test_a_process_reads_samples_once_and_caches_a_bounded_number(tmp_path, monkeypatch):
    data = open_data(tmp_path)
    GeneratedClients.requests.clear()
    for client in (0, 1, 0, 1, 2):
        data.take(data.indices(client))

    assert GeneratedClients.requests == [(0, "train"), (1, "train"), (2, "train")]

    monkeypatch.setattr("raypfl.data.datasets.population.CACHE_BYTES", 2000)
    for client in range(10):
        data.take(data.indices(client))

    assert 0 < sum(x.nbytes + y.nbytes for x, y in data._cache.values()) <= 2000


def test_described_data_are_pickled_as_their_description(tmp_path):
    data = open_data(tmp_path)
    data.take(data.indices(0))
    copy = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1200 and copy.fingerprint == data.fingerprint
    assert copy.fingerprint != open_data(tmp_path, clients=41).fingerprint


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("OneSampleShort", r"inputs uint8\[5, 1, 8, 8\] for client 1's train split.*must be.*\[6, 1, 8, 8\]"),
        ("LabelsOutOfRange", "train split of client 1: Sample 2 has label 11, but there are 10 classes"),
        (
            "LabelsThatOverflow",
            r"returns int64\[6, 2\] for the train split of client 1; it must .* kind 'labels'",
        ),
    ],
)
def test_samples_that_are_not_as_described_are_refused_in_a_sentence(tmp_path, name, sentence):
    data = open_data(tmp_path, name=name)
    with pytest.raises(RaypflError, match=sentence):
        data.take(data.indices(1))


def test_populations_that_make_no_sense_are_refused_before_the_first_round(tmp_path):
    with pytest.raises(RaypflError, match=r"sizes\('test'\) must be a whole number, 0 or more, for each of 40 clients"):
        open_data(tmp_path, name="SizesOfOneClient").sizes("test")
    with pytest.raises(
        ConfigError, match=r"cohort\.size is 41, but tests.support.federated_data:GeneratedClients has 40 clients"
    ):
        raypfl.run(described(tmp_path, cohort__size=41))

    data = open_data(tmp_path)
    with pytest.raises(ConfigError, match="There is no client 40"):
        data.indices(40)
    with pytest.raises(ConfigError, match="no split called 'tran'"):
        data.sizes("tran")


def test_rounds_read_the_samples_of_their_cohort_only(tmp_path):
    GeneratedClients.requests.clear()
    sequential = {"engine__executor": "sequential", "training__channels_last": False}
    result = raypfl.run(described(tmp_path, clients=100_000, method="fedavg", **sequential))
    trained = set(np.concatenate(result.rounds["cohort"].to_pylist()).tolist())

    assert {client for client, split in GeneratedClients.requests if split == "train"} == trained
    assert {client for client, split in GeneratedClients.requests if split == "test"} == {0, 1, 2}
    assert len(GeneratedClients.requests) == len(set(GeneratedClients.requests)) and len(trained) == 36
    assert set(result.evaluations["client"].to_pylist()) == {0, 1, 2}


def test_clients_that_are_tested_together_have_their_own_samples_read_only(tmp_path):
    """Those with fewer test samples are padded, and client 0 has no training sample to pad them with."""
    GeneratedClients.requests.clear()
    together = {"engine__executor": "vectorised", "engine__group_size": 3, "training__channels_last": False}
    result = raypfl.run(described(tmp_path, name="UnequalTests", clients=100_000, method="ditto", **together))
    trained = set(np.concatenate(result.rounds["cohort"].to_pylist()).tolist())

    assert {client for client, split in GeneratedClients.requests if split == "train"} == trained
    tested = [row for row in result.evaluations.to_pylist() if row["model"] == "personal" and row["round"] == 6]
    assert [row["samples"] for row in tested] == [4, 8, 12]


def test_a_stopped_run_of_described_clients_resumes_to_the_same_bits(tmp_path):
    whole = raypfl.run(described(tmp_path))
    stopped = raypfl.run(described(tmp_path), listeners=[Interrupt(3)])
    assert stopped.round == 3

    resumed = raypfl.resume(stopped.run_dir)
    assert resumed.weights_hash == whole.weights_hash and same_tables(resumed, whole)

    (tmp_path / "clients").write_text("39")
    with pytest.raises(RaypflError, match="other data"):
        raypfl.resume(stopped.run_dir, overrides=["rounds=7"])


@pytest.mark.usefixtures("ray_cluster")
def test_described_clients_on_ray_give_the_bits_of_an_inline_run(tmp_path):
    inline = raypfl.run(described(tmp_path))
    on_ray = {"engine__backend": "ray", "ray__actors": 2, "ray__cpus_per_actor": 0.5}
    ray = raypfl.run(described(tmp_path, **on_ray))
    assert ray.weights_hash == inline.weights_hash and same_tables(ray, inline)


def memory_peaks(folder: Path) -> list[float]:
    """Return this process's peak of memory in MB after each of three runs."""
    peaks = []
    for clients in (1000, 1000, 1_000_000):
        run = described(folder, clients=clients, cohort__size=50, rounds=3, engine__group_size=25)
        result = raypfl.run(run)
        assert result.status == "finished" and result.rounds["clients"].to_pylist() == [50] * 3

        status = Path("/proc/self/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in status if line.startswith("VmHWM")]
        peaks.append(int(peak) / 1e3)
    return peaks


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_a_million_described_clients_take_less_than_120_mb_more_than_a_thousand(tmp_path):
    _, thousand, million = call(memory_peaks, tmp_path)
    assert million - thousand < 120
