"""Pretraining on a pool, recorded in MLflow."""

from __future__ import annotations

import math

from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.integrations.tracking.connection import experiment_id, opening, quiet_mlflow, tracking_uri
from raypfl.runs.pretraining import Pretraining


def record(experiment: Experiment, done: Pretraining) -> None:
    """A run with the settings, the mean loss, the seconds and the file of weights, unless tracking is off."""
    if not experiment.tracking.mlflow:
        return
    mlflow, uri = quiet_mlflow(), tracking_uri(experiment)
    with opening(uri):
        client = mlflow.MlflowClient(uri)
        where = experiment_id(client, experiment, uri)
    tags = {"pretraining": str(experiment.model.pretrain)}
    run = client.create_run(where, tags=tags, run_name=done.path.stem).info.run_id
    settings = done.about["settings"]
    augmentation, precision = settings["data"]["augmentation"], settings["training"]["precision"]
    shown = {"seed": settings["seed"], "augmentation": augmentation, "precision": precision}
    for key, value in flatten(settings["model"] | shown | {"data": done.about["data"]}).items():
        client.log_param(run, key, str(value)[:500])
    for name, number in (("loss", done.loss), ("seconds", done.seconds), ("samples", done.samples)):
        if number is not None and math.isfinite(number):
            client.log_metric(run, name, number)
    client.log_artifact(run, str(done.path))
    client.set_terminated(run)
