"""The studies of FedPTR's tables hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from raypfl.engine.prepared import Prepared
from raypfl.experiment import experiments
from raypfl.experiment.recipes import settings_of
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import Study
from raypfl.studies.table.entries import table_entries
from tests.support import studies
from tests.support.studies import ImageShape, published_numbers

# Table -> the number of entries that the paper prints, their sum, and the runs of the study.
# A slip in any digit of a study's file changes the sum.
PRINTED = {
    1: (126, 7374.53, 378),
    2: (28, 1505.36, 84),
    3: (8, 473.57, 24),
    4: (8, 446.12, 24),
    5: (6, 396.27, 18),
    6: (16, 923.12, 48),
    7: (5, 330.71, 15),
    8: (5, 342.13, 15),
    9: (7, 185.84, 21),
    12: (12, 728.14, 36),
}
ROUNDS = {"fashion_mnist": 200, "cifar10": 400, "cifar100": 1000, "tiny_imagenet": 1000}
PER_CLASS = {"fashion_mnist": 10, "cifar10": 10, "cifar100": 2, "tiny_imagenet": 1}


def study_of(table: int) -> Study:
    return studies.study_of(f"fedptr-table{table}")


def cells_of(table: int) -> list[StudyCell]:
    return studies.cells_of(f"fedptr-table{table}")


@pytest.mark.parametrize("table", list(PRINTED))
def test_published_numbers_are_those_that_are_printed_and_every_one_is_run(table):
    study = study_of(table)
    numbers = published_numbers(study)
    total = round(sum(number.value for number in numbers), 2)
    assert (len(numbers), total, len(cells_of(table))) == PRINTED[table]
    assert len(cells_of(table)) == study.seeds * len(numbers) and f"Table {table} " in study.published.source


@pytest.mark.parametrize("table", list(PRINTED))
def test_every_run_has_the_papers_training_and_reports_the_last_five_rounds(table):
    for cell in cells_of(table):
        experiment = cell.experiment
        data = experiment.data.name
        training = experiment.training
        local_training = (training.lr, training.momentum, training.batch_size, training.epochs)
        assert (*local_training, experiment.rounds) == (0.01, 0.5, 500, 1, ROUNDS[data])
        assert experiment.evaluation.every == 1 and study_of(table).metrics["accuracy"].last == 5

        participations = {(40, 0.25)} if table == 2 else {(10, 1), (10, 0.5), (10, 0.3)}
        assert (experiment.partition.clients, experiment.cohort.fraction) in participations

        method = experiment.method
        if hasattr(method, "outer_steps") and table not in (3, 6, 7, 8):  # those tables vary these options
            assert (method.outer_steps, method.inner_steps, method.every, method.window) == (20, 10, 1, 3)
            assert method.per_class == PER_CLASS[data]
        if hasattr(method, "project_steps"):
            assert (method.project_steps, method.project_lr, method.lam) == (5, 0.01, 0.05)


def test_the_claims_of_the_text_hold_in_table_1():
    def printed(method: str, column: str) -> float:
        return study_of(1).quoted(method, "100 %", column, "accuracy").value

    hard = "CIFAR-10 a=0.01"
    easy = "CIFAR-10 a=0.04"

    gains = {method: round(printed("FedPTR", hard) - printed(method, hard), 2) for method in ("FedDyn", "SCAFFOLD")}
    assert gains == {"FedDyn": 6.75, "SCAFFOLD": 12.46}

    drops = {method: round(printed(method, easy) - printed(method, hard), 2) for method in ("FedDC", "FedPTR-S")}
    assert drops == {"FedDC": 16.38, "FedPTR-S": 4.91}


def test_sizes_steps_and_frequencies_are_those_of_the_headings():
    def images_per_class(table: int) -> list[int]:
        return [cell.experiment.method.per_class for cell in cells_of(table) if cell.experiment.seed == 0]

    assert images_per_class(3) == [1, 5, 10, 15, 20, 1, 2, 3]
    assert images_per_class(8) == [1, 5, 10, 15, 20]

    steps = {cell.method: cell.experiment.method.outer_steps for cell in cells_of(6)}
    assert steps == {"H=5": 5, "H=10": 10, "H=20": 20, "H=30": 30}

    frequencies = {cell.method: cell.experiment.method.every for cell in cells_of(7)}
    assert frequencies == {"every 1": 1, "every 4": 4, "every 10": 10, "every 40": 40, "one-shot": 0}


def test_ablations_share_the_runs_of_table_1():
    folders = {table: {cell.folder for cell in cells_of(table)} for table in PRINTED}
    shared = {table: len(folders[1] & folders[table]) for table in (3, 4, 5, 6, 7, 8, 12)}
    assert shared == {3: 6, 4: 12, 5: 9, 6: 12, 7: 3, 8: 3, 12: 27}


def test_networks_have_the_papers_parameters():
    shapes = {
        "fashion_mnist": ImageShape((1, 28, 28), 10),
        "cifar10": ImageShape((3, 32, 32), 10),
        "cifar100": ImageShape((3, 32, 32), 100),
        "tiny_imagenet": ImageShape((3, 64, 64), 200),
    }

    counts = {}
    for table in (1, 9):
        for cell in plan(select(study_of(table), ["fedavg"])):
            data = cell.experiment.data.name
            counts[data] = Prepared(cell.experiment, shapes[data]).model.num_parameters

    assert counts == {"fashion_mnist": 317_706, "cifar10": 320_010, "cifar100": 504_420, "tiny_imagenet": 857_160}


def test_the_table_has_the_mean_of_the_last_five_rounds():
    study = study_of(7)
    cells = cells_of(7)
    accuracy = {round: round**2 / 100 for round in range(1, 9)}

    def summary(round: int) -> list[dict]:
        return [{"protocol": "global", "model": "global", "accuracy": accuracy[round]}]

    # No client was tested, so that nothing is drawn from clients.
    columns = {"round": list(accuracy), "protocol": ["global"] * 8, "model": ["global"] * 8, "client": [0] * 8}
    table = pa.table(columns | {"samples": [0] * 8, "accuracy": list(accuracy.values())})
    result = SimpleNamespace(evaluations=table, experiment=cells[0].experiment, summary=summary)
    entries = {entry.method: entry for entry in table_entries(study, study, cells, {0: result})}

    assert entries["every 1"].values == pytest.approx([np.mean([16, 25, 36, 49, 64])])
    assert entries["every 1"].missing == 2 and entries["every 4"].values == ()


def test_the_recipe_has_both_variants_and_both_controls():
    methods = [experiment.to_dict()["method"] for experiment in experiments(settings_of("fedptr-digits"))]
    names = {method["name"] for method in methods}
    assert {"fedptr", "fedptr-s", "fedavg", "fedprox", "scaffold", "feddyn", "feddc", "moon", "extra-images"} == names
    assert [method["guess"] for method in methods if method["name"] == "fedptr-s"] == ["matching", "line"]
