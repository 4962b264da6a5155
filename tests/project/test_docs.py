"""The documentation is true: its code does what it says, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import ast
import importlib
import math
import pydoc
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.compute as pc
import pytest
import yaml

import raypfl
from raypfl import Mean
from raypfl.data.datasets import RawData
from raypfl.experiment.reference import SETTINGS, markdown
from raypfl.methods import METHODS, Local
from tests.support.federation import Federation
from tests.support.pages import FENCED, PAGES, ROOT, blocks, write_files

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"://|^\.\./\.\./actions/")
"""Links that lead out of the repository; the latter is GitHub's page of the workflow's runs."""


def test_the_readmes_experiment_is_two_methods_from_two_seeds():
    (text,) = blocks("README.md", "yaml")
    planned = raypfl.experiment.experiments(text)
    planned_runs = [(type(experiment.method).__name__, experiment.seed) for experiment in planned]
    assert planned_runs == [("FedAvg", 0), ("FedAvg", 1), ("Ditto", 0), ("Ditto", 1)]


def test_the_experiment_for_those_who_come_from_elsewhere_is_two_methods_from_three_seeds():
    (text,) = blocks("docs/coming_from.md", "yaml")
    planned = raypfl.experiment.experiments(text)
    assert [type(experiment.method).__name__ for experiment in planned] == 3 * ["FedAvg"] + 3 * ["Ditto"]

    section = (ROOT / "docs/coming_from.md").read_text().split("## The same experiment")[1]
    last_column = "\n".join(re.findall(r"\| ([^|]*) \|$", section, re.MULTILINE))
    settings = set(re.findall(r"`([a-z]+\.[a-z_]+)`", last_column))
    assert len(settings) > 5 and settings - set(SETTINGS) == {"partition.clients"}


@pytest.fixture
def my_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that docs/write_a_method.md has its reader write, in the reader's folder."""
    return import_from_page("my_methods", tmp_path, monkeypatch)


