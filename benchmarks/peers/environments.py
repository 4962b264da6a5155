"""An environment of its own for every system, made by uv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import raypfl

PACKAGES = ("flwr", "pfl", "fluke-fl", "torch", "ray", "numpy")
"""Packages whose versions are recorded, where they are installed."""

ASK = """
import importlib.metadata, json, platform, sys
versions = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try: versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: pass
print(json.dumps(versions))
"""


class Unavailable(Exception):
    """Raised with the reason why a system cannot be measured on this machine."""


@dataclass(frozen=True)
class Recipe:
    """What to install, and what to import to see that it works."""

    requirements: tuple[str, ...]
    imports: str
    newest_python: tuple[int, int] = (3, 13)


RECIPES = {
    "flower": Recipe(("flwr[simulation]",), "flwr.simulation, ray"),
    "pfl": Recipe(("pfl[pytorch]",), "pfl.model.pytorch", newest_python=(3, 12)),
    "fluke": Recipe(("fluke-fl",), "fluke.algorithms.ditto"),
}


@dataclass(frozen=True)
class Environment:
    """Where a system runs, and the versions there."""

    python: str
    versions: dict[str, str]


def environment(system: str, folder: Path, rebuild: bool = False) -> Environment:
    """The environment of a system, made in `folder` if it is not there; this one for raypfl and the bare loop.

    Raises
    ------
    Unavailable : if it cannot be installed.
    """
    if system not in RECIPES:
        return Environment(sys.executable, {"raypfl": raypfl.__version__} | versions(sys.executable))
    place = folder / system
    if rebuild or not (place / "ready.json").exists():
        _build(RECIPES[system], place)
    return Environment(str(place / "bin" / "python"), json.loads((place / "ready.json").read_text()))


def versions(python: str) -> dict[str, str]:
    """Name -> version of what matters in an environment."""
    return json.loads(subprocess.run([python, "-c", ASK, *PACKAGES], stdout=subprocess.PIPE, check=True).stdout)


def compile_modules(python: str, *folders: Path) -> None:
    """Have the bytecode of an environment's packages, and of modules in `folders`, on disk before anything is timed.

    There it is after a user's first run, or from the installation on. Without it half of a start-up is the compiler's,
    in every process anew: uv installs none, and $PYTHONDONTWRITEBYTECODE, as containers set it, keeps it from the disk.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    # Its exit code is no news: packages have templates, and modules for other Pythons, that are not compiled.
    subprocess.run([python, "-m", "compileall", "-qq", "-j", "0", packages, *map(str, folders)])


def find_uv() -> str:
    """The uv beside this Python, where bootstrap.py puts it, or another on the PATH.

    Raises
    ------
    Unavailable : if there is none.
    """
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise Unavailable(
            f"there is no uv beside {Path(sys.executable).name} or on the PATH to make an environment with; "
            "`make install` brings it, and so does `pip install uv`"
        )
    return uv


def _build(recipe: Recipe, place: Path) -> None:
    uv = find_uv()
    shutil.rmtree(place, ignore_errors=True)
    _attempt([uv, "venv", "--python", _python(recipe), str(place)])
    python = str(place / "bin" / "python")
    install = [uv, "pip", "install", "--python", python, *recipe.requirements]
    try:  # the torch that raypfl runs on here, so that systems differ and torch does not
        _attempt([*install, f"torch=={torch.__version__.partition('+')[0]}"])
    except Unavailable:
        _attempt([*install, "torch"])
    _attempt([python, "-c", f"import torch, {recipe.imports}"])
    (place / "ready.json").write_text(json.dumps(versions(python)))


def _python(recipe: Recipe) -> str:
    """This interpreter, unless the system does not run on one so new."""
    if sys.version_info[:2] <= recipe.newest_python:
        return sys.executable
    return ".".join(map(str, recipe.newest_python))


def _attempt(command: list[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    if result.returncode:
        lines = [line.strip() for line in result.stdout.splitlines() if line.strip()] or ["(it says nothing)"]
        raise Unavailable(f"it could not be installed: `{Path(command[0]).name} {command[1]}` says: {lines[-1]}")
