"""The launchers in cluster/: every file passes the tool or schema made for it, which forbids what it does not know."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raypfl.experiment import experiments
from raypfl.experiment.recipes import RECIPES

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
RAY_UP = ["aws", "on-premise"]
KUBERAY = ["kubernetes-cluster", "kubernetes-job"]
CRDS = os.environ.get("RAYPFL_KUBERAY_CRDS")
"""A folder with KubeRay's resource definitions, `ray.io_*.yaml`; they are 2 MB of another project."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def closed(schema: Any) -> Any:
    """A JSON schema that forbids unknown fields at every level that lists its fields."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema

    inner = {key: closed(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if is_open or "properties" not in schema:
        return inner
    return inner | {"additionalProperties": False}


def mistyped(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with one key misspelt, for each of its keys."""
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in entries:
        if isinstance(key, str):
            yield key, {(f"{k}x" if k == key else k): v for k, v in document.items()}
        if isinstance(value, (dict, list)):
            for name, changed in mistyped(value):
                rest = document | {key: changed} if isinstance(document, dict) else [changed]
                yield f"{key}.{name}", rest


@pytest.mark.parametrize("name", RAY_UP)
def test_ray_up_takes_the_file(name: str):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = read(name)
    validate_config(prepare_config(config))
    for target, source in config["file_mounts"].items():
        assert source.startswith("~") or (ROOT / source).exists(), target


@pytest.mark.parametrize("name", RAY_UP)
def test_no_command_of_a_cluster_stops_another_ray_or_opens_one_to_everybody(name: str):
    config = read(name)
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert len(starts) == 2 and not any("ray stop" in command or "0.0.0.0" in command for command in starts)
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert any("RAY_AUTH_MODE=token" in command and ".bashrc" in command for command in config["setup_commands"])


def ray_starts() -> Iterator[str]:
    """The options of every `ray start` in the launchers and their page."""
    launchers = [CLUSTER / f"{name}.yaml" for name in RAY_UP]
    for file in (*launchers, CLUSTER / "README.md", CLUSTER / "slurm.sh"):
        text = re.sub(r"\\\n", " ", file.read_text())
        yield from re.findall(r"^[^#`\n]*?\bray start (--[^`\n#]*)", text, re.MULTILINE)


def test_every_ray_start_has_options_that_ray_knows():
    from ray.scripts.scripts import start

    lines = list(ray_starts())
    assert len(lines) >= 7
    options = {option for parameter in start.params for option in parameter.opts}
    for line in lines:
        used = {word.partition("=")[0].rstrip("'") for word in line.split() if word.startswith("--")}
        assert used <= options, line


@pytest.mark.skipif(not CRDS, reason="RAYPFL_KUBERAY_CRDS names no folder with KubeRay's resource definitions")
@pytest.mark.parametrize("name", KUBERAY)
def test_kubernetes_takes_the_manifest(name: str):
    document = read(name)
    file = Path(CRDS or "") / f"ray.io_{document['kind'].lower()}s.yaml"
    definition = yaml.load(file.read_text(), yaml.CSafeLoader)
    versions = {f"ray.io/{version['name']}": version for version in definition["spec"]["versions"]}
    version = versions[document["apiVersion"]]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own

    validator = jsonschema.Draft202012Validator(schema)
    assert not list(validator.iter_errors(document))
    for key, wrong in mistyped({"spec": document["spec"]}):
        takes_any_key = "rayStartParams" in key or any(f"{limit}." in key for limit in ("requests", "limits"))
        assert takes_any_key or list(validator.iter_errors(document | wrong)), key


def test_a_job_has_the_cluster_that_stays_and_a_command_that_continues():
    cluster = read("kubernetes-cluster")["spec"]
    job = read("kubernetes-job")["spec"]
    assert job["rayClusterSpec"] == cluster

    versions = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    assert cluster["rayVersion"] == versions["ray"]

    head = cluster["headGroupSpec"]["template"]["spec"]
    program, command, recipe, *words = job["entrypoint"].split()
    (experiment,) = experiments(RECIPES.text(recipe), [word for word in words if "=" in word])
    (mount,) = head["containers"][0]["volumeMounts"]
    assert (program, command, words[-2]) == ("raypfl", "run", "--run-dir")
    assert {Path(words[-1]).parts[1], Path(experiment.output).parts[1]} == {Path(mount["mountPath"]).name}
    (volume,) = head["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == read("kubernetes-storage")["metadata"]["name"]


def lint(tool: str, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a linter of the environment, or another on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which(tool, path=path)
    assert program is not None, f"{tool} is not installed; it comes with raypfl[dev]"
    return subprocess.run([program, *options, str(file)], capture_output=True, text=True)


def test_shellcheck_finds_nothing_in_the_script_for_slurm():
    result = lint("shellcheck", CLUSTER / "slurm.sh")
    assert result.returncode == 0, result.stdout


def test_hadolint_finds_nothing_in_the_container_file():
    result = lint("hadolint", CLUSTER / "Containerfile", "--no-color")
    assert result.returncode == 0, result.stdout


def test_the_image_has_a_supported_python_and_all_files_that_the_package_needs():
    lines = (CLUSTER / "Containerfile").read_text().splitlines()
    (base,) = [line for line in lines if line.startswith("FROM ")]
    assert re.search(r"python:3\.1[123]-", base)

    copied = set()
    for line in lines:
        if line.startswith("COPY "):
            copied.update(shlex.split(line)[1:-1])
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "raypfl"} == copied


def test_the_page_names_every_file():
    page = (CLUSTER / "README.md").read_text()
    names = {file.name for file in CLUSTER.iterdir()} - {"README.md"}
    assert not [name for name in names if name not in page]
