"""The documentation is true: its code runs, its links lead somewhere, and what it names exists."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pyarrow.compute as pc
import pytest

import raypfl
from raypfl.commands.cli import app
from raypfl.config.reference import SETTINGS, markdown
from raypfl.methods import METHODS, Local
from raypfl.recipes import settings_of
from tests.mlflow_support import with_database
from tests.support import Federation

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "cluster").glob("*.md"))]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.py"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def blocks(page: str, language: str) -> list[str]:
    """A page's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_readmes_experiment_is_two_methods_from_two_seeds():
    (text,) = blocks("README.md", "yaml")
    planned = raypfl.config.experiments(text)
    assert [(type(one.method).__name__, one.seed) for one in planned] == [
        ("FedAvg", 0), ("FedAvg", 1), ("Ditto", 0), ("Ditto", 1),
    ]  # fmt: skip


def test_the_experiment_for_those_who_come_from_elsewhere_is_two_methods_from_three_seeds():
    (text,) = blocks("docs/coming_from.md", "yaml")
    planned = raypfl.config.experiments(text)
    assert [type(one.method).__name__ for one in planned] == 3 * ["FedAvg"] + 3 * ["Ditto"]
    here = re.findall(
        r"\| ([^|]*) \|$", (ROOT / "docs/coming_from.md").read_text().split("## The same experiment")[1], re.M
    )
    settings = {name for cell in here for name in re.findall(r"`([a-z]+\.[a-z_]+)`", cell)}
    assert len(settings) > 5 and settings - set(SETTINGS) == {"partition.clients"}


