"""Pretraining on a pool, recorded in MLflow."""

from __future__ import annotations

import math

from raypfl.experiment import Experiment
from raypfl.experiment.assignments import flatten
from raypfl.integrations.tracking.connection import experiment_id, opening_database, quiet_mlflow, tracking_uri
from raypfl.runs.choices.pretraining import Pretraining


def record_pretraining(experiment: Experiment, pretraining: Pretraining) -> None:
    """Record the settings, the mean loss, the seconds and the file of weights as a run, unless tracking is off."""
    if not experiment.tracking.mlflow:
        return

    mlflow = quiet_mlflow()
    uri = tracking_uri(experiment)
    with opening_database(uri):
        client = mlflow.MlflowClient(uri)
        home = experiment_id(client, experiment, uri)
    tags = {"pretraining": str(experiment.model.pretrain)}
    run_id = client.create_run(home, tags=tags, run_name=pretraining.path.stem).info.run_id

    settings = pretraining.provenance["settings"]
    params = settings["model"] | {
        "seed": settings["seed"],
        "augmentation": settings["data"]["augmentation"],
        "precision": settings["training"]["precision"],
        "data": pretraining.provenance["data"],
    }
    for key, value in flatten(params).items():
        client.log_param(run_id, key, str(value)[:500])

    metrics = {"loss": pretraining.loss, "seconds": pretraining.seconds, "samples": pretraining.samples}
    for name, number in metrics.items():
        if number is not None and math.isfinite(number):
            client.log_metric(run_id, name, number)

    client.log_artifact(run_id, str(pretraining.path))
    client.set_terminated(run_id)
