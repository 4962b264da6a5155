"""What a Python file imports, read from its text without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from raypfl.common.exclusive import exclusive


def imported_names(file: Path, package: str) -> Iterator[str]:
    """Yield the modules, and what else may be one, that a file in this package imports anywhere in it."""
    with suppress(SyntaxError, UnicodeDecodeError):
        # Python 3.11 fails if two threads make syntax trees at once.
        with exclusive:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from _with_packages(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    parts = package.split(".")
                    module = ".".join(filter(None, [*parts[: len(parts) + 1 - node.level], module]))
                for alias in node.names:
                    yield from _with_packages(f"{module}.{alias.name}")


def _with_packages(name: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` for ``a.b.c``, since an import runs the files of all three."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        yield ".".join(parts[:count])
