"""The studies of PeFLL's Tables 1, 5, 6 and 7 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import raypfl
from raypfl.data.partitions.natural import ByColumn
from raypfl.engine.prepared import Prepared
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import load
from tests.support.datasets import leaf

# Of the entries that the paper prints: how many, the sum of their means, the sum of their spreads.
PRINTED = {
    "pefll-table1a": (56, 3305.06, 31.89),
    "pefll-table1b": (49, 2783.36, 57.67),
    "pefll-table5": (18, 1282.9, 8.8),
    "pefll-table6": (12, 1044.8, 9.4),
    "pefll-table7": (12, 860.7, 7.7),
}
CLIENTS = {100: 5, 500: 23, 1000: 45}

names = pytest.mark.parametrize("name", PRINTED)


def cells_of(name: str) -> list[StudyCell]:
    study, _ = load(name)
    return plan(study)


@names
def test_the_printed_numbers_are_the_papers(name):
    study, _ = load(name)
    quoted = [study.quoted(method, "", *column) for method in study.methods for column in study.columns]
    quoted = [number for number in quoted if number is not None]
    count, mean, spread = PRINTED[name]
    assert len(quoted) == count and sum(q.value for q in quoted) == pytest.approx(mean)
    assert sum(q.spread for q in quoted) == pytest.approx(spread)


@names
def test_only_the_papers_numbers_of_pefll_stand_beside_masked_ones(name):
    study, _ = load(name)
    for method in study.methods:
        masked = name[-1] not in "ab" or method == "PeFLL"
        for group in study.across:
            assert (study.quoted(method, "", group, "masked") is not None) == masked
            assert (study.quoted(method, "", group, "accuracy") is not None) != masked
    assert {cell.experiment.evaluation.masks for cell in plan(study)} == {("zero",)}


@names
def test_all_cells_are_divided_trained_and_judged_as_in_the_paper(name):
    for cell in cells_of(name):
        e = cell.experiment
        if e.data.name == "femnist":
            assert e.partition == ByColumn() and (e.data.val_fraction, e.data.test_fraction) == (0.1, 0.1)
            per_round = 5
        else:
            classes, per_round = {"cifar10": 2, "cifar100": 10}[e.data.name], CLIENTS[e.partition.clients]
            assert (e.data.val_fraction, e.partition.classes) == (0.2, classes)
        assert e.data.unseen_fraction == 0.1
        assert (e.training.batch_size, e.training.momentum) == (32, 0 if cell.method == "pFedMe" else 0.9)
        assert list(e.evaluation.protocols) == ["local", "unseen"]
        if cell.method == "Local":
            assert (e.rounds, e.training.epochs, e.training.steps, e.cohort.size) == (1, 200, None, None)
        else:
            assert (e.rounds, e.cohort.size) == (5000, per_round)
        if e.method.__class__.__name__ in ("PeFLL", "PFedHN"):
            assert e.training.steps == 50 and e.method.length is None  # a quarter of the clients


@names
def test_seeds_and_settings_are_as_many_as_the_paper_has(name):
    cells = cells_of(name)
    assert len({cell.folder for cell in cells}) == len(cells) == 3 * PRINTED[name][0]


def test_table_1b_is_read_from_the_runs_of_table_1a():
    seen, unseen = ({cell.folder for cell in cells_of(f"pefll-table1{part}")} for part in "ab")
    assert unseen < seen


def test_ablations_change_what_they_are_about_and_nothing_else():
    def options(name: str, data: str) -> dict[str, dict]:
        return {c.method: c.experiment.to_dict()["method"] for c in cells_of(name) if c.experiment.data.name == data}

    plain = options("pefll-table1a", "cifar10")["PeFLL"]
    assert options("pefll-table5", "cifar10") == {size: plain | {"size": size} for size in ("S", "M", "L")}
    assert options("pefll-table5", "cifar100")["L"] == plain | {"size": "L", "embedding": "linear"}
    kinds = {"MLP": "linear", "CNN": "cnn"}
    for data in ("cifar10", "cifar100"):
        assert options("pefll-table7", data) == {label: plain | {"embedding": kind} for label, kind in kinds.items()}
    grid = {
        (m["lam_theta"], m["lam_h"], m["lam_v"])
        for m in (c.experiment.to_dict()["method"] for c in cells_of("pefll-table6"))
    }
    assert grid == {(theta, lam, lam) for theta in (0, 5e-5, 5e-3, 0.5) for lam in (0, 1e-5, 1e-3)}


@pytest.mark.parametrize(
    ("data", "shape", "classes", "count"),
    [("cifar10", (3, 32, 32), 10, 121_182), ("femnist", (1, 28, 28), 62, 90_242)],
)
def test_the_clients_network_has_the_papers_count(data, shape, classes, count):
    cell = next(c for c in cells_of("pefll-table1a") if c.experiment.data.name == data)
    images = SimpleNamespace(input_shape=shape, kind="classes", num_classes=classes)
    assert Prepared(cell.experiment, images).model.num_parameters == count


def test_femnists_column_trains_nine_of_ten_writers_in_leafs_files_and_judges_all(tmp_path):
    leaf(tmp_path / "all_data_0.json", {f"f{number:04}": [number, 2 * number, 1, 0, 5] for number in range(20)})
    here = [f"data.root={tmp_path}", f"output={tmp_path / 'out'}", "engine.backend=inline"]
    study = select(load("pefll-table1a")[0], ["PeFLL", "FEMNIST n=3237"])
    [cell] = plan(study, ["seeds=1", "rounds=1", "training.steps=1", *here])
    result = raypfl.run(cell.experiment)
    judged = [row["protocol"] for row in result.evaluations.to_pylist()]
    assert (judged.count("local"), judged.count("unseen")) == (18, 2)
    assert result.rounds["clients"].to_pylist() == [5]
