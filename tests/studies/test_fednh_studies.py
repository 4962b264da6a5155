"""The studies of FedNH's Tables 1 to 3 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from torch import nn

from raypfl.engine.prepared import Prepared
from raypfl.experiment import Experiment
from raypfl.models import FlatModel
from raypfl.studies.cells import StudyCell, plan, select
from raypfl.studies.description import Study, load

NAMES = ("fednh-table1", "fednh-table2", "fednh-table3")
DATA = ("cifar10", "cifar100", "tiny_imagenet")

# Of the entries that the paper prints: how many, the sum of their means, the sum of their spreads.
PRINTED = {
    "fednh-table1": (168, 6771.94, 236.09),
    "fednh-table2": (27, 1373.58, 131.02),
    "fednh-table3": (156, 6542.18, 198.15),
}

# What all methods share. The clipping is that of the authors' code.
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
DRAWN = {
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


def study_of(name: str) -> Study:
    return load(name)[0]


@cache
def cells_of(name: str) -> list[StudyCell]:
    study = study_of(name)
    return plan(study)


def cells_on(name: str, data: str) -> list[StudyCell]:
    return [cell for cell in cells_of(name) if cell.experiment.data.name == data]


def has(values: dict, wanted: dict) -> bool:
    return {key: values[key] for key in wanted} == wanted


# The protocol


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_is_that_of_the_paper(name):
    methods, grid = set(METHODS) - LEFT_OUT[name], set()
    for cell in cells_of(name):
        values = cell.experiment.to_dict()
        grid.add((cell.method, values["data"]["name"], values["partition"]["alpha"], values["seed"]))
    alphas = (0.3,) if name == "fednh-table2" else (0.3, 1.0)
    assert grid == {(m, d, a, seed) for m in methods for d in DATA for a in alphas for seed in (0, 1, 2)}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_all_cells_are_trained_and_judged_as_in_the_paper(name, data):
    for cell in cells_on(name, data):
        values = cell.experiment.to_dict()
        assert values["rounds"] == 200
        assert has(values["training"], TRAINING | {"weight_decay": WEIGHT_DECAY[data]}), cell.label
        assert has(values["cohort"], {"size": None, "fraction": SHARE[name], "dropout": 0.0}), cell.label
        assert has(values["partition"], DRAWN), cell.label
        assert values["data"]["augmentation"] == []
        assert values["evaluation"]["every"] == 0
        assert sorted(values["evaluation"]["protocols"]) == ["global", "pm_l", "pm_v"]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_has_the_papers_options(name, data):
    for cell in cells_on(name, data):
        wanted = METHODS[cell.method]
        if (cell.method, data) == ("FedROD", "tiny_imagenet"):  # a hypernetwork does not fit into memory beside it
            wanted = wanted | {"head": "linear"}
        assert has(cell.experiment.to_dict()["method"], wanted), cell.label


class Shape:
    """What a network needs to know of data."""

    def __init__(self, name: str):
        side = 64 if name == "tiny_imagenet" else 32
        self.input_shape, self.kind = (3, side, side), "classes"
        self.num_classes = {"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200}[name]


def network(name: str, data: str, method: str) -> FlatModel:
    cell = next(cell for cell in cells_on(name, data) if cell.method == method)
    return Prepared(cell.experiment, Shape(data)).model


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize("name", NAMES)
def test_the_convolutional_network_has_the_published_count_and_no_norm(name, data):
    model = network(name, data, "FedAvg")
    assert model.num_parameters == 796_032 + 192 * Shape(data).num_classes
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
    one, two, three = ({c.folder: c for c in cells_of(name)} for name in NAMES)
    assert set(two) < set(one) and not set(three) & set(one)
    first, third = (next(c for c in some.values() if c.method == "FedNH") for some in (one, three))
    assert third.experiment == first.experiment.replace(name=third.experiment.name, cohort={"fraction": 0.3})


def written(key: str) -> str:
    """The YAML of the page on FedNH that has this key."""
    page = (Path(__file__).parents[2] / "docs/fednh.md").read_text()
    found = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (text,) = [one for one in found if re.search(f"^{key}:", one, re.MULTILINE)]
    return text


def test_the_protocol_on_the_page_is_that_of_the_study():
    told = Experiment.from_yaml(written("partition"))
    cell = next(c for c in cells_on("fednh-table1", "cifar10") if (c.method, c.across) == ("FedNH", "Dir(0.3)"))
    for part in ("rounds", "partition", "model", "cohort", "training"):
        assert getattr(told, part) == getattr(cell.experiment, part), part
    assert set(told.evaluation.protocols) == set(cell.experiment.evaluation.protocols)


def test_the_method_of_the_authors_code_joins_the_study_by_the_file_on_the_page(tmp_path):
    (tmp_path / "release.yaml").write_text(written("extends"))
    study, reference = load(str(tmp_path / "release.yaml"))
    assert reference.name == "fednh-table1"
    assert [*study.methods] == [*study_of("fednh-table1").methods, "FedNH (release)", "Ditto (release)"]
    cells = plan(select(study, ("FedNH (release)", "FedNH", "cifar10", "dir0.3")), ["seeds=1"])
    paper, release = (cell.experiment for cell in cells)
    theirs = {"scale": 1.0, "unit_means": True, "missing": "samples"}
    assert release.to_dict()["method"] == paper.to_dict()["method"] | theirs
    assert release.replace(method=paper.method) == paper


# The numbers


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_those_that_are_printed(name):
    study = study_of(name)
    places = product(study.methods, study.down or [""], study.across, study.metrics)
    quoted = [one for place in places if (one := study.quoted(*place)) is not None]
    sums = [sum(getattr(one, part) for one in quoted) for part in ("value", "spread")]
    assert (len(quoted), *sums) == pytest.approx(PRINTED[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_source_is_named_and_columns_stand_in_the_papers_order(name):
    study = study_of(name)
    assert "Table " + name[-1] in study.published.source and "2212.02758v2" in study.published.source
    if name == "fednh-table2":
        assert list(study.across) == ["CIFAR-10", "CIFAR-100", "TinyImageNet"]
        read = {"PM(L)": ("pm_l", "personal", "accuracy", "clients")}
    else:
        assert list(study.across) == ["Dir(0.3)", "Dir(1.0)"]
        read = {
            "GM": ("global", "global", "accuracy", "seeds"),
            "PM(V)": ("pm_v", "personal", "accuracy", "seeds"),
            "PM(L)": ("pm_l", "personal", "accuracy", "seeds"),
        }
    found = {heading: (m.protocol, m.model, m.value or "accuracy", m.spread) for heading, m in study.metrics.items()}
    assert found == read and list(found) == list(read)


def test_the_tables_have_the_identities_that_the_printed_ones_have():
    one, two, three = map(study_of, NAMES)
    for study in (one, three):
        for place in [(down, across) for down in study.down for across in study.across]:
            assert study.quoted("Ditto", *place, "GM") == study.quoted("FedAvg", *place, "GM")
            for metric in ("PM(V)", "PM(L)"):
                assert study.quoted("CReFF", *place, metric).value == study.quoted("FedAvg", *place, metric).value
    for method in two.methods:
        for data in two.across:
            fairness = two.quoted(method, "", data, "PM(L)")
            assert fairness.value == one.quoted(method, data, "Dir(0.3)", "PM(L)").value
    assert [best_of(one).count("FedNH"), best_of(three).count("FedNH")] == [14, 16]


def best_of(study: Study) -> list[str]:
    """The method with the highest published mean in each column of each block."""
    return [
        max(study.methods, key=lambda m: ((q := study.quoted(m, d, a, metric)) and q.value) or 0)
        for d in study.down
        for a in study.across
        for metric in study.metrics
    ]
