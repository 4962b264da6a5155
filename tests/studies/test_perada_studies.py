"""The studies of PerAda's Tables 1 to 3 and 5 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import pytest

from raypfl.engine.prepared import Prepared
from raypfl.experiment import experiments
from raypfl.experiment.recipes import settings_of
from raypfl.integrations.tuning.sweep import load as load_sweep
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import Study, load
from tests.support.pages import blocks

SWEEPS = Path(__file__).parents[2] / "tune_configs"
NAMES = ("perada-table1", "perada-table2", "perada-table3", "perada-table5")

# Of the entries that the paper prints: how many, the sum of their means, the sum of their spreads.
PRINTED = {
    "perada-table1": (136, 8255.53, 631.86),
    "perada-table2": (27, 1679.24, 0),
    "perada-table3": (64, 4440.29, 84.23),
    "perada-table5": (12, 993.98, 201.25),
}
RUNS = {"perada-table1": 51, "perada-table2": 9, "perada-table3": 32, "perada-table5": 12}

# Clients a round, epochs, batch size, rounds, learning rate, lambda, and of the distillation: rate, steps, batch size.
VALUES = {
    "CIFAR-10": (8, 10, 64, 200, 0.01, 1.0, 1e-3, 500, 2048),
    "Office-Home": (None, 1, 128, 100, 0.05, 0.1, 1e-4, 100, 256),
    "CheXpert": (8, 1, 256, 30, 0.01, 1.0, 1e-5, 50, 128),
}


@cache
def study_of(name: str) -> Study:
    return load(name)[0]


@cache
def cells_of(name: str) -> list[StudyCell]:
    return plan(study_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_those_that_are_printed_and_every_method_is_run(name):
    study = study_of(name)
    places = product(study.methods, study.down or [""], study.across or [""], study.metrics)
    quoted = [one for place in places if (one := study.quoted(*place)) is not None]
    sums = [sum(getattr(one, part) or 0 for one in quoted) for part in ("value", "spread")]
    assert (len(quoted), *sums) == pytest.approx(PRINTED[name])
    assert len(cells_of(name)) == RUNS[name] and "2302.06637" in study.published.source


def test_gains_over_the_best_other_method_are_those_that_the_text_claims():
    study = study_of("perada-table1")
    others = [method for method in study.methods if not method.startswith("PerAda")]

    def gain(data: str, metric: str, rivals: list[str] = others) -> float:
        best = max(study.quoted(method, data, "", metric).value for method in rivals)
        return round(study.quoted("PerAda", data, "", metric).value - best, 2)

    cifar = [gain("CIFAR-10", metric) for metric in ("Local", "Global", "CIFAR-10.1", "CIFAR-10-C")]
    assert cifar == [1.08, 5.23, 4.53, 4.21]
    assert [gain("CheXpert", metric) for metric in ("Local", "Global")] == [4.85, 3.21]
    assert [gain("Office-Home", "Local"), gain("Office-Home", "Global", ["APFL"])] == [0.34, 0.22]


@pytest.mark.parametrize("data", list(VALUES))
def test_perada_has_the_values_of_the_paper(data):
    (cell,) = [one for one in cells_of("perada-table1") if (one.method, one.down) == ("PerAda", data)]
    one, method = cell.experiment, cell.experiment.method
    training = (one.cohort.size, one.training.epochs, one.training.batch_size, one.rounds, one.training.lr)
    assert (*training, method.lam, method.lr, method.steps, method.batch_size) == VALUES[data]
    assert one.training.momentum == one.training.weight_decay == 0 and method.weighting == "uniform"
    (without,) = [one for one in cells_of("perada-table1") if (one.method, one.down) == ("PerAda w/o KD", data)]
    assert (without.experiment.method.steps, without.experiment.method.lam) == (0, method.lam)


def test_a_block_that_lacks_a_column_of_another_can_be_run_alone():
    study = study_of("perada-table1")
    (cell,) = plan(select(study, ("PerAda", "officehome")))
    assert cell.down == "Office-Home" and "ood/cifar10_1" not in cell.experiment.evaluation.protocols


def test_methods_of_table_3_and_global_models_of_table_2_are_runs_of_table_1_where_settings_are_equal():
    first, second, third = ({cell.folder for cell in cells_of(name)} for name in NAMES[:3])
    assert len(first & second) == 5 and len(first & third) == 16


def test_the_settings_of_the_authors_code_join_the_study_by_the_file_on_the_page(tmp_path):
    (text,) = blocks("docs/perada.md", "yaml")
    (compared,) = [code for code in blocks("docs/records.md", "yaml") if "perada" in code]
    assert len(experiments(compared)) == 6
    (tmp_path / "release.yaml").write_text(text)
    study, reference = load(str(tmp_path / "release.yaml"))
    assert reference.name == "perada-table1" and len(study.methods) == 18
    (cell,) = plan(select(study, ("PerAda (release)", "cifar10")))
    model = Prepared(cell.experiment.override(["model.weights=null"]), Shape).model
    assert model.num_parameters == 1_413_258 and model.has_dropout
    assert (cell.experiment.method.lam, cell.experiment.method.distill_rounds) == (2.0, 30)


class Shape:
    """What a network needs to know of data."""

    input_shape, num_classes, kind = (3, 32, 32), 10, "classes"


def test_perada_trains_and_sends_an_eighth_of_what_the_other_methods_do():
    cells = {cell.method: cell.experiment for cell in cells_of("perada-table1") if cell.down == "CIFAR-10"}
    random = {name: one.override(["model.weights=null"]) for name, one in cells.items()}
    counts = {name: Prepared(one, Shape).model.num_parameters for name, one in random.items()}
    assert counts["PerAda"] == counts["PerAda w/o KD"] == 1_409_290
    adapted = {name: counts[name] for name in counts if name.endswith("(adapter)")}
    assert set(adapted.values()) == {11_181_642 + 1_404_160} and len(adapted) == 2
    rest = counts.keys() - adapted.keys() - {"PerAda", "PerAda w/o KD"}
    assert {counts[name] for name in rest} == {11_181_642}


def test_the_recipes_methods_start_from_one_body_and_differ_in_what_they_train():
    compared = experiments(settings_of("perada-digits"))
    assert {one.model.pretrain for one in compared} == {"body"} and len({str(one.data) for one in compared}) == 1
    kinds = {(one.method.__class__.__name__, one.model.trained, one.model.options["adapters"]) for one in compared}
    whole = {(name, None, "none") for name in ("Ditto", "FedAvgFT", "Local")}
    assert kinds == {("PerAda", "adapters, output layer", "bias"), *whole}


def test_table_5_trains_by_dp_sgd_at_the_papers_noise_and_plainly_without():
    cells = {(cell.method, cell.across): cell.experiment for cell in cells_of("perada-table5")}
    rates = {method: cells[method, "eps = inf"].training.lr for method in ("Ditto", "PerAda w/o KD", "PerAda")}
    assert rates == {"Ditto": 0.05, "PerAda w/o KD": 0.1, "PerAda": 0.2}
    noises = [cells["PerAda", name].privacy.noise for name in study_of("perada-table5").across]
    assert noises == [None, 0.8, 1.0, 1.5]
    one = cells["PerAda", "eps = 3.7"]
    assert (one.rounds, one.training.epochs, one.training.batch_size, one.method.batch_size) == (10, 1, 32, 32)
    assert (one.cohort.size, one.privacy.delta, one.privacy.unit, one.method.lr) == (None, 1e-5, "sample", 0.005)
    model = Prepared(one.override(["model.weights=null"]), Shape).model
    assert model.num_parameters == 599_050 and not model.mixes_rows


def test_the_searches_have_the_papers_grids_and_the_studys_settings():
    rates, weights = [0.0005, 0.001, 0.005, 0.01], {"lambda": [0.1, 1], "alpha": [0.1, 0.3, 0.5, 0.7]}
    own, others = (load_sweep(SWEEPS / name) for name in ("perada.yaml", "perada-baselines.yaml"))
    grids = {space.name: list(space.values) for space in own.spaces}
    assert grids == {"training.lr": rates, "method.lr": [1e-5, 1e-4, 1e-3, 1e-2], "method.lam": weights["lambda"]}
    searched = {space.name: list(space.values) for space in others.spaces}
    assert searched.keys() == {"method", "training.lr"} and searched["training.lr"] == rates
    for name, key in (("ditto", "lambda"), ("pfedme", "lambda"), ("mtl", "lambda"), ("apfl", "alpha")):
        tried = [one["alpha" if key == "alpha" else "lam"] for one in searched["method"] if one["name"] == name]
        assert tried == weights[key]
    cells = {cell.method: cell.experiment for cell in cells_of("perada-table1") if cell.down == "CIFAR-10"}
    whole = {method: one for method, one in cells.items() if "adapter" not in method and "PerAda" not in method}
    tried = [others.configured({"method": i, "training.lr": 3}) for i in range(len(searched["method"]))]
    assert {type(one.method) for one in tried} == {type(one.method) for one in whole.values()}
    assert all(one.method in [other.method for other in tried] for one in whole.values())
    best = own.configured({"training.lr": 3, "method.lr": 2, "method.lam": 1})
    assert best.method == cells["PerAda"].method
    for mine, theirs in ((best, cells["PerAda"]), (tried[0], cells["Ditto"])):
        assert all(
            getattr(mine, part) == getattr(theirs, part) for part in ("partition", "model", "cohort", "training")
        )
