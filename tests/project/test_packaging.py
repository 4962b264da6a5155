"""Versions, supported Pythons, extras and the licence are the same wherever they are published."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import bootstrap

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SUPPORTED = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
"""Versions of Python, the oldest first."""


def test_the_workflow_runs_the_repositorys_script_on_every_supported_python():
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["run"]
    unconditional = [step["run"] for step in job["steps"] if "run" in step and "if" not in step]
    assert unconditional == ["bash .ci/run"]
    assert job["strategy"]["matrix"]["python"] == SUPPORTED
    assert [SUPPORTED[0], SUPPORTED[-1]] == [bootstrap.dotted(bootstrap.OLDEST), bootstrap.dotted(bootstrap.NEWEST)]


def test_the_badges_name_the_supported_pythons_and_the_licence():
    python = (ROOT / "docs/images/badge-python.svg").read_text()
    licence = (ROOT / "docs/images/badge-licence.svg").read_text()
    assert f">{' | '.join(SUPPORTED)}<" in python and f">{PROJECT['license']}<" in licence


def test_the_version_is_the_one_to_cite():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def test_every_extra_is_pinned_and_on_the_page_on_installing():
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    page = (ROOT / "docs/install.md").read_text()
    for extra, requirements in PROJECT["optional-dependencies"].items():
        names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements} - {"raypfl"}
        assert not names - pinned and f"| `raypfl[{extra}]` |" in page


def test_no_file_names_a_package_index():
    for name in ["pyproject.toml", "constraints.txt", "Makefile", "bootstrap.py", ".ci/run", ".ci/package"]:
        assert not re.search(r"index.url|extra.index|find.links|simple[/]|^--", (ROOT / name).read_text(), re.MULTILINE)
