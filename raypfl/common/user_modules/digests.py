"""Hashes of the user's own code, which what is stored is named after, so that edited code gets another name."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raypfl.common.user_modules.definitions import digest_of_definition
from raypfl.common.user_modules.files import location, names_in
from raypfl.common.user_modules.imports import imported_names


class _Source(NamedTuple):
    """A file of the user's own, as it was when this process imported it."""

    spec: object
    digest: str
    imports: list[tuple[str, Path]]


_imported: dict[Path, _Source] = {}
"""Python goes on with the code that it has imported when a file is edited, until a reload, which makes another spec."""


def source_digest(component: Any) -> str:
    """Return a hash of the code of a class or function, as a key for caches of its results.

    Hashed are the file that defines it and the user's own files that this imports, directly or not, as they were when
    this process imported them.
    """
    try:
        return _digest(_sources(component.__module__, Path(inspect.getfile(component))))
    except (TypeError, OSError):
        return os.urandom(16).hex()  # typed into a console, so it may have changed


def digests_named_in(values: Iterable[object]) -> dict[str, str]:
    """Return a hash of the code of each user's module that values of a description name, as in ``my_methods:Mine``.

    What is defined in a script or notebook that is running, ``__main__:Mine``, has a hash of its own.
    """
    digests = {}
    for module, name in dict.fromkeys(names_in(values)):
        if module == "__main__":
            digests[f"{module}:{name}"] = digest_of_definition(name, digest_of_module)
        else:
            digests[module] = digest_of_module(module)
    return {module: digest for module, digest in digests.items() if digest is not None}


def digest_of_module(module: str) -> str | None:
    """Return a hash of the code of a user's module, as `source_digest` does; None if it is installed or missing."""
    file = _file_of(module)
    return None if file is None else _digest(_sources(module, file))


def edited_files(modules: Iterable[str]) -> list[Path]:
    """Return the files of the user's modules, and of what these import, that differ from what this process imported."""
    edited: dict[Path, None] = {}
    for module in modules:
        file = _file_of(module)
        sources = {} if file is None else _sources(module, file)
        for path, source in sources.items():
            if source.spec is not None and not (path.is_file() and _hash(path) == source.digest):
                edited[path] = None
    return list(edited)


def _digest(sources: Mapping[Path, _Source]) -> str:
    digests = [source.digest for source in sources.values()]
    # Of one file, the hash of its content.
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _sources(module: str, file: Path) -> dict[Path, _Source]:
    """Return what is known of a module's file and of the user's own files that it imports, directly or not."""
    sources = {file: _source(module, file)}
    pending = [file]
    for importing in pending:
        for name, imported in sources[importing].imports:
            if imported not in sources:
                sources[imported] = _source(name, imported)
                pending.append(imported)
    return sources


def _source(module: str, file: Path) -> _Source:
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if file in _imported and _imported[file].spec is spec:
        return _imported[file]

    imports = []
    for name in imported_names(file, _package_of(module, file)):
        imported = _file_of(name)
        if imported is not None:
            imports.append((name, imported))
    source = _Source(spec, _hash(file), imports)
    if spec is not None:
        _imported[file] = source
    return source


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
    if name in sys.modules:
        return getattr(sys.modules[name], "__package__", None) or ""
    return name if file.name == "__init__.py" else name.rpartition(".")[0]
