"""The studies of FedNH's Tables 1 to 3 hold the paper's protocol and its numbers, to the digit."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from raypfl.config import Experiment
from raypfl.models import FlatModel
from raypfl.server.setup import make_model
from raypfl.studies.cells import Cell, plan, select
from raypfl.studies.description import Study, load

NAMES = ("fednh-table1", "fednh-table2", "fednh-table3")
DATA = ("cifar10", "cifar100", "tiny_imagenet")

# What the paper prints, typed from it a second time: GM, PM(V), PM(L) of Dir(0.3), then those of Dir(1.0); in Table 2,
# PM(L) of CIFAR-10, CIFAR-100 and TinyImageNet.
PRINTED = {
    "fednh-table1": """
CIFAR-10
Local    –           42.79±2.45  71.57±1.82  –           41.20±1.27  58.34±1.03
FedAvg   66.40±3.13  63.10±1.33  84.08±2.31  73.07±1.60  68.07±1.23  79.12±2.11
FedPer   61.58±0.43  59.66±2.34  82.38±1.50  63.33±0.53  60.66±2.17  73.40±1.36
Ditto    66.40±3.13  53.69±1.11  80.08±2.17  73.07±1.60  61.22±1.77  74.78±2.16
FedRep   40.13±0.17  56.47±2.31  80.22±2.45  47.92±0.38  55.06±2.27  68.99±1.27
FedProto –           41.48±1.02  68.35±1.75  –           39.65±1.33  53.23±1.78
CReFF    66.46±1.40  63.10±2.16  84.08±2.31  71.63±0.61  68.07±1.44  79.12±2.11
FedBABU  62.78±3.09  60.58±2.16  82.64±1.03  70.34±1.72  65.49±1.44  77.35±1.80
FedROD   72.31±0.16  65.66±1.27  83.44±1.03  75.50±0.15  69.18±1.98  77.84±1.76
FedNH    69.01±2.51  65.02±1.23  84.63±2.11  75.34±0.86  69.64±1.15  79.53±2.14
CIFAR-100
Local    –           13.63±2.45  30.89±1.82  –           9.44±1.27   16.71±1.03
FedAvg   35.14±0.48  31.85±1.33  50.77±2.31  36.07±0.41  28.86±1.23  38.35±2.11
FedPer   15.04±0.06  16.15±2.34  33.10±1.50  14.69±0.03  11.61±2.17  19.08±1.36
Ditto    35.14±0.48  26.19±1.11  45.91±2.17  36.07±0.41  22.92±1.77  32.81±2.16
FedRep   5.42±0.03   13.59±2.31  29.45±2.45  6.37±0.04   9.47±2.27   16.07±1.27
FedProto –           10.64±1.02  19.11±1.75  –           9.24±1.33   12.61±1.78
CReFF    22.90±0.30  31.85±1.33  50.77±2.31  22.21±0.15  28.86±1.23  38.35±2.11
FedBABU  32.41±0.40  28.96±2.16  47.86±1.03  32.34±0.49  25.84±1.44  34.85±1.80
FedROD   33.83±0.25  28.53±1.27  42.93±1.03  35.20±0.19  27.58±1.98  33.44±1.76
FedNH    41.34±0.25  38.25±1.23  55.21±2.11  43.19±0.24  36.88±1.15  45.46±2.14
TinyImageNet
Local    –           7.55±2.45   19.94±1.82  –           5.10±1.27   9.93±1.03
FedAvg   34.63±0.26  27.35±1.33  44.97±2.31  37.65±0.37  28.82±1.23  37.15±2.11
FedPer   15.28±0.14  13.84±2.34  30.72±1.50  13.71±0.07  9.82±2.17   17.05±1.36
Ditto    34.63±0.26  23.85±1.11  42.67±2.17  37.65±0.37  24.97±1.77  34.70±2.16
FedRep   3.27±0.02   9.24±2.31   22.86±2.45  3.91±0.03   5.76±2.27   10.86±1.27
FedProto –           5.17±1.02   10.44±1.75  –           4.21±1.33   6.34±1.78
CReFF    25.82±0.41  27.35±1.33  44.97±2.31  27.87±0.38  28.82±1.23  37.15±2.11
FedBABU  26.36±0.32  20.85±2.16  37.96±1.03  30.25±0.32  22.74±1.44  31.01±1.80
FedROD   36.46±0.28  28.23±1.27  45.26±1.03  37.71±0.31  29.65±1.98  38.43±1.76
FedNH    36.71±0.36  30.99±1.23  46.14±2.11  38.68±0.30  30.58±1.15  38.25±2.14
""",
    "fednh-table2": """
Local    71.57±10.13 30.89±4.60  19.94±3.27
FedAvg   84.08±6.80  50.77±4.23  44.97±2.99
FedPer   82.38±6.38  33.10±4.26  30.72±3.21
Ditto    80.08±7.83  45.91±4.10  42.67±3.05
FedRep   80.22±7.06  29.45±4.19  22.86±3.20
FedProto 68.35±11.03 19.11±4.17  10.44±2.80
FedBABU  82.64±6.11  47.86±3.89  37.96±2.79
FedROD   83.44±5.89  42.93±4.10  45.26±2.72
FedNH    84.63±5.61  55.21±3.91  46.14±2.70
""",
    "fednh-table3": """
