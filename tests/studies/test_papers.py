"""Studies of papers: their networks, the files on their pages, and searches with the same settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import raypfl
from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.integrations.tuning.sweep import load as load_sweep
from raypfl.models import FlatModel
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import load
from tests.support.datasets import leaf
from tests.support.pages import blocks
from tests.support.studies import ImageShape, cells_of, study_of

SWEEPS = Path(__file__).parents[2] / "tune_configs"
SHAPES = {
    "cifar10": ImageShape(num_classes=10),
    "cifar100": ImageShape(num_classes=100),
    "tiny_imagenet": ImageShape((3, 64, 64), num_classes=200),
}


def fednh_cells(data: str) -> list[StudyCell]:
    return [cell for cell in cells_of("fednh-table1") if cell.experiment.data.name == data]


def fedavgs_network(data: str) -> FlatModel:
    cell = next(cell for cell in fednh_cells(data) if cell.method == "FedAvg")
    return Prepared(cell.experiment, SHAPES[data]).model


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
def test_fednhs_convolutional_network_has_the_published_count_and_no_norm(data):
    model = fedavgs_network(data)
    assert model.num_parameters == 796_032 + 192 * SHAPES[data].num_classes
    kinds = [type(layer).__name__ for layer in model.module.modules() if not list(layer.children())]
    assert not [kind for kind in kinds if "Norm" in kind]


def test_fednhs_residual_network_has_the_published_count_and_group_norms_of_two_groups():
    model = fedavgs_network("tiny_imagenet")
    assert model.num_parameters == 11_176_512 + 512 * 200
    norms = [layer for layer in model.module.modules() if "Norm" in type(layer).__name__]
    assert len(norms) == 20 and all(isinstance(norm, nn.GroupNorm) and norm.num_groups == 2 for norm in norms)
    first = next(layer for layer in model.module.modules() if isinstance(layer, nn.Conv2d))
    assert first.kernel_size == (7, 7) and first.stride == (2, 2)


def yaml_on_fednhs_page(key: str) -> str:
    """The YAML block of the page on FedNH that has this key."""
    yaml_blocks = blocks("docs/fednh.md", "yaml")
    (text,) = [block for block in yaml_blocks if re.search(f"^{key}:", block, re.MULTILINE)]
    return text


def test_the_protocol_on_the_page_of_fednh_is_that_of_the_study():
    on_page = Experiment.from_yaml(yaml_on_fednhs_page("partition"))
    cells = fednh_cells("cifar10")
    cell = next(cell for cell in cells if (cell.method, cell.across) == ("FedNH", "Dir(0.3)"))

    for part in ("rounds", "partition", "model", "cohort", "training"):
        assert getattr(on_page, part) == getattr(cell.experiment, part), part
    assert set(on_page.evaluation.protocols) == set(cell.experiment.evaluation.protocols)


def test_the_file_on_the_page_of_fednh_adds_the_method_of_the_authors_code_to_the_study(tmp_path):
    (tmp_path / "release.yaml").write_text(yaml_on_fednhs_page("extends"))
    study, reference = load(str(tmp_path / "release.yaml"))
    assert reference.name == "fednh-table1"
    assert [*study.methods] == [*study_of("fednh-table1").methods, "FedNH (release)", "Ditto (release)"]

    cells = plan(select(study, ("FedNH (release)", "FedNH", "cifar10", "dir0.3")), ["seeds=1"])
    paper, release = (cell.experiment for cell in cells)
    options_of_release = {"scale": 1.0, "unit_means": True, "missing": "samples"}
    assert release.to_dict()["method"] == paper.to_dict()["method"] | options_of_release
    assert release.replace(method=paper.method) == paper


# The numbers


def test_a_block_without_a_column_of_another_block_can_be_run_alone():
    study = study_of("perada-table1")
    (cell,) = plan(select(study, ("PerAda", "officehome")))
    assert cell.down == "Office-Home" and "ood/cifar10_1" not in cell.experiment.evaluation.protocols


def untrained_model(experiment: Experiment) -> FlatModel:
    """An experiment's network for CIFAR-10, without the download of its pretrained weights."""
    return Prepared(experiment.override(["model.weights=null"]), ImageShape()).model


def cifar10_experiments() -> dict[str, Experiment]:
    """Method -> its experiment in the CIFAR-10 block of Table 1."""
    return {cell.method: cell.experiment for cell in cells_of("perada-table1") if cell.down == "CIFAR-10"}


def test_the_file_on_the_page_of_perada_adds_the_settings_of_the_authors_code_to_the_study(tmp_path):
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


def test_peradas_searches_have_the_papers_grids_and_the_studys_settings():
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


@pytest.mark.thorough
def test_pefll_on_femnist_trains_nine_of_ten_writers_in_leafs_files_and_evaluates_all(tmp_path):
    leaf(tmp_path / "all_data_0.json", {f"f{number:04}": [number, 2 * number, 1, 0, 5] for number in range(20)})
    in_folder = [f"data.root={tmp_path}", f"output={tmp_path / 'out'}", "engine.backend=inline"]
    study = select(study_of("pefll-table1a"), ["PeFLL", "FEMNIST n=3237"])
    [cell] = plan(study, ["seeds=1", "rounds=1", "training.steps=1", *in_folder])

    result = raypfl.run(cell.experiment)

    protocols = [row["protocol"] for row in result.evaluations.to_pylist()]
    assert (protocols.count("local"), protocols.count("unseen")) == (18, 2)
    assert result.rounds["clients"].to_pylist() == [5]
