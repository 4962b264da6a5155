"""The files that go with a job: its description, and the user's own modules. Nothing else, and nothing from outside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raypfl.common.errors import ConfigError
from raypfl.common.own_modules import own_files

LIMIT = 100 * 2**20
"""Bytes that a Ray cluster accepts (``DASHBOARD_CLIENT_MAX_SIZE``); its documentation says 500 MiB."""


def collect(files: Iterable[str], modules: Iterable[str]) -> dict[str, Path]:
    """Where each file of a package is, by its path in the package.

    Parameters
    ----------
    files : YAML files, in the current folder or below it.
    modules : names of modules; what they import goes along, unless it is installed.

    Raises
    ------
    ConfigError : if a file is outside the current folder, a link leads out of its folder, or all are too large.
    """
    package = {inside(file): Path(file) for file in files} | own_files(modules)
    _refuse_too_large(package)
    return package


def inside(file: str) -> str:
    """The path of a file in the package: its path from the current folder."""
    here, path = Path.cwd().resolve(), Path(file).resolve()
    if not path.is_relative_to(here):
        raise ConfigError(
            f"{file} is outside the current folder {here}, and a job takes along nothing from outside: change to a "
            "folder that has all of it."
        )
    return path.relative_to(here).as_posix()


def _refuse_too_large(package: Mapping[str, Path]) -> None:
    sizes = {name: path.stat().st_size for name, path in package.items()}
    if sum(sizes.values()) > LIMIT:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
        listed = "".join(f"\n  {sizes[name] / 2**20:8.1f} MiB  {name}" for name in largest)
        raise ConfigError(
            f"The job's files have {sum(sizes.values()) / 2**20:.1f} MiB, and Ray accepts {LIMIT / 2**20:g}. Move data "
            f"out of the folders of your modules, to storage that the cluster reads. The largest:{listed}"
        )


def listed(package: Mapping[str, Path]) -> str:
    """The files of a package in a few words: ``mine.yaml, my_methods.py (2 files, 3 KiB)``."""
    names: Sequence[str] = sorted(package)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    size = sum(path.stat().st_size for path in package.values()) / 2**10
    return f"{shown} ({len(names)} file{'s' * (len(names) != 1)}, {size:.0f} KiB)" if names else "no files"