@pytest.fixture
def my_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that a reader of docs/write_a_method.md has, in a folder that a reader would have it in."""
    (source,) = blocks("docs/write_a_method.md", "python")
    (tmp_path / "my_methods.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_methods", raising=False)
    return importlib.import_module("my_methods")


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
    (source,) = blocks("docs/own_network.md", "python")
    (tmp_path / "my_networks.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
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


def test_the_rules_of_the_guide_to_optimizers_train(tmp_path, monkeypatch):
    (source,) = blocks("docs/optimizers.md", "python")
    (tmp_path / "my_rules.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    rules = importlib.import_module("my_rules")
    clients = Federation().clients()
    begun = clients.evaluate(clients.initial, "train")["loss"].sum()
    for rule in (rules.Lion(), rules.Private(norm=0.5, noise=0.01)):
        trained = clients.sgd(clients.loss, clients.initial, optimizer=rule, lr=0.02, epochs=5)
        assert clients.evaluate(trained, "train")["loss"].sum() < begun


def test_the_million_clients_of_the_guide_to_data_are_learnt_from_and_a_thousand_are_tested(tmp_path, monkeypatch):
    (source,) = blocks("docs/data.md", "python")
    (tmp_path / "my_clients.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
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


def test_the_clients_of_the_last_round_are_told_from_the_others_as_the_page_on_fednh_says(capsys):
    (snippet,) = [code for code in blocks("docs/fednh.md", "python") if "cohort" in code]
    result = two_rounds(method="fednh")
    names = {"result": result, "pc": pc}
    exec(compile(snippet, "docs/fednh.md", "exec"), names)
    last = [row for row in result.evaluations.to_pylist() if row["round"] == 2 and row["model"] == "personal"]
    cohort = result.rounds["cohort"].to_pylist()[-1]
    expected = [row["accuracy"] for row in last if row["client"] in cohort and row["protocol"] == "local"]
    assert names["active"].filter(pc.field("protocol") == "local")["accuracy"].to_pylist() == expected
    assert 0 < len(expected) < len({row["client"] for row in last}) and "accuracy_mean" in capsys.readouterr().out


def test_the_scale_of_fednh_is_read_as_the_page_says(capsys):
    (snippet,) = [code for code in blocks("docs/fednh.md", "python") if "scale" in code]
    result = two_rounds(method="fednh", checkpoint={"every": 1, "keep": 2})
    names = {"result": result, "raypfl": raypfl}
    exec(compile(snippet, "docs/fednh.md", "exec"), names)
    assert list(names["scale"].values()) == [result.global_model()[-1].item()] and "scale" in capsys.readouterr().out
    assert [round for round, _ in names["by_round"]] == [1, 2] and names["by_round"][-1][1] in names["scale"].values()
    assert 0 < abs(names["by_round"][-1][1] - 30) < 5  # it was trained


@pytest.mark.usefixtures("ray_cluster")
def test_the_readmes_python_runs(tmp_path, monkeypatch, capsys):
    (snippet,) = [code for code in blocks("README.md", "python") if code.startswith("import raypfl")]
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "local  personal" in printed and "torch.Size([9610])" in printed


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # inside MLflow and torch
def test_the_guide_to_trackings_python_runs(tmp_path, mlflow_database, monkeypatch, capsys):
    import mlflow

    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(with_database(tmp_path / "runs", mlflow_database).parent)
    code = "".join(blocks("docs/tracking.md", "python"))
    try:
        exec(compile(code, "docs/tracking.md", "exec"), {})
    finally:
        mlflow.set_tracking_uri(None)  # the page sets it for the whole process
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([5, 10])") == 3 and "tags.seed" in printed


def test_the_readmes_method_is_the_packages():
    (shown,) = [code for code in blocks("README.md", "python") if "class " in code]
    package = ast.parse((ROOT / "raypfl/methods/personal_models/ditto.py").read_text())
    ours = next(node for node in package.body if isinstance(node, ast.ClassDef))
    ours.decorator_list, ours.body = [], ours.body[1:]  # but for its registration and docstring
    assert ast.dump(ast.parse(shown).body[-1]) == ast.dump(ours)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_class_on_a_page_can_be_made_of_what_the_page_imports(page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for i, code in enumerate(code for code in blocks(str(page), "python") if "class " in code):
        name = f"shown_{page.stem}_{i}"
        (tmp_path / f"{name}.py").write_text(code)
        assert [one for one in vars(importlib.import_module(name)).values() if getattr(one, "__module__", "") == name]


def test_every_method_has_a_row_and_an_example_that_an_experiment_takes():
    methods, *models = (block.splitlines() for block in blocks("docs/methods.md", "yaml"))
    examples = [type(raypfl.Experiment.from_yaml(line).method) for line in methods]
    assert [METHODS.name_of(example) for example in examples] == list(dict.fromkeys(map(METHODS.name_of, examples)))
    rows = re.findall(r"^\| `([\w-]+)` \| .*\|$", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
    assert set(METHODS) == {METHODS.name_of(example) for example in examples} and set(METHODS) <= set(rows)
    named = {raypfl.Experiment.from_yaml(line).model.name for block in models for line in block}
    assert named == {"resnet18", "vit_s_16"}


def commands() -> list[str]:
    """The commands of raypfl in blocks on pages that name no language."""
    pages = (re.split(r"^```(\w*)\n", page.read_text(), flags=re.MULTILINE) for page in PAGES)
    shown = [block for page in pages for language, block in zip(page[1::4], page[2::4], strict=True) if not language]
    lines = [line for block in shown for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("raypfl ")})


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_page_exists_and_its_settings_make_experiments(line: str):
    words = [word for word in shlex.split(line, comments=True)[1:] if not re.match("submit$|data$", word)]
    assert words[0] in {
        "--version",
        *(str(one.callback.__name__).strip("_") for one in app.registered_commands),
        "show",
    }
    if words[0] not in ("run", "show", "pretrain") or re.search(r"\bmy_\w+:|\.yaml\b", line):  # a file of the reader's
        return
    changes = [word for word in words if "=" in word and word[0] != "-"]
    named = [word for before, word in pairwise(words) if not re.search("=|^-", word) and before[:2] != "--"]
    assert raypfl.config.experiments(settings_of(*(named or ["digits"])), changes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    files = [(page.parent / target).resolve() for target in targets if target]
    assert not [file for file in files if not file.exists() and file.with_suffix(".py") not in TUTORIALS]


def test_the_page_of_settings_is_current():
    page = (ROOT / "docs/settings.md").read_text()
    assert page == markdown(), "write it again: python -m raypfl.config.reference > docs/settings.md"


def test_every_setting_is_on_the_page():
    described = raypfl.Experiment().to_dict()
    sections = {key: value for key, value in described.items() if isinstance(value, dict) and "name" not in value}
    names = {f"{key}.{name}" for key, value in sections.items() for name in value} | described.keys() - sections.keys()
    assert names - set(SETTINGS) == {"data", "model"} and {"data.root", "model.frozen"} <= set(SETTINGS)


def test_every_test_that_the_documentation_names_exists():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    settings = {name.rpartition(".")[2] for name in SETTINGS}
    assert not [name for name in sorted(named - settings) if f"def {name}(" not in tests]


def test_every_tutorial_has_a_place_in_the_navigation():
    placed = re.findall(r"- tutorials/(\w+)\.md", (ROOT / "docs/.nav.yml").read_text())
    assert sorted(placed) == [file.stem for file in TUTORIALS]
