"""Clients that are named after the groups that they hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import raypfl
from raypfl.common.errors import ConfigError, DataError
from raypfl.data import IID, ByColumn, load_federated, summarised
from raypfl.data.client_names import ClientNames
from raypfl.data.datasets import DataConfig, Population
from raypfl.engine.events import Warned
from raypfl.results import client_data
from raypfl.trained.models import TrainedModels
from tests.support.runs import experiment

CITIES = ["York", "Bath", "Berlin", "Hull"]
OPTIONS = {"target": "bought", "group": "city"}


def written(folder: Path, cities: list[str], name: str = "people.csv") -> None:
    """Write a table with six rows for each of the `cities`, which alternate."""
    rows = ["city,age,bought"]
    for row in range(6):
        rows += [f"{city},{20 + 7 * row + len(city)},{row % 2}" for city in cities]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(rows))


def cities_of(folder: Path, rows: np.ndarray) -> set[str]:
    lines = (folder / "people.csv").read_text().splitlines()[1:]
    return {lines[row].split(",")[0] for row in rows}


@pytest.mark.parametrize(
    ("clients", "names"),
    [
        (0, ["Bath", "Berlin", "Hull", "York"]),
        (8, ["Bath", "Bath", "Berlin", "Berlin", "Hull", "Hull", "York", "York"]),
        (7, None),
        (2, None),
        (1, ["Bath + Berlin + Hull + York"]),
    ],
)
def test_a_clients_name_has_the_groups_of_its_samples(tmp_path, opened, clients, names):
    written(tmp_path / "data", CITIES)
    data = opened("table", ByColumn(clients=clients), val_fraction=0.2, **OPTIONS)
    cities = []
    for client in range(data.num_clients):
        samples = [data.indices(client, split) for split in ("train", "val", "test")]
        cities.append(cities_of(tmp_path / "data", np.concatenate(samples)))

    assert [set(name.split(" + ")) for name in data.client_names] == cities
    if names:
        assert list(data.client_names) == names


def test_the_client_of_a_group_is_found_and_a_group_of_several_clients_is_refused(tmp_path, opened):
    written(tmp_path / "data", CITIES)
    merged = opened("table", ByColumn(clients=2), **OPTIONS).client_names
    for city in CITIES:
        assert city in merged[merged.client(city)].split(" + ")
    assert [merged.client(name) for name in merged] == [0, 1]

    with pytest.raises(ConfigError, match=r"^There is no client called 'berln'; did you mean 'Berlin'\?$"):
        merged.client("berln")
    divided = opened("table", ByColumn(clients=8), **OPTIONS).client_names
    with pytest.raises(ConfigError, match=r"^'Hull' is 2 clients: 4, 5\. Give the number of one\.$"):
        divided.client("Hull")


def test_other_partitions_of_data_with_groups_give_no_names(tmp_path, opened):
    written(tmp_path / "data", CITIES)
    assert opened("table", IID(clients=4), **OPTIONS).client_names is None


def test_published_test_samples_of_a_group_without_training_samples_name_nobody(tmp_path, opened):
    written(tmp_path / "data", CITIES)
    written(tmp_path / "data", [*CITIES, "Oslo"], name="test.csv")
    assert list(opened("table", ByColumn(), **OPTIONS).client_names) == sorted(CITIES)
    assert list(opened("table", ByColumn(), split="merged", **OPTIONS).client_names) == sorted([*CITIES, "Oslo"])


def test_a_run_and_its_models_know_clients_by_name_and_unseen_ones_too(tmp_path):
    written(tmp_path / "data", CITIES)
    table = {"name": "table", "root": str(tmp_path / "data"), "unseen_fraction": 0.25, **OPTIONS}
    changes = {"method": "fedavg-ft", "rounds": 2, "evaluation__every": 2, "cohort__size": 3}
    described = experiment(tmp_path, **changes).override([f"data={json.dumps(table)}", "partition=by_column"])
    result = raypfl.Result.load(raypfl.run(described).run_dir)
    models = raypfl.trained_models(result.run_dir)
    models.export(tmp_path / "export")

    assert list(result.client_names) == sorted(CITIES)
    x = torch.tensor([[30.0], [50.0]])
    for reader in (models, TrainedModels.of_export(tmp_path / "export")):
        for client, name in enumerate(sorted(CITIES)):
            assert torch.equal(reader.personal_model(name)(x), reader.personal_model(client)(x))
        assert not torch.equal(reader.personal_model("Bath")(x), reader.personal_model("Hull")(x))
    for ask in (models.personal_model, result.client_state):
        with pytest.raises(ConfigError, match=r"no client called 'Yrok'; did you mean 'York'\?"):
            ask("Yrok")


def test_a_run_warns_if_its_clients_are_not_the_groups_that_its_data_name(tmp_path):
    written(tmp_path / "data", CITIES)
    table = {"name": "table", "root": str(tmp_path / "data"), **OPTIONS}
    small = {"rounds": 1, "evaluation__every": 0, "cohort__size": 3}
    described = experiment(tmp_path, **small).override([f"data={json.dumps(table)}", "partition=by_column"])
    for partition, warnings in (("{name: iid, clients: 4}", 1), ("by_column", 0)):
        events: list = []
        raypfl.run(described.override([f"partition={partition}"]), listeners=[events.append])
        texts = [event.text for event in events if isinstance(event, Warned)]
        assert sum("set partition=by_column" in text for text in texts) == warnings


def test_a_run_whose_clients_have_numbers_only_writes_no_names_and_says_so(tmp_path):
    result = raypfl.run(experiment(tmp_path, rounds=1, evaluation__every=0))
    assert result.client_names is None and not (result.run_dir / "clients.parquet").exists()
    for ask in (raypfl.trained_models(result.run_dir).personal_model, result.client_state):
        with pytest.raises(ConfigError, match="no client called 'York': clients have numbers only"):
            ask("York")


class Hospitals(Population):
    """A million hospitals with names."""

    num_clients = 1_000_000
    num_classes = 2
    input_shape = (3,)
    client_names: list[str] | None = None

    def __init__(self, config, named=1_000_000):
        super().__init__(config)
        self.client_names = [f"hospital {client}" for client in range(named)]

    def sizes(self, split):
        return np.full(self.num_clients, 2 * (split == "train"))

    def samples(self, client, split):
        return np.zeros((2, 3), np.float32), np.array([0, 1])


def test_a_class_may_name_its_million_clients():
    names = load_federated(DataConfig(name=f"{__name__}:Hospitals"), ByColumn(), seed=0).client_names
    assert (len(names), names[999_999], names.client("hospital 999999")) == (1_000_000, "hospital 999999", 999_999)
    with pytest.raises(ConfigError, match=r"no client called 'hospital_17'; did you mean 'hospital 17'\?"):
        names.client("hospital_17")

    one_too_few = DataConfig(name=f"{__name__}:Hospitals", options={"named": 999_999})
    with pytest.raises(DataError, match="a name for each of 1000000 clients, but has 999999"):
        load_federated(one_too_few, ByColumn(), seed=0)


def test_the_table_and_the_numbers_of_data_show_name_the_first_clients(tmp_path, opened):
    written(tmp_path / "data", [f"city {number:02d}" for number in range(40)])
    summary = summarised(opened("table", ByColumn(), **OPTIONS))
    console = Console(file=io.StringIO(), width=100)
    client_data.show(console, summary)
    lines = [line.split() for line in console.file.getvalue().splitlines()]

    assert ["29", "city", "29", "5", "0", "1"] in lines and ["30", "city", "30", "5", "0", "1"] not in lines
    assert ["and", "10", "more,", "which", "--json", "lists"] in lines
    assert client_data.as_json(summary)["client_names"] == list(summary.client_names)


def test_names_are_read_by_number_and_slice():
    names = ClientNames(np.array([0, 1, 1, 2]), ["a", "b", "c", "d"])
    assert (len(names), names[0], names[1], names[2], names[:2]) == (3, "a", "b + c", "d", ["a", "b + c"])
    assert list(names) == ["a", "b + c", "d"]
    for client in (3, -1):
        with pytest.raises(IndexError, match=f"no client {client}; clients are numbered from 0 to 2"):
            names[client]
