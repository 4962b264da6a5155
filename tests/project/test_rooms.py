"""Every room imports rooms above it in docs/architecture.md only; lazy imports and imports for types count."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of everything in the package."""
    files = {path.relative_to(ROOT).with_suffix(""): path for path in (ROOT / "raypfl").rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}


def imports(names: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> modules that it imports, anywhere in it."""
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted: list[str] = []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                whole = f"{node.module}.{{}}"
                wanted += [
                    whole.format(a.name) if whole.format(a.name) in names else str(node.module) for a in node.names
                ]
        found[name] = {one for one in wanted if one in names} - {name}
    return found


MODULES = modules()
IMPORTS = imports(MODULES)
SECTION = (ROOT / "docs/architecture.md").read_text().partition("## The rooms")[2].partition("\n## ")[0]
ROOMS = re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_page_lists_every_room():
    assert {path.name for path in (ROOT / "raypfl").iterdir() if (path / "__init__.py").exists()} == set(ROOMS)
    assert {room_of(name) for name in MODULES} <= {"", "__main__", "api", *ROOMS}, "a module lies outside of all rooms"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_rooms_above_it_only(room: str):
    allowed = {room, *ROOMS[: ROOMS.index(room)]}
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        if room_of(module) == room
        for other in others
        if room_of(other) not in allowed
    ]
    assert not wrong


def test_no_imports_form_a_circle():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda path: path.name)
def test_a_folder_has_less_than_two_thousand_lines(folder: Path):
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 2000
