"""Where raypfl cannot be installed, a sentence says why, and nothing on the machine is changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bootstrap


def interpreter(path: Path, script: str) -> str:
    """An executable that stands for a Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = interpreter(tmp_path / "python3", "echo 3 9")
    monkeypatch.setattr(sys, "executable", old)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bootstrap.Refused, match=rf"needs Python 3.11, 3.12 or 3.13.*{old} is 3.9.*make PYTHON="):
        bootstrap.find_python()


def test_another_python_on_the_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path / "python3", "echo 3 9"))
    interpreter(tmp_path / "python3.12", "echo 3 12")
    interpreter(tmp_path / "python3.13", "echo does not work; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.find_python() == "python3.12"


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "DISK_GB", 1e6)
    with pytest.raises(bootstrap.Refused, match=r"take about 1000000 GB.*GB free.*make VENV=.*RAYPFL_DISK_GB=0"):
        bootstrap.main(str(tmp_path / "deep" / "venv"))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(bootstrap.Refused, match=r"is not empty, and not a virtual environment"):
        bootstrap.main(str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_environment_of_another_python_is_left_alone(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / "python", "echo 3 9")
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(bootstrap.Refused, match=r"is an environment of Python 3.9"):
        bootstrap.main(str(tmp_path))


def test_a_python_without_venv_names_the_package_to_install(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "python3", '[ "$1" = -c ] && echo 3 12')
    with pytest.raises(bootstrap.Refused, match=r"apt install python3.12-venv"):
        bootstrap.create(tmp_path / "venv", python)


def test_a_failed_installation_points_to_the_network() -> None:
    with pytest.raises(bootstrap.Refused, match=r"lines above say why.*network.*run the same command again"):
        bootstrap.attempt([sys.executable, "-c", "raise SystemExit(1)"])


def test_every_dependency_is_pinned() -> None:
    lines = (bootstrap.ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 100
    assert all(name and version for name, _, version in (pin.partition("==") for pin in pins))
