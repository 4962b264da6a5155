"""Hashes of what is defined in a notebook or a script."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from raypfl.common.user_modules import digests_named_in

CELLS = textwrap.dedent("""
    import functools

    import tools

    SCALE = 2
    UNUSED = 1

    class Base:
        def rate(self):
            return 0.1

    @functools.cache
    def scaled(value):
        return SCALE * value

    class Mine(Base):
        name = "mine"

        def train(self, value, power=1):
            super().rate()
            kinds = {"a", "b"}
            return [tools.shift(scaled(value) ** power) for _ in kinds]
""")


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)

    def digest_of(cells: str, tools: str = "def shift(value):\n    return value\n") -> str:
        (tmp_path / "tools.py").write_text(tools)
        sys.modules.pop("tools", None)
        notebook = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", notebook)
        exec(compile(cells, "<cell>", "exec", dont_inherit=True), notebook.__dict__)
        return digests_named_in(["fedavg", "__main__:Mine"])["__main__:Mine"]

    yield digest_of
    sys.modules.pop("tools", None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SCALE * value", "SCALE + value"),
        ("SCALE = 2", "SCALE = 3"),
        ("return 0.1", "return 0.2"),
        ('name = "mine"', 'name = "other"'),
        ("power=1", "power=2"),
        ("for _ in kinds", "for _ in sorted(kinds)"),
        ('"b"}', '"c"}'),
    ],
)
def test_an_edit_of_a_notebooks_method_or_of_what_it_uses_changes_its_hash(digest, before: str, after: str):
    assert before in CELLS
    assert digest(CELLS.replace(before, after)) != digest(CELLS)


def test_a_comment_or_a_cell_that_the_method_does_not_use_keeps_its_hash(digest):
    assert digest("# A comment.\n\n" + CELLS.replace("UNUSED = 1", "UNUSED = 2\nresults = []")) == digest(CELLS)


def test_a_hash_is_the_same_after_an_object_of_the_class_went_to_another_process(digest):
    before = digest(CELLS)
    method = vars(sys.modules["__main__"])["Mine"]
    method().__reduce_ex__(4)  # as pickle does, which keeps the names of slots in the class
    assert "__slotnames__" in vars(method)
    assert digests_named_in(["__main__:Mine"])["__main__:Mine"] == before


def test_an_edit_of_a_module_that_a_notebooks_method_uses_changes_its_hash(digest):
    assert digest(CELLS, "def shift(value):\n    return value + 1\n") != digest(CELLS)
