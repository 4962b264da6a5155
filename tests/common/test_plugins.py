"""An installed package adds methods and other components by entry points."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import raypfl
from raypfl.cli.list_commands import CATALOGUES
from raypfl.common.errors import ConfigError
from raypfl.common.registry import Registry
from raypfl.methods import METHODS, FedAvg, Local
from tests.support.pages import blocks

SOURCE = """
from raypfl.methods import FedAvg, Local

class Alone(Local):
    "Training alone, from a package."
"""


def install(folder: Path, source: str, entry_points: str) -> None:
    """Write the files that an installer leaves in site-packages."""
    (folder / "federated_extras.py").write_text(source)
    metadata = folder / "federated_extras-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: federated-extras\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    monkeypatch.delitem(sys.modules, "federated_extras", raising=False)
    return tmp_path


def test_a_method_of_an_installed_package_is_found_by_its_name_listed_and_run(site: Path):
    install(site, SOURCE, "[raypfl.methods]\nalone = federated_extras:Alone\nfedavg = federated_extras:Alone\n")
    assert "alone" in METHODS and "alone" in list(METHODS)
    assert METHODS.summary("alone") == "Training alone, from a package."
    assert METHODS.get("fedavg") is FedAvg  # a name that raypfl has stays raypfl's

    experiment = raypfl.Experiment(
        method="alone", rounds=2, output=str(site / "runs"), engine={"backend": "inline"}, evaluation={"every": 1}
    )

    assert raypfl.Experiment.from_yaml(experiment.to_yaml()) == experiment and "name: alone" in experiment.to_yaml()
    assert raypfl.run(experiment).evaluations.equals(raypfl.run(experiment.replace(method=Local())).evaluations)


def test_the_entry_point_in_the_documentation_is_found(site: Path):
    (block,) = blocks("docs/plugins.md", "toml")
    project = tomllib.loads(block)["project"]
    ((group, entries),) = project["entry-points"].items()
    install(site, SOURCE, f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    assert METHODS.get("alone").__module__ == "federated_extras"


def test_every_kind_of_component_has_a_group(site: Path):
    install(site, SOURCE, "[raypfl.datasets]\nmine = federated_extras:Alone\n")
    assert list(Registry("data set")) == ["mine"] and not list(Registry("model"))


def test_the_documentation_names_the_group_of_every_kind_that_can_be_listed():
    groups = []
    for place in CATALOGUES.values():
        module, _, name = place.partition(":")
        catalogue = getattr(import_module(module), name)
        if isinstance(catalogue, Registry):
            groups.append(catalogue.group)

    rows = [line for line in Path("docs/plugins.md").read_text().splitlines() if line.startswith("| `raypfl.")]
    documented = re.findall(r"`(raypfl\.[a-z]+)`", "".join(row.split("|")[1] for row in rows))
    assert sorted(documented) == sorted(groups)


def test_a_package_that_cannot_be_imported_is_named(site: Path):
    install(site, "import nothing_of_the_kind", "[raypfl.methods]\nalone = federated_extras:Alone\n")
    with pytest.raises(ConfigError, match=r"method 'alone' of the package federated-extras.*nothing_of_the_kind"):
        raypfl.Experiment(method="alone")


def test_a_name_that_no_package_has_is_refused_with_the_nearest(site: Path):
    install(site, SOURCE, "[raypfl.methods]\nalone = federated_extras:Alone\n")
    with pytest.raises(ConfigError, match="did you mean 'alone'"):
        METHODS.get("alon")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_metods:Mine", r"No module named 'own_metods'. Did you mean 'own_methods:Mine'\?$"),
        ("own_methods:Mien", r"The module 'own_methods' has no 'Mien', .*; did you mean 'Mine'\?$"),
        ("nothing_near:Mine", r"Is the folder of the module on PYTHONPATH, or the current folder\?$"),
    ],
)
def test_a_misspelt_module_or_class_of_ones_own_is_refused_with_the_nearest(tmp_path, monkeypatch, name, sentence):
    (tmp_path / "own_methods.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=sentence):
        Registry("method").get(name)
