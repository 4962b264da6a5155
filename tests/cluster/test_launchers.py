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

DISK = {"DeviceName": str, "Ebs": {"VolumeSize": int, "VolumeType": str}}
MACHINE = {
    "resources": {},
    "min_workers": int,
    "max_workers": int,
    "node_config": {
        "InstanceType": str,
        "ImageId": str,
        "BlockDeviceMappings": [DISK],
        "InstanceMarketOptions": {"MarketType": str},
    },
}
PROVIDERS = {
    "local": {"provider": {"type": str, "head_ip": str, "worker_ips": [str]}},
    "aws": {
        "provider": {"type": str, "region": str, "cache_stopped_nodes": bool},
        "available_node_types": {"head": MACHINE, "worker": MACHINE},
    },
}
"""The parts of a file for `ray up` that Ray's own schema does not check: the keys that our files use, and types."""

RESOURCES = {"requests": {"cpu": str, "memory": str}, "limits": {"cpu": str, "memory": str, "nvidia.com/gpu": str}}
POD = {
    "securityContext": {"fsGroup": int},
    "containers": [
        {"name": str, "image": str, "resources": RESOURCES, "volumeMounts": [{"name": str, "mountPath": str}]}
    ],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}
GROUP = {"groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
TEMPLATE = {"rayStartParams": {}, "template": {"spec": POD}}
RAY_CLUSTER = {
    "rayVersion": str,
    "authOptions": {"mode": str, "secretName": str},
    "headGroupSpec": TEMPLATE,
    "workerGroupSpecs": [GROUP | TEMPLATE],
}
RAY_JOB = {
    "entrypoint": str,
    "backoffLimit": int,
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "rayClusterSpec": RAY_CLUSTER,
}
CLAIM = {"accessModes": [str], "resources": {"requests": {"storage": str}}}
KUBERNETES = {
    kind: {"apiVersion": str, "kind": str, "metadata": {"name": str, "generateName": str}, "spec": spec}
    for kind, spec in (("RayCluster", RAY_CLUSTER), ("RayJob", RAY_JOB), ("PersistentVolumeClaim", CLAIM))
}
"""The fields that our manifests use, of KubeRay's thousands; they serve where KubeRay's schemas are absent."""


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def unknown(value: Any, shape: Any, path: str = "") -> Iterator[str]:
    """The paths at which a value departs from a shape: a dict of known keys, a list of one shape, or a type."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in value.items():
            if key in shape:
                yield from unknown(inner, shape[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(shape, list) and isinstance(value, list):
        for item in value:
            yield from unknown(item, shape[0], path)
    elif not (isinstance(shape, type) and type(value) is shape):
        yield path


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
    shape = PROVIDERS[config["provider"]["type"]]
    assert not list(unknown({key: config[key] for key in shape}, shape))

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


@pytest.mark.parametrize("name", [*KUBERAY, "kubernetes-storage"])
def test_a_manifest_has_no_field_that_is_unknown(name: str):
    document = read(name)
    shape = KUBERNETES[document["kind"]]
    assert not list(unknown(document, shape))
    for key, wrong in mistyped(document):
        assert list(unknown(wrong, shape)), key


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
