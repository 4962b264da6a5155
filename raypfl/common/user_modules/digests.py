"""Hashes of the user's own code, which what is stored is named after, so that edited code gets another name."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from raypfl.common.user_modules.files import location
from raypfl.common.user_modules.imports import imported_names


def source_digest(component: Any) -> str:
    """Return a hash of the code of a class or function, as a key for caches of its results.

    Hashed are the file that defines it and the user's own files that this imports, directly or not.
    """
    try:
        file = Path(inspect.getfile(component))
        module = sys.modules.get(component.__module__)
        return _digest(_code_files(file, getattr(module, "__package__", None) or ""))
    except (TypeError, OSError):
        return os.urandom(16).hex()  # typed into a console, so it may have changed


@functools.cache
def digest_of_module(module: str) -> str | None:
    """Return a hash of the code of a user's module, as `source_digest` does; None if it is installed or missing.

    It is read once in a process, which goes on with the code that it has imported when a file is edited.
    """
    file = _file_of(module)
    return None if file is None else _digest(_code_files(file, _package_of(module, file)))


def _digest(files: list[Path]) -> str:
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    # Of one file, the hash of its content.
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _code_files(file: Path, package: str) -> list[Path]:
    """Return a Python file, which is in this package, and the user's own files that it imports, directly or not."""
    files = [file]
    package_of = {file: package}
    for importing in files:
        for name in imported_names(importing, package_of[importing]):
            imported = _file_of(name)
            if imported is not None and imported not in package_of:
                package_of[imported] = _package_of(name, imported)
                files.append(imported)
    return files


def _file_of(name: str) -> Path | None:
    """Return the file of a user's module, without importing anything; None if there is none."""
    top, *parts = name.split(".")
    path = location(top)
    for part in parts:
        if path is not None:
            path = path / part if (path / part).is_dir() else path / f"{part}.py"
    file = path / "__init__.py" if path is not None and path.is_dir() else path
    return file if file is not None and file.is_file() and file.suffix == ".py" else None


def _package_of(name: str, file: Path) -> str:
    return name if file.name == "__init__.py" else name.rpartition(".")[0]
