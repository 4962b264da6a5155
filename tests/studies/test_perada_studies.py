"""The studies of PerAda's Tables 1 to 3 and 5 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment, experiments
from raypfl.experiment.recipes import settings_of
from raypfl.integrations.tuning.sweep import load as load_sweep
from raypfl.models import FlatModel
from raypfl.studies.cells import plan, select
from raypfl.studies.description import load
from tests.support.pages import blocks
from tests.support.studies import ImageShape, cells_of, published_numbers, study_of

SWEEPS = Path(__file__).parents[2] / "tune_configs"
NAMES = ("perada-table1", "perada-table2", "perada-table3", "perada-table5")

# The entries that the paper prints: their number, the sum of their means and the sum of their spreads.
# A slip in any digit of a study's file changes a sum.
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


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_those_that_are_printed_and_every_method_is_run(name):
    study = study_of(name)
    numbers = published_numbers(study)
    values = sum(number.value for number in numbers)
    spreads = sum(number.spread or 0 for number in numbers)
    assert (len(numbers), values, spreads) == pytest.approx(PRINTED[name])
    assert len(cells_of(name)) == RUNS[name] and "2302.06637" in study.published.source


def test_gains_over_the_best_other_method_are_those_that_the_text_claims():
    study = study_of("perada-table1")
    other_methods = [method for method in study.methods if not method.startswith("PerAda")]

    def gain(data: str, metric: str, rivals: list[str] = other_methods) -> float:
        best = max(study.quoted(method, data, "", metric).value for method in rivals)
        return round(study.quoted("PerAda", data, "", metric).value - best, 2)

    cifar = [gain("CIFAR-10", metric) for metric in ("Local", "Global", "CIFAR-10.1", "CIFAR-10-C")]
    assert cifar == [1.08, 5.23, 4.53, 4.21]
    assert [gain("CheXpert", metric) for metric in ("Local", "Global")] == [4.85, 3.21]
    assert [gain("Office-Home", "Local"), gain("Office-Home", "Global", ["APFL"])] == [0.34, 0.22]


@pytest.mark.parametrize("data", list(VALUES))
def test_perada_has_the_values_of_the_paper(data):
    by_method = {cell.method: cell.experiment for cell in cells_of("perada-table1") if cell.down == data}
    experiment = by_method["PerAda"]
    training = experiment.training
    method = experiment.method

    federation = (experiment.cohort.size, training.epochs, training.batch_size, experiment.rounds, training.lr)
    distillation = (method.lr, method.steps, method.batch_size)
    assert (*federation, method.lam, *distillation) == VALUES[data]
    assert training.momentum == training.weight_decay == 0 and method.weighting == "uniform"

    without_distillation = by_method["PerAda w/o KD"].method
    assert (without_distillation.steps, without_distillation.lam) == (0, method.lam)


def test_a_block_without_a_column_of_another_block_can_be_run_alone():
    study = study_of("perada-table1")
    (cell,) = plan(select(study, ("PerAda", "officehome")))
    assert cell.down == "Office-Home" and "ood/cifar10_1" not in cell.experiment.evaluation.protocols


def test_methods_of_table_3_and_global_models_of_table_2_are_runs_of_table_1_where_settings_are_equal():
    table1, table2, table3 = ({cell.folder for cell in cells_of(name)} for name in NAMES[:3])
    assert len(table1 & table2) == 5 and len(table1 & table3) == 16


def untrained_model(experiment: Experiment) -> FlatModel:
    """An experiment's network for CIFAR-10, without the download of its pretrained weights."""
    return Prepared(experiment.override(["model.weights=null"]), ImageShape()).model


def cifar10_experiments() -> dict[str, Experiment]:
    """Method -> its experiment in the CIFAR-10 block of Table 1."""
    return {cell.method: cell.experiment for cell in cells_of("perada-table1") if cell.down == "CIFAR-10"}


def test_the_file_on_the_page_adds_the_settings_of_the_authors_code_to_the_study(tmp_path):
    (text,) = blocks("docs/perada.md", "yaml")
    (tmp_path / "release.yaml").write_text(text)
    study, reference = load(str(tmp_path / "release.yaml"))
    assert reference.name == "perada-table1" and len(study.methods) == 18

    (cell,) = plan(select(study, ("PerAda (release)", "cifar10")))
    model = untrained_model(cell.experiment)
    assert model.num_parameters == 1_413_258 and model.has_dropout
    assert (cell.experiment.method.lam, cell.experiment.method.distill_rounds) == (2.0, 30)


