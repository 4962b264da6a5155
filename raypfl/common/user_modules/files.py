"""The files of the user's own modules, which are installed nowhere and must go wherever an experiment goes.

Ray's runtime environment sends the modules that it is given. It does not find those that an experiment names, or what
they import, and of a folder it sends everything.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from raypfl.common.errors import ConfigError
from raypfl.common.user_modules.imports import imported_names

_ENTRY = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_INSTALLED = {"site-packages", "dist-packages"}
_LEFT_OUT = {"__pycache__", "mlruns", "mlartifacts", "node_modules"}


def modules_named_in(values: Iterable[object]) -> list[str]:
    """Return the modules that values of a description name, as in ``my_methods:Mine``."""
    return list(dict.fromkeys(module for module, _ in names_in(values)))


def names_in(values: Iterable[object]) -> list[tuple[str, str]]:
    """Return the modules that values of a description name, each with the name in it."""
    matches = (_ENTRY.fullmatch(value.strip()) for value in values if isinstance(value, str))
    return [(match[1], match[2]) for match in matches if match]


def module_files(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of these modules and their imports by path, without installed packages.

    Paths are relative to the folder that Python finds a module in. Environments, folders of runs, caches and what is
    hidden are left out.

    Raises
    ------
    ConfigError : if a link leads out of that folder.
    """
    pending = [_top(module) for module in modules]
    visited: set[str] = set()
    all_files: dict[str, Path] = {}
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)

        path = location(name)
        if path is not None:
            files = _files_of(path)
            all_files |= files
            for name_in_folder, file in files.items():
                if file.suffix == ".py":
                    package = ".".join(PurePosixPath(name_in_folder).parent.parts)
                    pending += map(_top, imported_names(file, package))
    return all_files


def copy_files(files: Mapping[str, Path], folder: Path) -> None:
    """Copy files to their paths in a folder."""
    for name, source in files.items():
        target = folder / PurePosixPath(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _files_of(path: Path) -> dict[str, Path]:
    """Return the files of a module, which is a file or a folder, by their paths from the folder that it is in."""
    root = path.parent.resolve()
    _refuse_leading_out(path, root)
    if path.is_file():
        return {path.name: path}
    return {file.relative_to(path.parent).as_posix(): file for file in sorted(_walk(path, path.resolve()))}


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_left_out(Path(parent, name))]
        names = [name for name in files if not name.startswith(".") and not name.endswith(".pyc")]
        for name in [*folders, *names]:
            _refuse_leading_out(Path(parent, name), root)
        yield from (Path(parent, name) for name in names)


def _is_left_out(folder: Path) -> bool:
    is_environment = (folder / "pyvenv.cfg").exists()
    is_run = (folder / "experiment.yaml").exists() and (folder / "metadata.json").exists()
    return folder.name.startswith(".") or folder.name in _LEFT_OUT or is_environment or is_run


def _refuse_leading_out(path: Path, root: Path) -> None:
    if path.is_symlink() and not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"{path} is a link that leads out of {root}, to {path.resolve()}; only what is inside goes to the cluster. "
            "Put the file itself there."
        )


def location(name: str) -> Path | None:
    """Return the file or folder of a module; None if it is installed, part of Python, or missing."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or name == "raypfl":
        return None

    folders = list(spec.submodule_search_locations or ())
    if folders:
        path = Path(folders[0])
    elif spec.has_location and spec.origin:
        path = Path(spec.origin)
    else:
        return None
    is_installed = bool(_INSTALLED & set(path.parts)) or path.is_relative_to(sysconfig.get_path("stdlib"))
    return None if is_installed else path


def _top(module: str) -> str:
    return module.partition(".")[0]
