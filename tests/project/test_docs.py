"""The documentation is true: its code does what it says, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.compute as pc
import pytest
import yaml

import raypfl
from raypfl.experiment.reference import SETTINGS, markdown
from raypfl.methods import METHODS, Local
from tests.support.federation import Federation
from tests.support.pages import FENCED, PAGES, ROOT, blocks, write_files

TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
ELSEWHERE = re.compile(r"://|^\.\./\.\./actions/")  # the latter: GitHub's, of the repository that shows the page


def test_the_readmes_experiment_is_two_methods_from_two_seeds():
    (text,) = blocks("README.md", "yaml")
    planned = raypfl.experiment.experiments(text)
    assert [(type(one.method).__name__, one.seed) for one in planned] == [
        ("FedAvg", 0), ("FedAvg", 1), ("Ditto", 0), ("Ditto", 1),
    ]  # fmt: skip


def test_the_experiment_for_those_who_come_from_elsewhere_is_two_methods_from_three_seeds():
    (text,) = blocks("docs/coming_from.md", "yaml")
    planned = raypfl.experiment.experiments(text)
    assert [type(one.method).__name__ for one in planned] == 3 * ["FedAvg"] + 3 * ["Ditto"]
    here = re.findall(
        r"\| ([^|]*) \|$", (ROOT / "docs/coming_from.md").read_text().split("## The same experiment")[1], re.M
    )
    settings = {name for cell in here for name in re.findall(r"`([a-z]+\.[a-z_]+)`", cell)}
    assert len(settings) > 5 and settings - set(SETTINGS) == {"partition.clients"}


@pytest.fixture
def my_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a reader of docs/write_a_method.md has, in the folder that a reader works in."""
    return saved("my_methods", tmp_path, monkeypatch)


def saved(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    write_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def two_rounds(**changes) -> raypfl.Result:
    return raypfl.run(
        raypfl.Experiment(
            rounds=2, engine={"backend": "inline"}, evaluation={"every": 1}, cohort={"fraction": 0.5}, **changes
        )
    )


def test_a_method_of_ones_own_takes_under_forty_lines():
    (source,) = blocks("docs/write_a_method.md", "python")
    assert len(source.splitlines()) < 40


def test_the_method_of_the_guide_learns_and_is_charged_for_what_it_sends(my_methods):
    result = two_rounds(method={"name": "my_methods:PartlyPersonal", "mu": 0.1})
    losses = result.rounds["loss"].to_pylist()
    assert losses[1] < losses[0]
    assert pc.unique(result.ledger["numbers"]).to_pylist() == [9610 - 128 * 10 - 10]
    assert result.experiment.method == my_methods.PartlyPersonal(mu=0.1)


def test_the_method_of_the_guide_is_local_training_if_nothing_is_shared(my_methods):
    alone = two_rounds(method=my_methods.PartlyPersonal(personal="*"))
    assert alone.evaluations.equals(two_rounds(method=Local()).evaluations)


def test_the_network_of_the_guide_learns_whole_or_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved("my_networks", tmp_path, monkeypatch)
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


def test_the_million_clients_of_the_guide_to_data_are_learnt_from_and_a_thousand_are_tested(tmp_path, monkeypatch):
    saved("my_clients", tmp_path, monkeypatch)
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


def test_the_readmes_method_is_the_packages():
    (shown,) = [code for code in blocks("README.md", "python") if "class " in code]
    package = ast.parse((ROOT / "raypfl/methods/personal_models/ditto.py").read_text())
    ours = next(node for node in package.body if isinstance(node, ast.ClassDef))
    ours.decorator_list, ours.body = [], ours.body[1:]  # but for its registration, docstring and ranges
    for option in (node for node in ours.body if isinstance(node, ast.AnnAssign)):
        option.annotation = option.annotation.slice.elts[0]
    assert ast.dump(ast.parse(shown).body[-1]) == ast.dump(ours)


def test_every_method_has_a_row_and_an_example_that_an_experiment_takes():
    methods, *models = (block.splitlines() for block in blocks("docs/methods.md", "yaml"))
    examples = [type(raypfl.Experiment.from_yaml(line).method) for line in methods]
    assert [METHODS.name_of(example) for example in examples] == list(dict.fromkeys(map(METHODS.name_of, examples)))
    rows = re.findall(r"^\| `([\w-]+)` \| .*\|$", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    assert set(METHODS) == {METHODS.name_of(example) for example in examples} and set(METHODS) <= set(rows)
    named = {raypfl.Experiment.from_yaml(line).model.name for block in models for line in block}
    assert named == {"resnet18", "vit_s_16"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if not ELSEWHERE.search(link)]
    files = [(page.parent / target).resolve() for target in targets if target]
    assert not [file for file in files if not file.exists() and file.with_suffix(".py") not in TUTORIALS]


MEASURED = re.compile(r"\| *\d+\.\d+ *[%|±]")
ACCURACIES = re.compile(r"±|[Aa]ccuracy[^.]*%|\A\|.*accuracy")
SEVERAL = re.compile(r"\b(?:three|four|five|ten|[3-9]|\d\d) seeds\b|\bseeds[= ](?:[3-9]|\d\d)\b")


def tables_of_accuracies(page: str) -> list[tuple[str, str]]:
    """The prose since the heading or table before, and the table itself, of each table of measured accuracies."""
    found = []
    for section in re.split(r"^#+ .*\n", FENCED.sub("", page), flags=re.MULTILINE):
        pieces = re.split(r"^((?:\|.*\n)+)", section, flags=re.MULTILINE)
        for at in range(1, len(pieces), 2):
            above = "".join(pieces[0:at:2])
            if MEASURED.search(pieces[at]) and (ACCURACIES.search(above) or ACCURACIES.search(pieces[at])):
                found.append((pieces[at - 1], pieces[at]))
    return found


def test_tables_of_accuracies_are_found_with_the_prose_above_them():
    table = "| | local |\n|---|---|\n| Ditto | 80.1 |\n"
    first, second = "\nAccuracy in %, three seeds:\n\n", "\nOther methods with seed 0:\n\n"
    page = f"# A title\n{first}{table}{second}{table}\n## Times\n\nSeconds:\n\n{table}"
    assert tables_of_accuracies(page) == [(first, table), (second, table)]
    assert SEVERAL.search(first) and SEVERAL.search("`raypfl run digits seeds=10`") and not SEVERAL.search(second)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_table_of_accuracies_has_three_seeds_or_more_except_among_the_records_of_single_runs(page):
    tables = tables_of_accuracies(page.read_text())
    if page.name == "records.md":
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
    settings = {name.rpartition(".")[2] for name in SETTINGS}
    assert not [name for name in sorted(named - settings) if f"def {name}(" not in tests]


def test_every_tutorial_has_a_place_in_the_navigation():
    placed = re.findall(r"- tutorials/(\w+)\.md", (ROOT / "docs/.nav.yml").read_text())
    assert sorted(placed) == [file.stem for file in TUTORIALS]


def test_the_site_can_be_searched_from_disk_and_loads_no_script_from_elsewhere():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    scripts = site["extra"]["polyfills"]
    assert "offline" in site["plugins"], "browsers read no search index from disk, unless it is a script"
    assert any("iframe-worker" in script for script in scripts), "the plugin would load one from a server"
    assert all((ROOT / "docs" / script).is_file() for script in scripts)