def import_from_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module that a page has its reader write; the folder becomes the current one."""
    write_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def two_rounds(**changes) -> raypfl.Result:
    settings = {"engine": {"backend": "inline"}, "evaluation": {"every": 1}, "cohort": {"fraction": 0.5}}
    return raypfl.run(raypfl.Experiment(rounds=2, **settings, **changes))


def test_a_users_methods_take_under_twenty_and_under_forty_lines():
    first, second, *_ = blocks("docs/write_a_method.md", "python")
    assert len(first.splitlines()) < 20 and len(second.splitlines()) < 40


def test_the_first_method_of_the_guide_is_fedavg_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    my_fedavg = import_from_page("my_fedavg", tmp_path, monkeypatch)
    assert two_rounds(method=my_fedavg.MyFedAvg).weights_hash == two_rounds(method="fedavg").weights_hash


def test_the_method_of_the_guide_learns_and_is_charged_for_what_it_sends(my_methods):
    result = two_rounds(method={"name": "my_methods:PartlyPersonal", "mu": 0.1})
    losses = result.rounds["loss"].to_pylist()
    assert losses[1] < losses[0]
    assert pc.unique(result.ledger["numbers"]).to_pylist() == [9610 - 128 * 10 - 10]
    assert result.experiment.method == my_methods.PartlyPersonal(mu=0.1)


def test_the_method_of_the_guide_is_local_training_if_nothing_is_shared(my_methods):
    alone = two_rounds(method=my_methods.PartlyPersonal(personal="*"))
    assert alone.evaluations.equals(two_rounds(method=Local()).evaluations)


def test_the_check_of_the_guide_finds_a_method_that_mixes_the_clients_of_a_group(my_methods, monkeypatch):
    *_, check = blocks("docs/write_a_method.md", "python")
    exec(check, {})

    def train(self, clients, shared):
        reply = trained_apart(self, clients, shared)
        share = clients.num_samples / clients.num_samples.sum()
        return {"shared": Mean(reply["shared"].rows, weight=share)}

    trained_apart = my_methods.PartlyPersonal.train
    monkeypatch.setattr(my_methods.PartlyPersonal, "train", train)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        exec(check, {})


def test_the_generator_of_the_guide_is_sent_and_learns_and_with_strength_zero_trains_federated_averaging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    my_generator = import_from_page("my_generator", tmp_path, monkeypatch)
    result = two_rounds(method=my_generator.FromGenerator(), training={"precision": "fp64"})
    ledger = result.ledger.to_pylist()
    assert {(row["name"], row["numbers"]) for row in ledger} == {("theta", 9610), ("generator", 10_048)}
    assert max(result.logged["value"].to_pylist()) < math.log(10) - 0.3, "it guesses"

    without = two_rounds(method=my_generator.FromGenerator(strength=0.0))
    assert without.evaluations.equals(two_rounds(method="fedavg").evaluations)


def test_the_network_of_the_guide_learns_whole_or_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import_from_page("my_networks", tmp_path, monkeypatch)
    model = {"name": "my_networks:SmallCNN", "width": 4, "dropout": 0.1}
    for method in ("fedavg", {"name": "fedper", "personal": "head"}):
        losses = two_rounds(model=model, method=method).rounds["loss"].to_pylist()
        assert losses[1] < losses[0]


def test_clients_have_exactly_the_members_that_the_guide_documents():
    page = Path("docs/write_a_method.md").read_text()
    listed = page[page.index("`clients` ([`raypfl.Clients`]") : page.index("Each is documented there")]
    listed = re.sub(r"; `cohort`.*?\n\n", "\n", listed, flags=re.DOTALL)
    named = {*re.findall(r"`(\w+)[(`]", listed), *re.findall(r"\bclients\.(\w+)", page)} - {"clients", "py"}
    assert named == {name for name in dir(Federation().clients()) if not name.startswith("_")}


@pytest.mark.thorough
def test_a_run_on_the_million_clients_of_the_guide_to_data_learns_and_tests_a_thousand(tmp_path, monkeypatch):
    import_from_page("my_clients", tmp_path, monkeypatch)
    described = raypfl.Experiment(
        data="my_clients:Sensors",
        rounds=4,
        cohort={"size": 50},
        evaluation={"every": 0, "protocols": ("local",)},
        engine={"backend": "inline"},
    )

    result = raypfl.run(described)

    losses = result.rounds["loss"].to_pylist()
    assert losses[-1] < losses[0] - 0.1 and result.evaluations.num_rows == 1000


def test_the_clients_that_pfllib_wrote_keep_their_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text('{"num_clients": 3, "num_classes": 4, "alpha": 0.1}')
    draws = np.random.default_rng(0)
    for split, size in (("train", 6), ("test", 2)):
        (tmp_path / split).mkdir()
        for client in range(3):
            samples = {"x": draws.normal(size=(size + client, 1, 8, 8)), "y": draws.integers(4, size=size + client)}
            np.savez_compressed(tmp_path / split / f"{client}.npz", data=samples)

    import_from_page("pfllib_clients", tmp_path, monkeypatch)
    result = two_rounds(data={"name": "pfllib_clients:PFLlibClients", "root": str(tmp_path)})

    evaluated = [row["samples"] for row in result.evaluations.to_pylist() if row["protocol"] == "local"]
    assert evaluated == 2 * [2, 3, 4]  # in each round


def test_the_readmes_method_is_the_packages():
    (in_readme,) = [code for code in blocks("README.md", "python") if "class " in code]
    module = ast.parse((ROOT / "raypfl/methods/personal_models/ditto.py").read_text())
    in_package = next(node for node in module.body if isinstance(node, ast.ClassDef))

    # The README leaves out the registration, the docstring and the ranges of options.
    in_package.decorator_list = []
    in_package.body = in_package.body[1:]
    for option in in_package.body:
        if isinstance(option, ast.AnnAssign):
            option.annotation = option.annotation.slice.elts[0]

    assert ast.dump(ast.parse(in_readme).body[-1]) == ast.dump(in_package)


def test_every_method_has_a_row_and_the_examples_are_valid():
    rows = re.findall(r"^\| `([\w-]+)` \| .*\|$", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    assert set(METHODS) <= set(rows)

    method_block, _of_slices, *model_blocks = blocks("docs/methods.md", "yaml")
    examples = [type(raypfl.Experiment.from_yaml(line).method) for line in method_block.splitlines()]
    assert len(examples) == len(set(examples)) > 10

    model_lines = "".join(model_blocks).splitlines()
    models = {raypfl.Experiment.from_yaml(line).model.name for line in model_lines}
    assert models == {"resnet18", "vit_s_16"}


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if not ELSEWHERE.search(link)]
    files = [(page.parent / target).resolve() for target in targets if target]
    assert not [file for file in files if not file.exists()]


MEASURED = re.compile(r"\| *\d+\.\d+ *[%|±]")
ACCURACIES = re.compile(r"±|[Aa]ccuracy[^.]*%|\A\|.*accuracy")
SEVERAL = re.compile(r"\b(?:three|four|five|ten|[3-9]|\d\d) seeds\b|\bseeds[= ](?:[3-9]|\d\d)\b")


def tables_of_accuracies(page: str) -> list[tuple[str, str]]:
    """The prose since the heading or table before, and the table itself, of each table of measured accuracies."""
    tables = []
    for section in re.split(r"^#+ .*\n", FENCED.sub("", page), flags=re.MULTILINE):
        pieces = re.split(r"^((?:\|.*\n)+)", section, flags=re.MULTILINE)  # prose and tables alternate
        for i in range(1, len(pieces), 2):
            table = pieces[i]
            prose_of_section = "".join(pieces[0:i:2])
            if MEASURED.search(table) and (ACCURACIES.search(prose_of_section) or ACCURACIES.search(table)):
                tables.append((pieces[i - 1], table))
    return tables


def test_tables_of_accuracies_are_found_with_the_prose_above_them():
    table = "| | local |\n|---|---|\n| Ditto | 80.1 |\n"
    first = "\nAccuracy in %, three seeds:\n\n"
    second = "\nOther methods with seed 0:\n\n"
    page = f"# A title\n{first}{table}{second}{table}\n## Times\n\nSeconds:\n\n{table}"
    assert tables_of_accuracies(page) == [(first, table), (second, table)]
    assert SEVERAL.search(first) and SEVERAL.search("`raypfl run digits seeds=10`") and not SEVERAL.search(second)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_of_accuracies_has_three_seeds_or_more_except_among_the_records_of_single_runs(page):
    tables = tables_of_accuracies(page.read_text())
    if page.name in ("records.md", "results.md"):
        # Each says of which tables there is one seed.
        assert tables
        return
    assert not [table for prose, table in tables if not SEVERAL.search(prose)]


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs/settings.md").read_text()
    assert page == markdown(), "write it again: python -m raypfl.experiment.reference > docs/settings.md"


def test_every_setting_is_on_the_page():
    described = raypfl.Experiment().to_dict()
    sections = {key: value for key, value in described.items() if isinstance(value, dict) and "name" not in value}
    names = {f"{key}.{name}" for key, value in sections.items() for name in value} | described.keys() - sections.keys()
    assert names - set(SETTINGS) == {"data", "model"} and {"data.root", "model.frozen"} <= set(SETTINGS)


def test_every_test_that_the_documentation_names_exists():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    settings_and_fields = {name.rpartition(".")[2] for name in SETTINGS} | {field.name for field in fields(RawData)}
    assert not [name for name in sorted(named - settings_and_fields) if f"def {name}(" not in tests]


def test_every_tutorial_has_a_place_in_the_navigation():
    placed = re.findall(r"- tutorials/(\w+)\.md", (ROOT / "docs/.nav.yml").read_text())
    assert sorted(placed) == [file.stem for file in TUTORIALS]


def test_the_site_can_be_searched_from_disk_and_loads_no_script_from_elsewhere():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    scripts = site["extra"]["polyfills"]
    assert "offline" in site["plugins"], "browsers read no search index from disk, unless it is a script"
    assert any("iframe-worker" in script for script in scripts), "the plugin would load one from a server"
    assert all((ROOT / "docs" / script).is_file() for script in scripts)


def test_the_reference_names_what_exists():
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    names = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
    missing = [name for name in names if pydoc.locate(name) is None]
    assert len(names) > 10 and not missing
