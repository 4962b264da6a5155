"""Install raypfl and all it needs into a virtual environment: ``python3 bootstrap.py [FOLDER]``, by default `.venv`.

This file runs under any Python from 3.6 on, so that a user whose Python is too old gets a sentence rather than a
syntax error. Running it again is cheap, and repairs an interrupted installation.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OLDEST = (3, 11)
NEWEST = (3, 13)
DISK_GB = float(os.environ.get("RAYPFL_DISK_GB", "8"))


class Refused(Exception):
    """Why the installation cannot go on, and what to do about it."""


def main(folder: str) -> None:
    """Install into `folder`, which is created if need be; the file .installed in it is written last."""
    venv = Path(folder).absolute()
    # An interrupted installation leaves this file behind: its packages may be incomplete and yet look whole.
    unfinished = venv / ".unfinished"

    check_disk(venv, DISK_GB)
    if unfinished.exists():
        say("The last installation was interrupted; starting over, with the packages that it downloaded")
    elif venv.exists() and any(venv.iterdir()):
        check_environment(venv)

    if unfinished.exists() or not (venv / "pyvenv.cfg").exists():
        python = find_python()
        venv.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        create(venv, python)

    unfinished.touch()
    install(venv)
    unfinished.unlink()
    (venv / ".installed").touch()


def version_of(python: str) -> "tuple[int, ...] | None":
    """(major, minor) of an interpreter, or None if it does not run."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(int(part) for part in output.split())


def is_supported(version: "tuple[int, ...] | None") -> bool:
    return version is not None and OLDEST <= version <= NEWEST


def dotted(version: "tuple[int, ...]") -> str:
    return ".".join(str(part) for part in version)


def find_python() -> str:
    """This interpreter if raypfl runs on it, else a suitable one on the PATH."""
    unsuitable = []
    for name in [sys.executable, "python3.13", "python3.12", "python3.11", "python3", "python"]:
        version = version_of(name)
        if is_supported(version):
            return name
        if version:
            unsuitable.append(f"{shutil.which(name)} is {dotted(version)}")
    raise Refused(
        f"raypfl needs Python 3.11, 3.12 or 3.13, and finds none here ({', '.join(dict.fromkeys(unsuitable))}). "
        f"Install one from your system's packages or from python.org. If it is elsewhere: make "
        f"PYTHON=/path/to/python3.12"
    )


def check_environment(venv: Path) -> None:
    """Refuse a folder that is not an environment, or one whose Python does not run raypfl."""
    version = version_of(str(venv / "bin" / "python"))
    if not (venv / "pyvenv.cfg").exists():
        problem = "is not empty, and not a virtual environment either"
    elif version is None:
        problem = "is an environment whose Python does not start"
    elif not is_supported(version):
        problem = f"is an environment of Python {dotted(version)}, and raypfl needs 3.11, 3.12 or 3.13"
    else:
        return
    raise Refused(f"{venv} {problem}. Remove it, or choose another folder: make VENV=FOLDER")


def check_disk(venv: Path, needed_gb: float) -> None:
    """Refuse to start if the installation would fill the disk."""
    existing = next(folder for folder in [venv, *venv.parents] if folder.exists())
    free = shutil.disk_usage(str(existing)).free / 1e9
    installed = sum(file.lstat().st_size for file in venv.rglob("*")) / 1e9
    if free + installed < needed_gb:
        raise Refused(
            f"raypfl and its dependencies take about {needed_gb:.0f} GB, and the disk of {existing} has {free:.1f} GB "
            f"free. Free some space, choose a folder on another disk with make VENV=FOLDER, or try anyway with "
            f"RAYPFL_DISK_GB=0"
        )


def create(venv: Path, python: str) -> None:
    """Create an environment with pip, in place of nothing or of an interrupted installation."""
    say(f"Creating {venv} with {shutil.which(python)}")
    for part in ("bin", "lib"):
        shutil.rmtree(str(venv / part), ignore_errors=True)
    if subprocess.run([python, "-m", "venv", str(venv)]).returncode:
        package = f"python{dotted(version_of(python) or OLDEST)}-venv"
        raise Refused(
            f"The environment could not be created; the lines above say why. On Debian and Ubuntu, a package may be "
            f"missing: sudo apt install {package}"
        )


def install(venv: Path) -> None:
    """Install uv with pip, and all the rest with uv, which downloads and unpacks many packages at once."""
    python = str(venv / "bin" / "python")
    uv = venv / "bin" / "uv"
    if not uv.exists():
        say("Installing uv, which installs the rest")
        attempt([python, "-m", "pip", "install", "--quiet", "uv"])
    say(
        "Installing raypfl and its dependencies: a few GB, mostly PyTorch, downloaded once. This takes some minutes, "
        "during which nothing is printed"
    )
    start = time.monotonic()
    # Compile now, with all cores: otherwise, each process of the first run compiles thousands of modules by itself.
    options = ["--quiet", "--compile-bytecode", "--constraint", "constraints.txt"]
    attempt([str(uv), "pip", "install", "--python", python, *options, "--editable", ".[dev]"])
    say(f"Installed in {(time.monotonic() - start) / 60:.1f} minutes")


def attempt(command: "list[str]") -> None:
    if subprocess.run(command, cwd=str(ROOT)).returncode:
        raise Refused(
            "The installation failed; the lines above say why. If the cause is the network (none, or a proxy), fix "
            "that and run the same command again: nothing is downloaded twice."
        )


def say(text: str) -> None:
    print("--", text, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else str(ROOT / ".venv"))
    except Refused as refusal:
        sys.exit(f"\n{refusal}")
    except OSError as error:
        sys.exit(f"\nThe environment cannot be written: {error}.")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run the same command again to continue.")
