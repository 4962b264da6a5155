"""Every room imports rooms above it in docs/architecture.md only; lazy imports and imports for types count."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of every module of the package."""
    files = {}
    for path in (ROOT / "raypfl").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    return files


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module -> modules that it imports, anywhere in it."""
    imported: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    names.add(submodule if submodule in MODULES else str(node.module))
        imported[module] = (names & MODULES.keys()) - {module}
    return imported


MODULES = modules()
SECTION = (ROOT / "docs/architecture.md").read_text().partition("## The folders")[2].partition("\n## ")[0]
ROOMS = re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_page_lists_every_room():
    assert {path.name for path in (ROOT / "raypfl").iterdir() if (path / "__init__.py").exists()} == set(ROOMS)
    assert {room_of(name) for name in MODULES} <= {"", "__main__", "api", *ROOMS}, "a module lies outside of all rooms"


def test_no_two_public_classes_have_the_same_name():
    modules_of_class: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules_of_class.setdefault(node.name, []).append(module)
    assert {name: in_modules for name, in_modules in modules_of_class.items() if len(in_modules) > 1} == {}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_rooms_above_it_only(room: str):
    allowed = {room, *ROOMS[: ROOMS.index(room)]}
    wrong = []
    for module, imported in imports().items():
        if room_of(module) == room:
            wrong += [f"{module} imports {other}" for other in imported if room_of(other) not in allowed]
    assert not wrong


def test_no_imports_form_a_circle():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_folder_has_less_than_two_thousand_lines(folder: Path):
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 2000


TOP_LEVEL = """
.ci .github .gitignore CHANGELOG.md CITATION.cff CODE_OF_CONDUCT.md CONTRIBUTING.md LICENSE Makefile README.md
benchmarks bootstrap.py cluster constraints.txt docs mkdocs.yml pyproject.toml raypfl tests tune_configs
"""


def test_what_a_command_has_written_is_not_committed():
    listing = subprocess.run(["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a clone of the repository")
    assert set(listing.stdout.splitlines()) == set(TOP_LEVEL.split())
