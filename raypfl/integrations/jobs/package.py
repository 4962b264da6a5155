"""The files that go with a job: its description and the user's own modules, and nothing else.

Ray packs a folder, sends it and puts it on the path of the job's processes (`runtime_env`). It takes everything in the
folder, also data, secrets and what links lead to. So the files are chosen here, and copied into a folder of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from raypfl.common.counting import counted
from raypfl.common.errors import ConfigError
from raypfl.common.user_modules import module_files

LIMIT = 100 * 2**20
"""Most bytes that a Ray cluster accepts (``DASHBOARD_CLIENT_MAX_SIZE``), although Ray's documentation says 500 MiB."""


def collect(files: Iterable[str], modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of a package, by their paths in it.

    Parameters
    ----------
    files : YAML files, in the current folder or below it.
    modules : names of modules. What they import goes along, unless it is installed.

    Raises
    ------
    ConfigError : if a file is outside the current folder, a link leads out of its folder, or all are too large.
    """
    package = {inside(file): Path(file) for file in files} | module_files(modules)
    _refuse_too_large(package)
    return package


def inside(file: str) -> str:
    """Return the path of a file in the package, which is its path from the current folder."""
    folder = Path.cwd().resolve()
    path = Path(file).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"{file} is outside the current folder {folder}, and a job takes along nothing from outside: change to a "
            "folder that has all of it."
        )
    return path.relative_to(folder).as_posix()


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
    """Return the files of a package in a few words: ``mine.yaml, my_methods.py (2 files, 3 KiB)``."""
    if not package:
        return "no files"
    names = sorted(package)
    first_names = ", ".join(names[:4])
    if len(names) > 4:
        first_names += ", ..."
    size = sum(path.stat().st_size for path in package.values()) / 2**10
    return f"{first_names} ({counted(len(names), 'file')}, {size:.0f} KiB)"
