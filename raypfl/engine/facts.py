"""Facts about a run that are found at its start, for its record."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from raypfl.common.version import __version__
from raypfl.engine.building.groups import groups_for
from raypfl.engine.job import Job
from raypfl.engine.prepared import Prepared
from raypfl.models.weights import origin


def facts_of(job: Job, prepared: Prepared) -> dict[str, Any]:
    """Return what ``metadata.json`` says of a run, except for what its backend adds."""
    task = prepared.task
    experiment = job.experiment
    facts = {
        "num_clients": task.num_clients,
        **_networks_of(prepared),
        "weights": origin(task.model.module),
        "executor": experiment.engine.executor,
        "channels_last": bool(experiment.training.channels_last),
        "why": job.why,
        "group_size": max(groups_for(experiment.engine, prepared.cohort_size)),
        "data": job.fingerprint,
        "server_device": str(task.model.device),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "raypfl": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    untested = int((task.num_test_samples[task.trained] == 0).sum())
    if 0 < untested < len(task.trained):
        facts["clients_without_test_samples"] = untested
    if experiment.attack is not None:
        facts["malicious_clients"] = experiment.attack.malicious(task.trained, experiment.seed).tolist()
    if job.code:
        facts["code"] = dict(job.code)
    if job.parent:
        facts["parent"] = dict(job.parent)
    return facts


def _networks_of(prepared: Prepared) -> dict[str, Any]:
    """Return the number of parameters or, of each architecture, that number and the clients that have it."""
    if prepared.architecture_of is None:
        return {"parameters": prepared.model.num_parameters}
    architectures = []
    for number, model in enumerate(prepared.architectures):
        clients = np.flatnonzero(prepared.architecture_of == number).tolist()
        architectures.append({"parameters": model.num_parameters, "clients": clients})
    return {"architectures": architectures}