CIFAR-10
FedAvg   71.16±0.81  64.57±2.45  84.74±1.82  74.91±0.57  68.87±1.27  79.46±1.03
FedPer   57.54±0.29  57.20±1.33  80.73±2.31  60.14±0.18  56.00±1.23  69.65±2.11
Ditto    71.16±0.81  61.07±2.34  82.88±1.50  74.91±0.57  66.23±2.17  77.69±1.36
FedRep   44.08±0.09  55.71±1.11  79.75±2.17  48.11±0.07  54.39±1.77  68.43±2.16
FedProto –           46.08±2.31  71.87±2.45  –           43.19±2.27  57.94±1.27
CReFF    69.13±0.46  64.57±2.45  84.74±1.82  72.85±0.27  68.87±1.27  79.46±1.03
FedBABU  67.65±0.77  61.76±2.16  83.45±1.03  72.84±0.72  66.81±1.44  78.19±1.80
FedROD   73.41±0.13  66.47±1.27  83.80±1.03  76.10±0.08  69.77±1.98  78.32±1.76
FedNH    72.69±0.43  66.35±1.23  85.21±2.11  77.22±0.29  71.04±1.15  80.50±2.14
CIFAR-100
FedAvg   36.75±0.29  32.30±2.45  50.89±1.82  37.12±0.11  28.52±1.27  37.83±1.03
FedPer   10.29±0.05  14.35±1.33  31.04±2.31  10.81±0.02  10.23±1.23  17.41±2.11
Ditto    36.75±0.29  29.38±2.34  48.06±1.50  37.12±0.11  25.34±2.17  34.87±1.36
FedRep   4.61±0.01   13.22±1.11  29.33±2.17  5.58±0.02   9.29±1.77   15.98±2.16
FedProto –           14.56±2.31  28.25±2.45  –           10.98±2.27  16.40±1.27
CReFF    17.26±0.12  32.30±2.45  50.89±1.82  18.79±0.13  28.52±1.27  37.83±1.03
FedBABU  34.29±0.25  29.05±2.16  47.63±1.03  33.86±0.28  25.83±1.44  34.73±1.80
FedROD   34.17±0.15  28.20±1.27  42.82±1.03  35.05±0.10  26.92±1.98  32.94±1.76
FedNH    42.13±0.17  38.29±1.23  55.19±2.11  43.85±0.14  37.02±1.15  45.45±2.14
TinyImageNet
FedAvg   35.94±0.27  28.24±2.45  45.27±1.82  38.80±0.20  29.51±1.27  37.57±1.03
FedPer   8.26±0.06   11.34±1.33  27.15±2.31  8.84±0.06   7.73±1.23   14.17±2.11
Ditto    35.94±0.27  25.96±2.34  44.05±1.50  38.80±0.20  27.72±2.17  36.76±1.36
FedRep   2.09±0.02   8.80±1.11   22.20±2.17  2.43±0.02   5.33±1.77   10.24±2.16
FedProto –           8.28±2.31   19.18±2.45  –           6.05±2.27   10.22±1.27
CReFF    28.43±0.47  28.24±2.45  45.27±1.82  31.15±0.19  29.51±1.27  37.57±1.03
FedBABU  29.12±0.43  22.63±2.16  39.77±1.03  31.43±0.12  23.50±1.44  31.73±1.80
FedROD   37.20±0.25  28.03±1.27  45.11±1.03  38.81±0.19  27.43±1.98  36.45±1.76
FedNH    38.15±0.17  31.57±1.23  46.53±2.11  39.02±0.15  30.76±1.15  37.97±2.14
""",
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
DITTO = {"name": "ditto", "lam": 0.75, "personal_epochs": 5, "server_optimizer": "sgd", "server_lr": 1.0, **UNIFORM}
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
def cells_of(name: str) -> list[Cell]:
    study = study_of(name)
    return plan(study, select(study))


def cells_on(name: str, data: str) -> list[Cell]:
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
    return make_model(cell.experiment, Shape(data), torch.device("cpu"))


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
    page = (Path(__file__).parents[1] / "docs/fednh.md").read_text()
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
    assert reference.name == "fednh-table1" and len(study.methods) == 11
    cells = plan(study, select(study, ("FedNH (release)", "FedNH", "cifar10", "dir0.3")), ["seeds=1"])
    paper, release = (cell.experiment for cell in cells)
    theirs = {"scale": 1.0, "unit_means": True, "missing": "samples"}
    assert release.to_dict()["method"] == paper.to_dict()["method"] | theirs
    assert release.replace(method=paper.method) == paper


# The numbers


def printed(name: str) -> dict[tuple[str, str], list[str]]:
    """The entries of each method, by block."""
    rows, block = {}, ""
    for line in PRINTED[name].strip().splitlines():
        method, *entries = line.split()
        if entries:
            rows[block, method] = entries
        else:
            block = method
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_published_numbers_are_those_that_are_printed(name):
    study = study_of(name)
    columns = [(across, metric) for across in study.across for metric in study.metrics]
    wanted = printed(name)
    assert set(wanted) == {(down, method) for down in study.down or [""] for method in study.methods}
    for (down, method), entries in wanted.items():
        quoted = [study.quoted(method, down, *column) for column in columns]
        found = ["–" if one is None else f"{one.value:.2f}±{one.spread:.2f}" for one in quoted]
        assert found == entries, (down, method)


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