@pytest.mark.thorough
def test_perada_trains_and_sends_an_eighth_of_what_the_other_methods_do():
    counts = {}
    for method, experiment in cifar10_experiments().items():
        counts[method] = untrained_model(experiment).num_parameters
    assert counts["PerAda"] == counts["PerAda w/o KD"] == 1_409_290

    adapted = {method for method in counts if method.endswith("(adapter)")}
    assert {counts[method] for method in adapted} == {11_181_642 + 1_404_160} and len(adapted) == 2

    whole = counts.keys() - adapted - {"PerAda", "PerAda w/o KD"}
    assert {counts[method] for method in whole} == {11_181_642}


def test_the_recipes_methods_start_from_one_body_and_differ_in_what_they_train():
    compared = experiments(settings_of("perada-digits"))
    assert {experiment.model.pretrain for experiment in compared} == {"body"}
    assert len({str(experiment.data) for experiment in compared}) == 1

    kinds = set()
    for experiment in compared:
        model = experiment.model
        kinds.add((experiment.method.__class__.__name__, model.trained, model.options["adapters"]))
    whole_networks = {(name, None, "none") for name in ("Ditto", "FedAvgFT", "Local")}
    assert kinds == {("PerAda", "adapters, output layer", "bias"), *whole_networks}


def test_table_5_trains_by_dp_sgd_at_the_papers_noise_and_plainly_without():
    by_place = {(cell.method, cell.across): cell.experiment for cell in cells_of("perada-table5")}
    rates = {method: by_place[method, "eps = inf"].training.lr for method in ("Ditto", "PerAda w/o KD", "PerAda")}
    assert rates == {"Ditto": 0.05, "PerAda w/o KD": 0.1, "PerAda": 0.2}
    noises = [by_place["PerAda", across].privacy.noise for across in study_of("perada-table5").across]
    assert noises == [None, 0.8, 1.0, 1.5]

    private = by_place["PerAda", "eps = 3.7"]
    training = private.training
    method = private.method
    assert (private.rounds, training.epochs, training.batch_size, method.batch_size) == (10, 1, 32, 32)
    assert (private.cohort.size, private.privacy.delta, private.privacy.unit) == (None, 1e-5, "sample")
    assert method.lr == 0.005

    model = untrained_model(private)
    assert model.num_parameters == 599_050 and not model.mixes_rows


def test_the_searches_have_the_papers_grids_and_the_studys_settings():
    rates = [0.0005, 0.001, 0.005, 0.01]
    lambdas = [0.1, 1]
    alphas = [0.1, 0.3, 0.5, 0.7]

    perada = load_sweep(SWEEPS / "perada.yaml")
    grid = {space.name: list(space.values) for space in perada.spaces}
    assert grid == {"training.lr": rates, "method.lr": [1e-5, 1e-4, 1e-3, 1e-2], "method.lam": lambdas}

    baselines = load_sweep(SWEEPS / "perada-baselines.yaml")
    baseline_grid = {space.name: list(space.values) for space in baselines.spaces}
    assert baseline_grid.keys() == {"method", "training.lr"} and baseline_grid["training.lr"] == rates
    choices = baseline_grid["method"]
    for name in ("ditto", "pfedme", "mtl"):
        assert [choice["lam"] for choice in choices if choice["name"] == name] == lambdas
    assert [choice["alpha"] for choice in choices if choice["name"] == "apfl"] == alphas

    table = cifar10_experiments()
    names = [name for name in table if "adapter" not in name and "PerAda" not in name]
    searched = [baselines.configured({"method": i, "training.lr": 3}) for i in range(len(choices))]
    searched_methods = [experiment.method for experiment in searched]
    assert {type(method) for method in searched_methods} == {type(table[name].method) for name in names}
    assert all(table[name].method in searched_methods for name in names)

    best = perada.configured({"training.lr": 3, "method.lr": 2, "method.lam": 1})
    assert best.method == table["PerAda"].method
    for from_search, from_study in ((best, table["PerAda"]), (searched[0], table["Ditto"])):
        for part in ("partition", "model", "cohort", "training"):
            assert getattr(from_search, part) == getattr(from_study, part)
