"""The studies of PeFLL's Tables 1, 5, 6 and 7 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

import pytest

import raypfl
from raypfl.data.partitions.natural import ByColumn
from raypfl.engine.prepared import Prepared
from raypfl.studies.cells import plan, select
from tests.support.datasets import leaf
from tests.support.studies import ImageShape, cells_of, published_numbers, study_of

# The entries that the paper prints: their number, the sum of their means and the sum of their spreads.
# A slip in any digit of a study's file changes a sum.
PRINTED = {
    "pefll-table1a": (56, 3305.06, 31.89),
    "pefll-table1b": (49, 2783.36, 57.67),
    "pefll-table5": (18, 1282.9, 8.8),
    "pefll-table6": (12, 1044.8, 9.4),
    "pefll-table7": (12, 860.7, 7.7),
}
COHORT = {100: 5, 500: 23, 1000: 45}
"""Clients -> clients in a round."""

names = pytest.mark.parametrize("name", PRINTED)


@names
def test_the_printed_numbers_are_the_papers(name):
    numbers = published_numbers(study_of(name))
    count, mean, spread = PRINTED[name]
    assert len(numbers) == count and sum(number.value for number in numbers) == pytest.approx(mean)
    assert sum(number.spread for number in numbers) == pytest.approx(spread)


@names
def test_the_papers_numbers_are_masked_for_pefll_and_plain_for_other_methods(name):
    study = study_of(name)
    for method in study.methods:
        masked = name[-1] not in "ab" or method == "PeFLL"
        for group in study.across:
            assert (study.quoted(method, "", group, "masked") is not None) == masked
            assert (study.quoted(method, "", group, "accuracy") is not None) != masked
    assert {cell.experiment.evaluation.masks for cell in cells_of(name)} == {("zero",)}


@names
def test_all_cells_are_partitioned_trained_and_evaluated_as_in_the_paper(name):
    for cell in cells_of(name):
        experiment = cell.experiment
        data = experiment.data
        training = experiment.training

        if data.name == "femnist":
            assert experiment.partition == ByColumn() and (data.val_fraction, data.test_fraction) == (0.1, 0.1)
            cohort = 5
        else:
            classes = {"cifar10": 2, "cifar100": 10}[data.name]
            assert (data.val_fraction, experiment.partition.classes) == (0.2, classes)
            cohort = COHORT[experiment.partition.clients]
        assert data.unseen_fraction == 0.1

        assert (training.batch_size, training.momentum) == (32, 0 if cell.method == "pFedMe" else 0.9)
        assert list(experiment.evaluation.protocols) == ["local", "unseen"]
        if cell.method == "Local":
            assert (experiment.rounds, training.epochs, training.steps) == (1, 200, None)
            assert experiment.cohort.size is None
        else:
            assert (experiment.rounds, experiment.cohort.size) == (5000, cohort)
        if experiment.method.__class__.__name__ in ("PeFLL", "PFedHN"):
            assert training.steps == 50 and experiment.method.length is None  # a quarter of the clients


@names
def test_there_are_as_many_seeds_and_settings_as_in_the_paper(name):
    cells = cells_of(name)
    assert len({cell.folder for cell in cells}) == len(cells) == 3 * PRINTED[name][0]


def test_table_1b_is_read_from_the_runs_of_table_1a():
    seen = {cell.folder for cell in cells_of("pefll-table1a")}
    unseen = {cell.folder for cell in cells_of("pefll-table1b")}
    assert unseen < seen


def test_each_ablation_changes_its_option_and_nothing_else():
    def options(name: str, data: str) -> dict[str, dict]:
        cells = [cell for cell in cells_of(name) if cell.experiment.data.name == data]
        return {cell.method: cell.experiment.to_dict()["method"] for cell in cells}

    plain = options("pefll-table1a", "cifar10")["PeFLL"]
    assert options("pefll-table5", "cifar10") == {size: plain | {"size": size} for size in ("S", "M", "L")}
    assert options("pefll-table5", "cifar100")["L"] == plain | {"size": "L", "embedding": "linear"}

    kinds = {"MLP": "linear", "CNN": "cnn"}
    for data in ("cifar10", "cifar100"):
        assert options("pefll-table7", data) == {label: plain | {"embedding": kind} for label, kind in kinds.items()}

    methods = [cell.experiment.method for cell in cells_of("pefll-table6")]
    grid = {(method.lam_theta, method.lam_h, method.lam_v) for method in methods}
    assert grid == {(theta, lam, lam) for theta in (0, 5e-5, 5e-3, 0.5) for lam in (0, 1e-5, 1e-3)}


@pytest.mark.parametrize(
    ("data", "shape", "classes", "count"),
    [("cifar10", (3, 32, 32), 10, 121_182), ("femnist", (1, 28, 28), 62, 90_242)],
)
def test_the_clients_network_has_the_papers_count(data, shape, classes, count):
    cell = next(cell for cell in cells_of("pefll-table1a") if cell.experiment.data.name == data)
    assert Prepared(cell.experiment, ImageShape(shape, classes)).model.num_parameters == count


@pytest.mark.thorough
def test_femnists_column_trains_nine_of_ten_writers_in_leafs_files_and_evaluates_all(tmp_path):
    leaf(tmp_path / "all_data_0.json", {f"f{number:04}": [number, 2 * number, 1, 0, 5] for number in range(20)})
    in_folder = [f"data.root={tmp_path}", f"output={tmp_path / 'out'}", "engine.backend=inline"]
    study = select(study_of("pefll-table1a"), ["PeFLL", "FEMNIST n=3237"])
    [cell] = plan(study, ["seeds=1", "rounds=1", "training.steps=1", *in_folder])

    result = raypfl.run(cell.experiment)

    protocols = [row["protocol"] for row in result.evaluations.to_pylist()]
    assert (protocols.count("local"), protocols.count("unseen")) == (18, 2)
    assert result.rounds["clients"].to_pylist() == [5]
