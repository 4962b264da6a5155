"""The studies of FedNH's Tables 1 to 3 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

import re
from itertools import product

import pytest
from torch import nn

from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.models import FlatModel
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import Study, load
from tests.support.pages import blocks
from tests.support.studies import ImageShape, cells_of, published_numbers, study_of

NAMES = ("fednh-table1", "fednh-table2", "fednh-table3")
DATA = ("cifar10", "cifar100", "tiny_imagenet")
SHAPES = {
    "cifar10": ImageShape(num_classes=10),
    "cifar100": ImageShape(num_classes=100),
    "tiny_imagenet": ImageShape((3, 64, 64), num_classes=200),
}

# The entries that the paper prints: their number, the sum of their means and the sum of their spreads.
# A slip in any digit of a study's file changes a sum.
PRINTED = {
    "fednh-table1": (168, 6771.94, 236.09),
    "fednh-table2": (27, 1373.58, 131.02),
    "fednh-table3": (156, 6542.18, 198.15),
}

# What all methods share. The paper names no clipping; this is that of the authors' code.
TRAINING = {
    "epochs": 5,
    "steps": None,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "nesterov": False,
    "clip_norm": 10.0,
    "schedule": "exponential",
    "decay": 0.99,
    "warmup_rounds": 0,
    "precision": "fp32",
}
PARTITION = {
    "name": "dirichlet",
    "clients": 100,
    "min_samples": 10,
    "tries": 10,
    "when_short": "move",
    "reserve": 0,
    "cap": None,
    "balanced": False,
}
WEIGHT_DECAY = {"cifar10": 1e-5, "cifar100": 1e-5, "tiny_imagenet": 1e-3}

UNIFORM = {"weighting": "uniform"}
LAST = {"order": "together", "body": "last", "finetune_epochs": 0, **UNIFORM}
FEDAVG = {"name": "partial", "personal": "", "frozen": "", **LAST}
FEDPER = {"name": "fedper", "personal": "output layer", "frozen": "", **LAST}
DITTO = {"name": "ditto", "lam": 0.75, "personal_epochs": 5, "server_optimizer": "sgd", "server_lr": None, **UNIFORM}
FEDREP = FEDPER | {"name": "fedrep", "order": "personal first", "personal_epochs": 10, "shared_epochs": 5}
FEDBABU = {"name": "fedbabu", "frozen": "output layer", "body": "average", "finetune_epochs": 5, **UNIFORM}
CREFF = {
    "name": "creff",
    "features": 100,
    "feature_steps": 100,
    "feature_lr": 0.01,
    "head_steps": 300,
    "head_lr": 0.01,
    **UNIFORM,
}
FEDROD = {"name": "fedrod", "head": "hypernetwork", "personal_epochs": 5, **UNIFORM}
FEDNH = {
    "name": "fednh",
    "rho": 0.9,
    "scale": 30.0,
    "train_scale": True,
    "share_scale": True,
    "head": "uniform",
    "normalise": True,
    "unit_means": False,
    "missing": "zero",
}
METHODS = {
    "Local": {"name": "local"},
    "FedAvg": FEDAVG,
    "FedPer": FEDPER,
    "Ditto": DITTO,
    "FedRep": FEDREP,
    "FedProto": {"name": "fedproto", "lam": 0.1},
    "CReFF": CREFF,
    "FedBABU": FEDBABU,
    "FedROD": FEDROD,
    "FedNH": FEDNH,
}
LEFT_OUT = {"fednh-table1": set(), "fednh-table2": {"CReFF"}, "fednh-table3": {"Local"}}
SHARE = {"fednh-table1": 0.1, "fednh-table2": 0.1, "fednh-table3": 0.3}


def cells_on(name: str, data: str) -> list[StudyCell]:
    return [cell for cell in cells_of(name) if cell.experiment.data.name == data]


def has(values: dict, expected: dict) -> bool:
    """Whether a dict has all these entries, besides others."""
    return {key: values[key] for key in expected} == expected


# The protocol


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_is_that_of_the_paper(name):
    methods = set(METHODS) - LEFT_OUT[name]
    alphas = (0.3,) if name == "fednh-table2" else (0.3, 1.0)

    grid = set()
    for cell in cells_of(name):
        values = cell.experiment.to_dict()
        grid.add((cell.method, values["data"]["name"], values["partition"]["alpha"], values["seed"]))

    assert grid == set(product(methods, DATA, alphas, (0, 1, 2)))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_all_cells_are_trained_and_evaluated_as_in_the_paper(name, data):
    for cell in cells_on(name, data):
        values = cell.experiment.to_dict()
        assert values["rounds"] == 200
        assert has(values["training"], TRAINING | {"weight_decay": WEIGHT_DECAY[data]}), cell.label
        assert has(values["cohort"], {"size": None, "fraction": SHARE[name]}), cell.label
        assert has(values["devices"], {"dropout": 0.0, "availability": None}), cell.label
        assert has(values["partition"], PARTITION), cell.label
        assert values["data"]["augmentation"] == []
        assert values["evaluation"]["every"] == 0
        assert sorted(values["evaluation"]["protocols"]) == ["global", "pm_l", "pm_v"]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_papers_options(name, data):
    for cell in cells_on(name, data):
        expected = METHODS[cell.method]
        if (cell.method, data) == ("FedROD", "tiny_imagenet"):
            expected = expected | {"head": "linear"}  # a hypernetwork does not fit into memory beside it
        assert has(cell.experiment.to_dict()["method"], expected), cell.label


def network(name: str, data: str, method: str) -> FlatModel:
    cell = next(cell for cell in cells_on(name, data) if cell.method == method)
    return Prepared(cell.experiment, SHAPES[data]).model


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize("name", NAMES)
def test_the_convolutional_network_has_the_published_count_and_no_norm(name, data):
    model = network(name, data, "FedAvg")
    assert model.num_parameters == 796_032 + 192 * SHAPES[data].num_classes
    kinds = [type(layer).__name__ for layer in model.module.modules() if not list(layer.children())]
    assert not [kind for kind in kinds if "Norm" in kind]


@pytest.mark.parametrize("name", NAMES)
def test_the_residual_network_has_the_published_count_and_group_norms_of_two_groups(name):
    model = network(name, "tiny_imagenet", "FedAvg")
    assert model.num_parameters == 11_176_512 + 512 * 200
    norms = [layer for layer in model.module.modules() if "Norm" in type(layer).__name__]
    assert len(norms) == 20 and all(isinstance(norm, nn.GroupNorm) and norm.num_groups == 2 for norm in norms)
    first = next(layer for layer in model.module.modules() if isinstance(layer, nn.Conv2d))
    assert first.kernel_size == (7, 7) and first.stride == (2, 2)


@pytest.mark.parametrize("name", NAMES)
def test_all_methods_on_one_data_set_have_one_network(name):
    for data in DATA:
        assert len({str(cell.experiment.model) for cell in cells_on(name, data)}) == 1
    assert network(name, "cifar10", "FedNH").num_parameters == 796_032 + 1_920 + 1  # and the scale


def test_table_2_is_read_from_the_runs_of_table_1_and_table_3_differs_in_participation():
    folders = [{cell.folder for cell in cells_of(name)} for name in NAMES]
    table1, table2, table3 = folders
    assert table2 < table1 and not table3 & table1

    few_clients = next(cell for cell in cells_of("fednh-table1") if cell.method == "FedNH").experiment
    more_clients = next(cell for cell in cells_of("fednh-table3") if cell.method == "FedNH").experiment
    assert more_clients == few_clients.replace(name=more_clients.name, cohort={"fraction": 0.3})


def yaml_on_page(key: str) -> str:
    """The YAML block of the page on FedNH that has this key."""
    yaml_blocks = blocks("docs/fednh.md", "yaml")
    (text,) = [block for block in yaml_blocks if re.search(f"^{key}:", block, re.MULTILINE)]
    return text


def test_the_protocol_on_the_page_is_that_of_the_study():
    on_page = Experiment.from_yaml(yaml_on_page("partition"))
    cells = cells_on("fednh-table1", "cifar10")
    cell = next(cell for cell in cells if (cell.method, cell.across) == ("FedNH", "Dir(0.3)"))

    for part in ("rounds", "partition", "model", "cohort", "training"):
        assert getattr(on_page, part) == getattr(cell.experiment, part), part
    assert set(on_page.evaluation.protocols) == set(cell.experiment.evaluation.protocols)


def test_the_file_on_the_page_adds_the_method_of_the_authors_code_to_the_study(tmp_path):
    (tmp_path / "release.yaml").write_text(yaml_on_page("extends"))
    study, reference = load(str(tmp_path / "release.yaml"))
    assert reference.name == "fednh-table1"
    assert [*study.methods] == [*study_of("fednh-table1").methods, "FedNH (release)", "Ditto (release)"]

    cells = plan(select(study, ("FedNH (release)", "FedNH", "cifar10", "dir0.3")), ["seeds=1"])
    paper, release = (cell.experiment for cell in cells)
    options_of_release = {"scale": 1.0, "unit_means": True, "missing": "samples"}
    assert release.to_dict()["method"] == paper.to_dict()["method"] | options_of_release
    assert release.replace(method=paper.method) == paper


# The numbers


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_those_that_are_printed(name):
    numbers = published_numbers(study_of(name))
    values = sum(number.value for number in numbers)
    spreads = sum(number.spread for number in numbers)
    assert (len(numbers), values, spreads) == pytest.approx(PRINTED[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_source_is_named_and_columns_stand_in_the_papers_order(name):
    study = study_of(name)
    assert "Table " + name[-1] in study.published.source and "2212.02758v2" in study.published.source
    if name == "fednh-table2":
        assert list(study.across) == ["CIFAR-10", "CIFAR-100", "TinyImageNet"]
        expected = {"PM(L)": ("pm_l", "personal", "accuracy", "clients")}
    else:
        assert list(study.across) == ["Dir(0.3)", "Dir(1.0)"]
        expected = {
            "GM": ("global", "global", "accuracy", "seeds"),
            "PM(V)": ("pm_v", "personal", "accuracy", "seeds"),
            "PM(L)": ("pm_l", "personal", "accuracy", "seeds"),
        }

    columns = {}
    for heading, metric in study.metrics.items():
        columns[heading] = (metric.protocol, metric.model, metric.value or "accuracy", metric.spread)
    assert columns == expected and list(columns) == list(expected)


def test_the_tables_have_the_identities_that_the_printed_ones_have():
    table1, table2, table3 = map(study_of, NAMES)

    # Ditto's global model is FedAvg's, and CReFF changes FedAvg's head only on the server.
    for study in (table1, table3):
        for place in product(study.down, study.across):
            assert study.quoted("Ditto", *place, "GM") == study.quoted("FedAvg", *place, "GM")
            for metric in ("PM(V)", "PM(L)"):
                assert study.quoted("CReFF", *place, metric).value == study.quoted("FedAvg", *place, metric).value

    # Table 2 prints the means of Table 1 again, with their spread over clients.
    for method, data in product(table2.methods, table2.across):
        fairness = table2.quoted(method, "", data, "PM(L)")
        assert fairness.value == table1.quoted(method, data, "Dir(0.3)", "PM(L)").value

    assert [best_methods(table1).count("FedNH"), best_methods(table3).count("FedNH")] == [14, 16]


def best_methods(study: Study) -> list[str]:
    """The method with the highest published mean in each column of each block."""

    def published(method: str, place: tuple[str, str, str]) -> float:
        number = study.quoted(method, *place)
        return 0.0 if number is None else number.value

    best = []
    for place in product(study.down, study.across, study.metrics):
        means = {method: published(method, place) for method in study.methods}
        best.append(max(means, key=means.__getitem__))
    return best
